"""API keys: who may predict, who may also change labels, and how many requests each may send.

A file of keys has one per line, `NAME:ROLE:SHA256` or `NAME:ROLE:SHA256:REQUESTS_PER_MINUTE`. It has the SHA-256 of a
key and not the key, so that whoever sees the file or a copy of it cannot use the service.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from dexter.errors import DexterError, ResourceError, UsageError

log = logging.getLogger("dexter")
Role = Literal["read", "edit"]
_MIN_KEY_LENGTH = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True)
class ApiKey:
    """A key by its hash."""

    name: str
    """Whose key it is: in the log, and in the history of the labels."""
    role: Role
    """`read` may do everything but change labels, `edit` everything."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    per_minute: int | None = None
    """Most requests in a minute; None: no limit."""


def make_key(name: str, key: str, role: Role = "edit", per_minute: int | None = None) -> ApiKey:
    """Return the entry of a key; refuse one that could be guessed."""
    if len(key) < _MIN_KEY_LENGTH:
        raise UsageError(
            f"an API key needs {_MIN_KEY_LENGTH} characters or more: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        )
    return ApiKey(name, role, _digest(key), per_minute)


def find_keys(file: Path | None, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Return the keys of a file, or the one in DEXTER_API_KEY, which is called "default" and may edit."""
    key = environment.get("DEXTER_API_KEY", "").strip()
    if file is not None and key:
        raise UsageError("keys come from --keys or from DEXTER_API_KEY, not from both: unset one of them")
    return read_keys(file) if file is not None else (make_key("default", key),) if key else ()


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """Read a file of keys; refuse one that others may read."""
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
                raise ResourceError(f"{file}: others may read or write this file of API keys: chmod 600 {file}")
            lines = opened.read(_MAX_FILE_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"{file}: the file of API keys cannot be read ({type(error).__name__})") from None
    keys = [
        _parse_key(line.strip(), f"{file}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ResourceError(f"{file}: the file of API keys is empty: write a line NAME:ROLE:SHA256 for each key")
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise ResourceError(f"{file}: two keys have the same {what}: remove one of them")
    return tuple(keys)


def _parse_key(line: str, place: str) -> ApiKey:
    name, role, digest, limit, *more = [*line.split(":"), "", "", ""]
    per_minute = int(limit) if limit.isascii() and limit.isdecimal() and len(limit) < 10 else None
    good_limit = not limit or (per_minute is not None and per_minute > 0)
    if any(more) or not (_NAME.fullmatch(name) and role in get_args(Role) and _SHA256.fullmatch(digest) and good_limit):
        # The line is not repeated: somebody may have written the key itself.
        raise ResourceError(
            f"{place}: expected NAME:ROLE:SHA256 or NAME:ROLE:SHA256:REQUESTS_PER_MINUTE, ROLE read or edit"
        )
    return ApiKey(name, "edit" if role == "edit" else "read", bytes.fromhex(digest), per_minute)


class KeyRing:
    """The keys of a service, and what is left of the limit of each.

    Args:
        keys: without any, everyone may do everything.
        file: where `reload` finds the keys.
    """

    def __init__(self, keys: Sequence[ApiKey], file: Path | None = None) -> None:
        self._keys, self._file = tuple(keys), file
        self._left: dict[str, tuple[float, float]] = {}
        """By name of a key: requests that it may still send, and when that was counted."""

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, sent: str) -> ApiKey | None:
        """Return the entry of a key; None if there is none."""
        digest, found = _digest(sent), None
        for key in self._keys:  # all of them, also after a match, so that the time tells nothing
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def charge(self, key: ApiKey, now: float | None = None) -> int:
        """Count a request of a key: 0 if it may be sent, otherwise the number of seconds to wait.

        A key may send a minute's requests at once, and after that as many as time allows.
        """
        if key.per_minute is None:
            return 0
        now = time.monotonic() if now is None else now
        left, counted = self._left.get(key.name, (float(key.per_minute), now))
        left = min(float(key.per_minute), left + (now - counted) * key.per_minute / 60)
        self._left[key.name] = (left - 1 if left >= 1 else left, now)
        return 0 if left >= 1 else max(1, math.ceil((1 - left) * 60 / key.per_minute))

    def reload(self) -> None:
        """Read the file again; if that fails, log why and keep the keys there are."""
        if self._file is None:
            return
        try:
            self._keys = read_keys(self._file)
            log.info("%s: %d API keys read", self._file, len(self._keys))
        except DexterError as error:
            log.error("%s: the old keys stay in use", error)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
