"""What the writers of all formats share: files, gzip or not, and texts restricted to what a format can hold."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.lines import excerpt
from dexter.errors import DataError

_TO_SPACES = str.maketrans(dict.fromkeys("\0\t\n\r\ufeff", " "))
_GZIP_LEVEL = 6


class Writer:
    """One writing of a data set into an empty folder."""

    def __init__(self, folder: Path, *, compress: bool) -> None:
        self.folder = folder
        self.num_changed = 0
        """Texts in which a character that the format cannot hold was written as a space."""
        self._compress = compress

    def one_line(self, text: str) -> str:
        """Replace line breaks, tabs, NULs and byte order marks by spaces, and count texts with any."""
        flat = text.translate(_TO_SPACES)
        self.num_changed += flat != text
        return flat

    def without_nul(self, text: str) -> str:
        """Replace NULs by spaces, and count texts with any."""
        clean = text.replace("\0", " ")
        self.num_changed += clean != text
        return clean

    @contextmanager
    def text_file(self, name: str) -> Iterator[TextIO]:
        """Open a UTF-8 file for writing, `.gz` appended when compressing; the same text gives the same bytes."""
        path = self.folder / (name + (".gz" if self._compress else ""))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as raw:
            if not self._compress:
                with io.TextIOWrapper(raw, encoding="utf-8", newline="") as handle:
                    yield handle
                return
            packed = gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=raw, mtime=0)
            with packed, io.TextIOWrapper(packed, encoding="utf-8", newline="") as handle:
                yield handle

    def lines(self, name: str, lines: Iterable[str]) -> None:
        """Write a file of lines."""
        with self.text_file(name) as handle:
            for line in lines:
                handle.write(line)
                handle.write("\n")

    def splits(self, dataset: Dataset, names: tuple[str, str], lines: Callable[[Split], Iterable[str]]) -> None:
        """Write the lines of the training split to the first file name and those of the test split to the second."""
        for name, split in zip(names, dataset.splits.values(), strict=False):
            self.lines(name, lines(split))

    def filter_pairs(self, dataset: Dataset) -> None:
        """Write the filter pairs of each split that has any; never compressed, as other tools read them."""
        for name, split in dataset.splits.items():
            if split.filtered is not None:
                pairs = zip(*(numbers.tolist() for numbers in split.filtered.nonzero()), strict=True)
                text = "".join(f"{row} {column}\n" for row, column in pairs)
                (self.folder / f"filter_labels_{name}.txt").write_text(text, encoding="utf-8")


def labels_of_rows(split: Split) -> Iterator[tuple[list[int], list[float] | None]]:
    """Yield each row's label columns, and its weights unless they are all 1."""
    matrix = split.relevance
    for start, end in pairwise(matrix.indptr.tolist()):
        weights = matrix.data[start:end]
        # `str` gives the shortest decimal form that reads back as the same float32.
        graded = [float(str(weight)) for weight in weights] if (weights != 1.0).any() else None
        yield matrix.indices[start:end].tolist(), graded


def refuse_white_space(dataset: Dataset, *, format_name: str) -> None:
    """Raise `DataError` for a label id that a format which separates ids by white space cannot hold."""
    for identifier in dataset.label_ids:
        if not identifier or any(character.isspace() or character in "\0\ufeff" for character in identifier):
            raise DataError(
                f"label id {excerpt(identifier)} is empty or holds white space, "
                f"which {format_name} cannot hold: write jsonl"
            )
