"""What can be wrong with a well-formed data set, and the file and line of each example.

A finding never stops a run: it is a fact that makes results worse or misleading. Malformed data never becomes a
`Dataset`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.columns import is_uri
from dexter.data.formats.lines import raw_lines
from dexter.errors import DataError

log = logging.getLogger("dexter")
MESSAGES = {
    "empty-text": "queries without text: remove them, nothing can be predicted from them",
    "duplicate-text": "queries that repeat the text of an earlier one: merge their labels",
    "train-test-overlap": "test queries whose text is also in train: scores reward memorising them, drop them",
    "row-without-labels": "queries without a label: they neither train nor count in scores",
    "label-without-text": "labels without text: a dual encoder cannot tell them apart, name them",
    "label-text-is-uri": "labels whose text is a URI: a dual encoder reads texts, name a vocabulary with --vocabulary",
    "duplicate-label-text": "labels with the text of an earlier one: they always score alike, merge or rename them",
    "unused-label": "labels that no query of any split has: remove them unless they are to be predicted",
    "self-pair": "queries with a label of their own id or text: if that means itself, make it a filter pair",
    "reciprocal-pair": "test pairs whose reverse is in train: the answer was seen, see `evaluate --without-reciprocal`",
}
"""Every kind of finding and what it means."""

_MAX_EXAMPLES = 3
_STEMS = {
    "train": ("trn", "train", "trn_X"),
    "test": ("tst", "test", "tst_X"),
    "labels": ("lbl", "labels", "Y", "Yf", "label_names", "subjects"),
}
_HEADER_LINES = {
    "jsonl": 0,
    "xmc-json": 0,
    "dexml": 0,
    "xmc-text": 0,
    "fasttext": 0,
    "annif": 0,
    "svmlight": 1,
    "csv": 1,
    "tsv": 1,
}
"""The formats with one line per row, and how many lines precede the first row of a split."""

_Row = tuple[str, int]
"""A split (or "labels") and a row of it."""
_Occurrences = Sequence[tuple[_Row] | tuple[_Row, _Row]]
"""Where a finding occurs: one row, or two where it lies between them."""


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """One row of a split, or one label (split "labels"), and where it was read from."""

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


@dataclass(frozen=True)
class FindingExample:
    """One instance of a finding."""

    row: SourceLine
    other: SourceLine | None = None
    """The second row, where a finding lies between two."""

    def __str__(self) -> str:
        return str(self.row) if self.other is None else f"{self.row} and {self.other}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kind of finding, how often it occurs and where."""

    kind: str
    """A stable name for scripts, such as `empty-text`."""
    message: str
    """What it is and what to do about it."""
    total: int
    """Number of occurrences."""
    out_of: int
    """Number of queries, labels or pairs that were looked at."""
    examples: tuple[FindingExample, ...]
    """The first few occurrences."""


def find(dataset: Dataset, *, folder: str | Path | None = None) -> list[Finding]:
    """Return every kind of finding that occurs; examples name file and line if the data set was read from `folder`."""
    lines = LineNumbers(dataset, folder)
    num_queries = sum(len(split) for split in dataset.splits.values())
    num_test, num_test_pairs = (len(dataset.test), dataset.test.relevance.nnz) if dataset.test is not None else (0, 0)
    same_item = {name: _labels_of_queries(dataset, split) for name, split in dataset.splits.items()}
    occurrences: dict[str, tuple[_Occurrences, int]] = {
        "empty-text": (_empty_texts(dataset), num_queries),
        "duplicate-text": (_duplicate_texts(dataset), num_queries),
        "train-test-overlap": (_overlap(dataset), num_test),
        "row-without-labels": (_rows_without_labels(dataset), num_queries),
        "label-without-text": (_labels_without_text(dataset), dataset.num_labels),
        "label-text-is-uri": (_labels_with_uris(dataset), dataset.num_labels),
        "duplicate-label-text": (_duplicate_label_texts(dataset), dataset.num_labels),
        "unused-label": (_unused_labels(dataset), dataset.num_labels),
        "self-pair": (_self_pairs(dataset, same_item), num_queries),
        "reciprocal-pair": (_locate_reciprocal(dataset, same_item), num_test_pairs),
    }
    return [
        Finding(
            kind=kind,
            message=MESSAGES[kind],
            total=len(found),
            out_of=out_of,
            examples=tuple(FindingExample(*(lines.locate(*row) for row in rows)) for rows in found[:_MAX_EXAMPLES]),
        )
        for kind, (found, out_of) in occurrences.items()
        if found
    ]


class LineNumbers:
    """The lines that rows were read from; a file is read at most once, and only to locate one of its rows.

    A `Dataset` keeps no line numbers. They are recovered only from a file that has exactly one line per row; a row of
    any other file is named by its split, number and id.
    """

    def __init__(self, dataset: Dataset, folder: str | Path | None) -> None:
        self._dataset = dataset
        self._folder = None if folder is None else Path(folder)
        self._lines: dict[str, tuple[str, np.ndarray] | None] = {}

    def locate(self, split: str, row: int) -> SourceLine:
        """Locate a row of "train" or "test", or a label ("labels")."""
        if split not in self._lines:
            self._lines[split] = self._find_lines(split)
        uid = self._uids(split)[row]
        known = self._lines[split]
        if known is None:
            return SourceLine(split=split, row=row, uid=uid)
        path, lines = known
        return SourceLine(split=split, row=row, uid=uid, path=path, line=int(lines[row]))

    def _uids(self, split: str) -> Sequence[str]:
        return self._dataset.label_ids if split == "labels" else self._dataset.splits[split].uids

    def _find_lines(self, split: str) -> tuple[str, np.ndarray] | None:
        """Return the file of a split and the line of each of its rows, or None where that is not certain."""
        path = self._file_of(split)
        if path is None:
            return None
        format_name = self._dataset.source["format"]
        # Label names of svmlight have no header, unlike its rows.
        num_header = 0 if (split, format_name) == ("labels", "svmlight") else _HEADER_LINES[format_name]
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
    """Return the line number of each row of a file with one line per row, or None if the file is not like that.

    Blank lines are passed over, unless they are needed to make up the number of rows: then they are rows without text.
    """
    try:
        filled = np.array([bool(raw.strip()) for _, raw in raw_lines(path)], dtype=bool)
    except (DataError, OSError):
        return None
    for lines in (np.flatnonzero(filled) + 1, np.arange(1, len(filled) + 1)):
        if len(lines) == num_header + num_rows:
            return np.asarray(lines[num_header:])
    return None


def _labels_of_queries(dataset: Dataset, split: Split) -> np.ndarray:
    """Return for each query the label that is the same item (same id, or else same text), or -1.

    Ids that merely number the rows or labels say nothing about identity and are not compared.
    """
    by_id = {uid: column for column, uid in enumerate(dataset.label_ids) if uid != str(column)}
    by_text = {text: column for column, text in enumerate(dataset.label_texts) if text.strip()}
    found = (
        by_id.get(uid, by_text.get(text, -1)) if uid != str(row) else by_text.get(text, -1)
        for row, (uid, text) in enumerate(zip(split.uids, split.texts, strict=True))
    )
    return np.fromiter(found, dtype=np.int64, count=len(split))


def _empty_texts(dataset: Dataset) -> _Occurrences:
    return [((name, row),) for name, split in dataset.splits.items() for row in _blank(split.texts)]


def _duplicate_texts(dataset: Dataset) -> _Occurrences:
    return [
        ((name, row), (name, first)) for name, split in dataset.splits.items() for row, first in _repeats(split.texts)
    ]


def _overlap(dataset: Dataset) -> _Occurrences:
    if dataset.test is None:
        return []
    first: dict[str, int] = {}
    for row, text in enumerate(dataset.train.texts):
        first.setdefault(text, row)
    rows = ((row, text) for row, text in enumerate(dataset.test.texts) if text in first and text.strip())
    return [(("test", row), ("train", first[text])) for row, text in rows]


def _rows_without_labels(dataset: Dataset) -> _Occurrences:
    return [
        ((name, int(row)),)
        for name, split in dataset.splits.items()
        for row in np.flatnonzero(np.diff(split.relevance.indptr) == 0)
    ]


def _labels_without_text(dataset: Dataset) -> _Occurrences:
    return [(("labels", column),) for column in _blank(dataset.label_texts)]


def _labels_with_uris(dataset: Dataset) -> _Occurrences:
    return [(("labels", row),) for row, text in enumerate(dataset.label_texts) if " " not in text and is_uri(text)]


def _duplicate_label_texts(dataset: Dataset) -> _Occurrences:
    return [(("labels", column), ("labels", first)) for column, first in _repeats(dataset.label_texts)]


def _unused_labels(dataset: Dataset) -> _Occurrences:
    used = sum(np.bincount(split.relevance.indices, minlength=dataset.num_labels) for split in dataset.splits.values())
    return [(("labels", int(column)),) for column in np.flatnonzero(used == 0)]


def _self_pairs(dataset: Dataset, same_item: Mapping[str, np.ndarray]) -> _Occurrences:
    found = []
    for name, split in dataset.splits.items():
        rows, columns = _pairs(split)
        found += [((name, int(row)),) for row in rows[same_item[name][rows] == columns]]
    return found


def _locate_reciprocal(dataset: Dataset, same_item: Mapping[str, np.ndarray]) -> _Occurrences:
    test_rows, _, train_rows = find_reciprocal(dataset, same_item)
    return [
        (("test", row), ("train", first)) for row, first in zip(test_rows.tolist(), train_rows.tolist(), strict=True)
    ]


class ReciprocalPairs(NamedTuple):
    """Test pairs (a, b) for which (b, a) is a training pair, a and b being items that are both query and label."""

    test_rows: np.ndarray
    test_columns: np.ndarray
    train_rows: np.ndarray
    """The query of the reverse pair."""


def find_reciprocal(dataset: Dataset, same_item: Mapping[str, np.ndarray] | None = None) -> ReciprocalPairs:
    """Find the reciprocal pairs; `same_item` is the label that each query is itself, by split, where it is known."""
    nothing = ReciprocalPairs(*(np.zeros(0, dtype=np.int64) for _ in range(3)))
    if dataset.test is None:
        return nothing
    if same_item is None:
        same_item = {name: _labels_of_queries(dataset, split) for name, split in dataset.splits.items()}
    train_rows, train_columns = _pairs(dataset.train, only=same_item["train"] >= 0)
    test_rows, test_columns = _pairs(dataset.test, only=same_item["test"] >= 0)
    if not len(train_rows) or not len(test_rows):
        return nothing
    # One number per ordered pair of items: train as (query, label), test reversed as (label, query).
    train_codes = same_item["train"][train_rows] * dataset.num_labels + train_columns
    test_codes = test_columns * dataset.num_labels + same_item["test"][test_rows]
    codes, first = np.unique(train_codes, return_index=True)
    position = np.minimum(np.searchsorted(codes, test_codes), len(codes) - 1)
    hits = codes[position] == test_codes
    return ReciprocalPairs(test_rows[hits], test_columns[hits], train_rows[first[position[hits]]])


def without_reciprocal(dataset: Dataset) -> tuple[Dataset, np.ndarray]:
    """Return the data set without its reciprocal test pairs, and the rows of the test queries that are left.

    The pairs become filter pairs, so that predicting one is neither right nor wrong. Queries with no other label go.
    """
    if dataset.test is None:
        return dataset, np.zeros(0, dtype=np.int64)
    found, split = find_reciprocal(dataset), dataset.test
    if not len(found.test_rows):
        return dataset, np.arange(len(split))
    marks = (np.ones(len(found.test_rows), dtype=np.float32), (found.test_rows, found.test_columns))
    removed = csr_matrix(marks, shape=split.relevance.shape)
    relevance = split.relevance - split.relevance.multiply(removed)
    relevance.eliminate_zeros()
    filtered = removed if split.filtered is None else split.filtered.maximum(removed)
    had_labels, has_labels = (np.diff(matrix.indptr) > 0 for matrix in (split.relevance, csr_matrix(relevance)))
    rows = np.flatnonzero(has_labels | ~had_labels)
    log.info(
        "%s of %s test pairs have their reverse in training and are left out; %s of %s queries remain",
        *(f"{count:,}" for count in (removed.nnz, split.relevance.nnz, len(rows), len(split))),
    )
    reduced = replace(split, relevance=csr_matrix(relevance), filtered=csr_matrix(filtered))
    return replace(dataset, name=f"{dataset.name}-without-reciprocal", test=reduced.select(rows)), rows


def _pairs(split: Split, *, only: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column of every relevant pair, or of those in the rows that the mask `only` selects."""
    rows = np.repeat(np.arange(len(split), dtype=np.int64), np.diff(split.relevance.indptr))
    columns = split.relevance.indices.astype(np.int64)
    return (rows, columns) if only is None else (rows[only[rows]], columns[only[rows]])


def _blank(texts: Sequence[str]) -> list[int]:
    return [row for row, text in enumerate(texts) if not text.strip()]


def _repeats(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the position of each text that is not blank and occurred before, and that of its first occurrence."""
    seen: dict[str, int] = {}
    firsts = ((row, seen.setdefault(text, row)) for row, text in enumerate(texts) if text.strip())
    return [(row, first) for row, first in firsts if first != row]
