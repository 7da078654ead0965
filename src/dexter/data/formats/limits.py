"""How much a file may hold before it is refused: generous for data, far below what a decompression bomb needs."""

from __future__ import annotations

import os
from pathlib import Path

from dexter.errors import UsageError

MAX_LINE_BYTES = 16 * 1024**2
"""A longer line is a bad record: no text of this length is worth encoding, and it would be held in memory whole."""
MAX_BYTES_VARIABLE = "DEXTER_MAX_BYTES"
_DEFAULT_MAX_BYTES = 16 * 1024**3
_MAX_COMPRESSION_RATIO = 50
_RATIO_FREE_BYTES = 64 * 1024**2


def decompressed_limit(path: Path) -> int:
    """The most bytes a file may hold once decompressed: what DEXTER_MAX_BYTES says.

    Without that variable it is 50 times the file's size (text packs 3 to 10 times), at least 64 MiB, at most 16 GiB.
    """
    given = os.environ.get(MAX_BYTES_VARIABLE, "").strip()
    if not given:
        return min(_DEFAULT_MAX_BYTES, max(_RATIO_FREE_BYTES, _MAX_COMPRESSION_RATIO * path.stat().st_size))
    if not (given.isascii() and given.isdecimal() and len(given) < 19):
        raise UsageError(f"{MAX_BYTES_VARIABLE} must be a whole number of bytes, got {given[:40]!r}")
    return int(given)


def limit_advice() -> str:
    """What to do about a file above the limit, for the end of an error message."""
    return f"if you trust it, set the environment variable {MAX_BYTES_VARIABLE} to the bytes it may have"
