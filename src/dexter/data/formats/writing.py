"""One save of a data set into a folder: opening files, gzip or not, and keeping a text to one line if need be."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.filters import filter_lines

_TO_SPACES = str.maketrans(dict.fromkeys("\0\t\n\r\ufeff", " "))
_GZIP_LEVEL = 6


class Writing:
    """What the writers share while they write one data set."""

    def __init__(self, folder: Path, *, compress: bool, announce: Callable[[str], None]) -> None:
        self.folder = folder
        self.compress = compress
        self.announce = announce
        self.num_changed = 0
        """Texts in which a character that the format cannot carry was written as a space."""

    def one_line(self, text: str) -> str:
        """The text with line breaks, tabs, NULs and byte order marks as spaces; counted, to be announced at the end."""
        flat = text.translate(_TO_SPACES)
        self.num_changed += flat != text
        return flat

    def without_nul(self, text: str) -> str:
        """The text with NULs as spaces; counted, to be announced at the end."""
        clean = text.replace("\0", " ")
        self.num_changed += clean != text
        return clean

    @contextmanager
    def text_file(self, name: str) -> Iterator[TextIO]:
        """A UTF-8 file to write to, `.gz` appended when compressing; the same text gives the same bytes."""
        path = self.folder / (name + (".gz" if self.compress else ""))
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as raw:
            if not self.compress:
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

    def filters(self, dataset: Dataset) -> None:
        """Write the filter pairs of each split that has any; always plain, as other tools read them."""
        for name, split in dataset.splits.items():
            if split.filtered is not None:
                text = "".join(f"{line}\n" for line in filter_lines(split.filtered))
                (self.folder / f"filter_labels_{name}.txt").write_text(text, encoding="utf-8")


def row_columns(split: Split) -> Iterator[tuple[list[int], list[float] | None]]:
    """Each row's label columns, and its weights unless they are all 1."""
    matrix = split.relevance
    ends = matrix.indptr.tolist()
    for start, end in pairwise(ends):
        weights = matrix.data[start:end]
        # `str` gives the shortest decimal form that reads back as the same float32.
        graded = [float(str(weight)) for weight in weights] if (weights != 1.0).any() else None
        yield matrix.indices[start:end].tolist(), graded
