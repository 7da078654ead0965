"""What can be wrong with a data set: one function per kind of problem, each over whole arrays.

Nothing here stops a run: these are facts about well-formed data that make results worse or misleading. Malformed data
never becomes a `Dataset`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dexter.data.dataset import Dataset, Split
from dexter.data.places import Place, Places


@dataclass(frozen=True, kw_only=True)
class Example:
    """One instance of a problem."""

    place: Place
    other: Place | None = None
    """The second place, where a problem lies between two."""

    def __str__(self) -> str:
        return str(self.place) if self.other is None else f"{self.place} and {self.other}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One kind of problem, how often it occurs and where."""

    kind: str
    """A stable name for scripts, such as `empty-text`."""
    message: str
    """What it is and what to do about it."""
    total: int
    """How many there are."""
    out_of: int
    """How many queries, labels or pairs could have had it."""
    examples: tuple[Example, ...]
    """The first few of them."""


MESSAGES = {
    "empty-text": "queries without text: remove them, nothing can be predicted from them",
    "duplicate-text": "queries that repeat the text of an earlier one: merge their labels",
    "train-test-overlap": "test queries whose text is also in train: memory passes for skill, drop them",
    "row-without-labels": "queries without a label: they neither train nor count in scores",
    "label-without-text": "labels without text: a dual encoder cannot tell them apart, name them",
    "duplicate-label-text": "labels with the text of an earlier one: they always score alike, merge or rename them",
    "unused-label": "labels that no query of any split has: remove them unless they are to be predicted",
    "self-pair": "queries with a label of their own id or text: if that means itself, make it a filter pair",
    "reciprocal-pair": "test pairs whose reverse is in train: the answer was seen, report scores without them too",
}
"""Every kind of problem and what it means."""


def find_problems(dataset: Dataset, places: Places, *, max_examples: int) -> list[Problem]:
    """Every problem that occurs at least once."""
    num_queries = sum(len(split) for split in dataset.splits.values())
    num_test, num_test_pairs = (len(dataset.test), dataset.test.relevance.nnz) if dataset.test is not None else (0, 0)
    same_item = {name: query_labels(dataset, split) for name, split in dataset.splits.items()}
    findings = {
        "empty-text": (_empty_texts(dataset), num_queries),
        "duplicate-text": (_duplicate_texts(dataset), num_queries),
        "train-test-overlap": (_overlap(dataset), num_test),
        "row-without-labels": (_rows_without_labels(dataset), num_queries),
        "label-without-text": (_labels_without_text(dataset), dataset.num_labels),
        "duplicate-label-text": (_duplicate_label_texts(dataset), dataset.num_labels),
        "unused-label": (_unused_labels(dataset), dataset.num_labels),
        "self-pair": (_self_pairs(dataset, same_item), num_queries),
        "reciprocal-pair": (_reciprocal_pairs(dataset, same_item), num_test_pairs),
    }
    return [
        Problem(
            kind=kind,
            message=MESSAGES[kind],
            total=len(spots),
            out_of=out_of,
            examples=tuple(_example(places, spot) for spot in spots[:max_examples]),
        )
        for kind, (spots, out_of) in findings.items()
        if spots
    ]


_Spots = list[tuple[str, int]] | list[tuple[str, int, str, int]]
"""Where a problem occurs: a split (or "labels") and a row, and a second such pair where it lies between two."""


def query_labels(dataset: Dataset, split: Split) -> np.ndarray:
    """For each query the label that is the same item (same id, or else same text), or -1.

    Ids that merely number the rows or labels say nothing about identity and are not compared.
    """
    by_id = {uid: column for column, uid in enumerate(dataset.label_ids) if uid != str(column)}
    by_text = {text: column for column, text in enumerate(dataset.label_texts) if text.strip()}
    found = (
        by_id.get(uid, by_text.get(text, -1)) if uid != str(row) else by_text.get(text, -1)
        for row, (uid, text) in enumerate(zip(split.uids, split.texts, strict=True))
    )
    return np.fromiter(found, dtype=np.int64, count=len(split))


def first_occurrences(texts: Sequence[str]) -> np.ndarray:
    """For each text the position of the first equal one, its own if it is the first; empty texts equal nothing."""
    seen: dict[str, int] = {}
    found = (seen.setdefault(text, row) if text.strip() else row for row, text in enumerate(texts))
    return np.fromiter(found, dtype=np.int64, count=len(texts))


def _empty_texts(dataset: Dataset) -> _Spots:
    return [(name, row) for name, split in dataset.splits.items() for row in _blank(split.texts)]


def _duplicate_texts(dataset: Dataset) -> _Spots:
    return [
        (name, row, name, first)
        for name, split in dataset.splits.items()
        for row, first in _repeats(first_occurrences(split.texts))
    ]


def _overlap(dataset: Dataset) -> _Spots:
    if dataset.test is None:
        return []
    first: dict[str, int] = {}
    for row, text in enumerate(dataset.train.texts):
        first.setdefault(text, row)
    rows = ((row, text) for row, text in enumerate(dataset.test.texts) if text in first and text.strip())
    return [("test", row, "train", first[text]) for row, text in rows]


def _rows_without_labels(dataset: Dataset) -> _Spots:
    return [
        (name, int(row))
        for name, split in dataset.splits.items()
        for row in np.flatnonzero(np.diff(split.relevance.indptr) == 0)
    ]


def _labels_without_text(dataset: Dataset) -> _Spots:
    return [("labels", column) for column in _blank(dataset.label_texts)]


def _duplicate_label_texts(dataset: Dataset) -> _Spots:
    return [("labels", column, "labels", first) for column, first in _repeats(first_occurrences(dataset.label_texts))]


def _unused_labels(dataset: Dataset) -> _Spots:
    used = sum(np.bincount(split.relevance.indices, minlength=dataset.num_labels) for split in dataset.splits.values())
    return [("labels", int(column)) for column in np.flatnonzero(used == 0)]


def _self_pairs(dataset: Dataset, same_item: Mapping[str, np.ndarray]) -> _Spots:
    spots = []
    for name, split in dataset.splits.items():
        rows, columns = _pairs(split)
        spots += [(name, int(row)) for row in rows[same_item[name][rows] == columns]]
    return spots


def _reciprocal_pairs(dataset: Dataset, same_item: Mapping[str, np.ndarray]) -> _Spots:
    """Test pairs (a, b) for which (b, a) is a training pair, a and b being items that are both query and label."""
    if dataset.test is None:
        return []
    train_rows, train_columns = _pairs(dataset.train, only=same_item["train"] >= 0)
    test_rows, test_columns = _pairs(dataset.test, only=same_item["test"] >= 0)
    if not len(train_rows) or not len(test_rows):
        return []
    # One number per ordered pair of items: train as (query, label), test reversed as (label, query).
    train_codes = same_item["train"][train_rows] * dataset.num_labels + train_columns
    test_codes = test_columns * dataset.num_labels + same_item["test"][test_rows]
    codes, first = np.unique(train_codes, return_index=True)
    position = np.minimum(np.searchsorted(codes, test_codes), len(codes) - 1)
    hits = codes[position] == test_codes
    found = zip(test_rows[hits].tolist(), train_rows[first[position[hits]]].tolist(), strict=True)
    return [("test", test_row, "train", train_row) for test_row, train_row in found]


def _pairs(split: Split, *, only: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every relevant pair, or of those in some rows only."""
    rows = np.repeat(np.arange(len(split), dtype=np.int64), np.diff(split.relevance.indptr))
    columns = split.relevance.indices.astype(np.int64)
    return (rows, columns) if only is None else (rows[only[rows]], columns[only[rows]])


def _blank(texts: Sequence[str]) -> list[int]:
    return [row for row, text in enumerate(texts) if not text.strip()]


def _repeats(first: np.ndarray) -> list[tuple[int, int]]:
    """Positions whose first occurrence lies before them, and that one."""
    return [(int(row), int(first[row])) for row in np.flatnonzero(first != np.arange(len(first)))]


def _example(places: Places, spot: tuple[str, int] | tuple[str, int, str, int]) -> Example:
    return Example(place=places.of(spot[0], spot[1]), other=places.of(spot[2], spot[3]) if len(spot) == 4 else None)
