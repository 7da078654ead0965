"""What a format is: how to recognise it, read it and, where that is honest, write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dexter.data.dataset import Dataset
from dexter.data.formats.reading import Reading
from dexter.data.formats.writing import Writing


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to lay a data set out in files."""

    name: str
    """As the user types it and as reading announces it."""
    description: str
    """The files it consists of, in one line; the message of a failed detection lists these."""
    detect: Callable[[Path], bool]
    """Whether a file or folder looks like this format: by its names, and its first lines where names do not tell."""
    read: Callable[[Path, Reading], Dataset]
    """Read a file or folder."""
    write: Callable[[Dataset, Writing], None] | None = None
    """Write into an empty folder; None where the format cannot hold a data set of texts."""
    loses: str = ""
    """What writing leaves behind, to be announced."""
    compress: bool = False
    """Whether its files are usually gzip: the default when writing."""
    is_table: bool = False
    """Whether the column options apply."""
