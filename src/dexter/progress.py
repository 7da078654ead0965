"""Progress of what takes more than two seconds: a bar with the time left on a terminal, else a line each 30 s."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

log = logging.getLogger("dexter")
DELAY_SECONDS = 2.0
"""What is done sooner shows nothing."""
SECONDS_BETWEEN_LINES = 30.0
_CHUNK_BYTES = 2**20
T = TypeVar("T")


def track(items: Iterable[T], *, what: str, total: int | None = None, unit: str = "text") -> Iterator[T]:
    """Yield the items and show on stderr how many are done; nothing with --quiet.

    Args:
        items: what is gone through.
        what: a verb for the reader, such as "predict".
        total: how many there are; without it the rate is shown, and no time left.
        unit: what one of them is.
    """
    if not log.isEnabledFor(logging.INFO):
        yield from items
    elif sys.stderr.isatty():
        from tqdm import tqdm  # Takes a while to import, and only terminals need it.

        yield from tqdm(items, desc=what, total=total, unit=unit, delay=DELAY_SECONDS, leave=False)
    else:
        started = said = time.monotonic()
        for done, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - said >= SECONDS_BETWEEN_LINES:
                said = now
                log.info("%s: %s", what, _describe(done, total, now - started, unit))


def _describe(done: int, total: int | None, seconds: float, unit: str) -> str:
    """Say how many are done, how fast, and how long the rest will take."""
    rate = f"{done / max(seconds, 1e-9):,.1f} {unit}s/s"
    if total is None:
        return f"{done:,} {unit}s, {rate}"
    return f"{done:,} of {total:,} {unit}s, {rate}, {max(total - done, 0) * seconds / done:,.0f} s left"


def count_lines(path: Path | None) -> int | None:
    """Return the number of lines of a plain text file, as a total; None where that takes reading it."""
    if path is None or not path.is_file() or path.suffix in (".gz", ".parquet"):
        return None
    with path.open("rb") as handle:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: handle.read(_CHUNK_BYTES), b"")) or None
