"""Where a database keeps the vectors of an index: an address that the caller gives, and a name that the index gives.

The address is never written to a file: it may hold a password, and a folder that somebody else made must not decide
which server is called.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dexter.errors import ModelError, UsageError
from dexter.index.base import Place

_NAME = re.compile(r"[a-z][a-z0-9_]{0,50}")
_MOST_ROWS = 2**40


def checked_place(place: Place | None, *, backend: str, example: str) -> Place:
    """An address and a name that are there and harmless."""
    if place is None or not place.url:
        raise UsageError(
            f"the backend {backend} needs the address of a server: give --url {example}, or set DEXTER_INDEX_URL"
        )
    if not _NAME.fullmatch(place.name):
        raise ModelError(f"{place.name!r} is not the name of an index of ours: run `dexter index` again")
    return place


def read_words(folder: Path, described: dict[str, Any]) -> tuple[str, int, int]:
    """What an index folder says of rows in a database: table or collection, rows in it, the next number to give."""
    name, num_rows, next_row = described.get("name"), described.get("num_rows"), described.get("next_row")
    if not (isinstance(name, str) and isinstance(num_rows, int) and isinstance(next_row, int)) or not (
        0 < num_rows <= next_row <= _MOST_ROWS
    ):
        raise ModelError(f"{folder}: does not say where its vectors are: run `dexter index` again")
    return name, num_rows, next_row
