"""Log lines with a time: text for people, or one JSON object per line for programs.

Lines that nobody reads are left out: a full pipe to whoever collects the log would otherwise stop the whole service.
"""

from __future__ import annotations

import json
import logging
import select
from contextlib import suppress
from datetime import UTC, datetime
from io import UnsupportedOperation
from typing import Any, Literal, TextIO

log = logging.getLogger("dexter")
LogFormat = Literal["text", "json"]


class LogFormatter(logging.Formatter):
    """Formats the lines of a service; the JSON of a request has its fields instead of a message."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._is_json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if not self._is_json:
            return f"{time} {record.getMessage()}"
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        return json.dumps({"time": time, "level": record.levelname.lower(), **fields}, ensure_ascii=False)


class _UnreadFilter(logging.Filter):
    """Leaves out lines while there is no room for them, and tells how many were lost with the next that is written."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._num_lost = 0
        self._poll = select.poll()
        self._poll.register(stream.fileno(), select.POLLOUT)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line can be written now."""
        if not self._poll.poll(0):
            self._num_lost += 1
            return False
        if self._num_lost:
            record.msg = f"[{self._num_lost:,} lines before this one were not read and are lost] {record.msg}"
            self._num_lost = 0
        return True


def set_log_format(log_format: LogFormat) -> None:
    """Write the log of this library, and errors of uvicorn, in a format."""
    for handler in log.handlers:
        handler.setFormatter(LogFormatter(log_format))
        if isinstance(handler, logging.StreamHandler) and hasattr(select, "poll"):
            with suppress(UnsupportedOperation, OSError):  # not a file of the system
                handler.addFilter(_UnreadFilter(handler.stream))
    uvicorn_log = logging.getLogger("uvicorn")
    uvicorn_log.handlers[:] = log.handlers
    uvicorn_log.setLevel(logging.ERROR)  # its warnings are one per malformed request, from anyone


def log_request(
    request_id: str, method: str, route: str, status: int, milliseconds: float, num_bytes: int, key: str | None
) -> None:
    """Log one request; nothing in the line is chosen by the client but the method, which is a known one."""
    fields = {
        "request_id": request_id,
        "method": method,
        "route": route,
        "status": status,
        "ms": round(milliseconds, 1),
        "bytes": num_bytes,
        "key": key,
    }
    line = f"{request_id} {method} {route} {status} {milliseconds:.1f} ms {num_bytes} bytes {key or '-'}"
    log.log(logging.WARNING if status >= 500 else logging.INFO, "%s", line, extra={"fields": fields})
