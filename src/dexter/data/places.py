"""Where a row of a data set stands in its files, so that a problem can be named as file:line.

A `Dataset` keeps no line numbers. They are recovered from the file when a problem needs them, and only if the file has
exactly one line per row; a row of any other file is named by its split, its number and its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dexter.data.dataset import Dataset
from dexter.data.formats.lines import raw_lines
from dexter.errors import DataError

_STEMS = {
    "train": ("trn", "train", "trn_X"),
    "test": ("tst", "test", "tst_X"),
    "labels": ("lbl", "labels", "Y", "Yf", "label_names", "subjects"),
}
_HEADER_LINES = {"jsonl": 0, "xmc-json": 0, "dexml": 0, "fasttext": 0, "annif": 0, "svmlight": 1, "csv": 1, "tsv": 1}
"""The formats with one line per row, and how many lines come before the first row of a split."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One row of a split, or one label (split "labels")."""

    split: str
    row: int
    """Its number, from 0."""
    uid: str
    path: str | None = None
    """The file it was read from, where the format is known."""
    line: int | None = None
    """Its line in that file, from 1."""

    def __str__(self) -> str:
        if self.path is not None and self.line is not None:
            return f"{self.path}:{self.line}"
        return f"label {self.uid!r}" if self.split == "labels" else f"{self.split} row {self.row} ({self.uid!r})"


class Places:
    """Finds the places of rows; reads a file at most once, and only when asked for one of its rows."""

    def __init__(self, dataset: Dataset, folder: str | Path | None = None) -> None:
        self._dataset = dataset
        self._folder = None if folder is None else Path(folder)
        self._lines: dict[str, tuple[str, np.ndarray] | None] = {}

    def of(self, split: str, row: int) -> Place:
        """The place of a row of "train" or "test", or of a label ("labels")."""
        if split not in self._lines:
            self._lines[split] = self._find_lines(split)
        uid = self._uids(split)[row]
        known = self._lines[split]
        if known is None:
            return Place(split=split, row=row, uid=uid)
        path, lines = known
        return Place(split=split, row=row, uid=uid, path=path, line=int(lines[row]))

    def _uids(self, split: str) -> tuple[str, ...]:
        return tuple(self._dataset.label_ids if split == "labels" else self._dataset.splits[split].uids)

    def _find_lines(self, split: str) -> tuple[str, np.ndarray] | None:
        """The file of a split and the line of each of its rows, or None where that is not certain."""
        path = self._file_of(split)
        if path is None:
            return None
        # The older text files have a header above their rows, but not above their label names.
        is_headed = split != "labels" or self._dataset.source["format"] != "svmlight"
        num_header = _HEADER_LINES[self._dataset.source["format"]] if is_headed else 0
        lines = row_lines(path, num_rows=len(self._uids(split)), num_header=num_header)
        return None if lines is None else (str(path), lines)

    def _file_of(self, split: str) -> Path | None:
        source = self._dataset.source
        if self._folder is None or source.get("format") not in _HEADER_LINES:
            return None
        if self._folder.is_file():
            return self._folder if split == "train" else None
        names = [name for name in source if PurePosixPath(name.removesuffix(".gz")).stem in _STEMS[split]]
        paths = [self._folder / name for name in names]
        return paths[0] if len(paths) == 1 and paths[0].is_file() else None


def row_lines(path: Path, *, num_rows: int, num_header: int) -> np.ndarray | None:
    """The line number of each row of a file with one line per row, or None if the file is not like that.

    Blank lines are passed over, unless it takes them to make up the number of rows: then they are rows without text.
    """
    try:
        filled = np.array([bool(raw.strip()) for _, raw in raw_lines(path)], dtype=bool)
    except (DataError, OSError):
        return None
    for lines in (np.flatnonzero(filled) + 1, np.arange(1, len(filled) + 1)):
        if len(lines) == num_header + num_rows:
            return np.asarray(lines[num_header:])
    return None
