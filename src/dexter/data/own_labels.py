"""Own labels: the label that is the query itself, where labels are the items that queries ask about.

In data about related items a query's own title is a label too. It is hardly ever relevant, and a dual encoder ranks it
first because the texts agree. A label is a query's own if both have the same id, or the same text up to case and
spaces. `find_own_labels` decides by the training queries whether own labels are left out; they are then filter pairs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from dexter.data.dataset import Dataset, Split

OwnLabelsSetting = Literal["auto", "exclude", "keep"]
MIN_QUERIES, MIN_SHARE = 20, 0.01
"""`auto` leaves own labels out only if at least this many training queries have one, and this share of all of them."""
MAX_POSITIVE_SHARE = 0.01
"""`auto` keeps own labels if more than this share of them is relevant to its query."""
MIN_AGREEMENT = 0.5
"""Share of the pairs with equal numbers as ids whose texts must agree too, or else the numbers agree by chance."""
_NUMBERED = re.compile(r"[A-Za-z]{0,5}[-_:.]?[0-9]+")
"""An id that numbers something, such as 17, Q17 or doc-17."""


@dataclass(frozen=True, kw_only=True)
class OwnLabels:
    """Whether own labels are left out, and what training queries showed; without arguments, that they are not."""

    setting: OwnLabelsSetting = "keep"
    """`data.own_labels` of the run."""
    by_id: bool = False
    """Whether the label with the id of a query is left out."""
    by_text: bool = False
    """Whether labels with the text of a query are left out."""
    num_queries: int = 0
    """Training queries."""
    num_with_own: int = 0
    """Training queries that have an own label: one that is left out or, if none are, one that was looked at."""
    num_positive: int = 0
    """Pairs of such a query and its own label that are relevant."""
    num_by_chance: int = 0
    """Training queries that share a number as id with a label, but mostly not its text."""

    @property
    def excludes(self) -> bool:
        """Whether own labels are left out."""
        return self.by_id or self.by_text

    def describe(self) -> str:
        """Describe the decision in one line; empty where no query has an own label."""
        parts = []
        if self.num_with_own:
            positive = f"{self.num_positive:,} of these pairs are" if self.num_positive else "none is"
            what = "left out of losses, mining and predictions" if self.excludes else "treated as any other label"
            parts.append(
                f"{self.num_with_own:,} of {self.num_queries:,} queries have a label of their own; {positive} "
                f"positive: {what} (data.own_labels = {self.setting})"
            )
        if self.num_by_chance:
            counted = "excluded nevertheless" if self.by_id else "taken for a coincidence"
            parts.append(
                f"{self.num_by_chance:,} of {self.num_queries:,} queries share a number as id with a label, but mostly "
                f"not its text: {counted} (data.own_labels = {self.setting})"
            )
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` makes it again."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> OwnLabels:
        """Make it from the values of `to_json`; None: own labels are not left out."""
        return cls() if values is None else cls(**values)

    def filter_train(self, dataset: Dataset) -> Dataset:
        """Return the data set with own labels as further filter pairs of its training queries, if they are left out."""
        return replace(dataset, train=self._filter(dataset, dataset.train)) if self.excludes else dataset

    def filter_test(self, dataset: Dataset) -> Dataset:
        """Return the data set with own labels as further filter pairs of its test queries, if they are left out."""
        if not self.excludes or dataset.test is None:
            return dataset
        return replace(dataset, test=self._filter(dataset, dataset.test))

    def finder(self, label_ids: Sequence[str], label_texts: Sequence[str]) -> OwnLabelFinder:
        """Return what finds the own labels that are left out."""
        return OwnLabelFinder(label_ids, label_texts, by_id=self.by_id, by_text=self.by_text)

    def _filter(self, dataset: Dataset, split: Split) -> Split:
        own = self.finder(dataset.label_ids, dataset.label_texts).matrix(split.uids, split.texts)
        if not own.nnz:
            return split
        filtered = own if split.filtered is None else (own + split.filtered).tocsr()
        filtered.data = np.ones_like(filtered.data)
        return replace(split, filtered=filtered)


class OwnLabelFinder:
    """Finds the own labels of queries by id, by text or by both.

    Args:
        label_ids: one for each label.
        label_texts: one for each label.
        by_id: whether a label with the query's id is its own.
        by_text: whether labels with the query's text are its own.
    """

    def __init__(self, label_ids: Sequence[str], label_texts: Sequence[str], *, by_id: bool, by_text: bool) -> None:
        self._num_labels = len(label_ids)
        self._by_id = {label_id: row for row, label_id in enumerate(label_ids)} if by_id else {}
        self._by_text: dict[str, list[int]] = defaultdict(list)
        for row, text in enumerate(label_texts if by_text else ()):
            if words := text.split():
                self._by_text[_normalize(words)].append(row)
        self._max_words = max((text.count(" ") + 1 for text in self._by_text), default=0)

    def find(self, uid: str | None, text: str) -> set[int]:
        """Return the rows of the labels that are a query's own; `uid` is None for a query without an id."""
        found = set()
        if uid is not None and uid in self._by_id:
            found.add(self._by_id[uid])
        if self._max_words:
            words = text.split(None, self._max_words)
            if len(words) <= self._max_words:
                found.update(self._by_text.get(_normalize(words), ()))
        return found

    def matrix(self, uids: Sequence[str | None], texts: Sequence[str]) -> csr_matrix:
        """Return the own labels of queries as a matrix of ones, queries x labels."""
        # Imported here because predicting without own labels does not need it, and it takes a while.
        from scipy.sparse import csr_matrix

        indices: list[int] = []
        starts = np.zeros(len(texts) + 1, dtype=np.int64)
        for position, (uid, text) in enumerate(zip(uids, texts, strict=True)):
            indices += sorted(self.find(uid, text))
            starts[position + 1] = len(indices)
        ones = np.ones(len(indices), dtype=np.float32)
        return csr_matrix((ones, np.array(indices, dtype=np.int64), starts), shape=(len(texts), self._num_labels))


def find_own_labels(dataset: Dataset, setting: OwnLabelsSetting) -> OwnLabels:
    """Decide by the training queries whether own labels are left out of losses, mining and predictions.

    `auto` leaves them out by id, by text or by both: wherever at least `MIN_QUERIES` training queries and a share of
    `MIN_SHARE` of them have an own label, of which at most a share of `MAX_POSITIVE_SHARE` is relevant. Where most of
    the equal ids are numbers, these count only if `MIN_AGREEMENT` of them belong to texts that agree too: numbers are
    often those of rows. `exclude` leaves out every label that has a query's id or text; `keep` leaves out none.
    """
    train = dataset.train
    seen = {
        name: OwnLabelFinder(
            dataset.label_ids, dataset.label_texts, by_id=name == "by_id", by_text=name == "by_text"
        ).matrix(train.uids, train.texts)
        for name in ("by_id", "by_text")
    }
    num_by_chance = _count_chance(dataset, seen["by_id"])
    if num_by_chance and setting != "exclude":
        seen["by_id"].data[:] = 0.0
        seen["by_id"].eliminate_zeros()
    chosen = {
        name: setting == "exclude" or (setting == "auto" and _are_never_relevant(pairs, train))
        for name, pairs in seen.items()
    }
    counted = [pairs for name, pairs in seen.items() if chosen[name] or not any(chosen.values())]
    own = sum(counted[1:], counted[0]).tocsr()
    return OwnLabels(
        setting=setting,
        **chosen,
        num_queries=len(train),
        num_with_own=_count_queries(own),
        num_positive=_count_relevant(own, train),
        num_by_chance=num_by_chance,
    )


def _normalize(words: Sequence[str]) -> str:
    return " ".join(words).casefold()


def _are_never_relevant(pairs: csr_matrix, split: Split) -> bool:
    """Whether enough queries have an own label, and hardly any of these labels is relevant."""
    is_enough = _count_queries(pairs) >= max(MIN_QUERIES, MIN_SHARE * len(split))
    return is_enough and _count_relevant(pairs, split) <= MAX_POSITIVE_SHARE * pairs.nnz


def _count_queries(pairs: csr_matrix) -> int:
    return int((np.diff(pairs.indptr) > 0).sum())


def _count_relevant(pairs: csr_matrix, split: Split) -> int:
    return int(pairs.multiply(split.relevance).nnz)


def _count_chance(dataset: Dataset, pairs: csr_matrix) -> int:
    """Return how many pairs have equal ids if most of these are numbers and most of their texts differ, else 0."""
    queries, labels = (numbers.tolist() for numbers in pairs.nonzero())
    texts, label_texts = dataset.train.texts, dataset.label_texts
    agreeing = [
        _begins_with(texts[query], label_texts[label])
        for query, label in zip(queries, labels, strict=True)
        if _NUMBERED.fullmatch(dataset.label_ids[label])
    ]
    is_numbered = 2 * len(agreeing) > len(labels)
    return len(labels) if is_numbered and sum(agreeing) < MIN_AGREEMENT * len(agreeing) else 0


def _begins_with(text: str, label_text: str) -> bool:
    """Whether a text is that of a label, or goes on after it, as a title goes before a body."""
    wanted = _normalize(label_text.split())
    found = _normalize(text.split(None, len(wanted.split()) + 1))[: len(wanted) + 1]
    return bool(wanted) and found.startswith(wanted) and not found[len(wanted) :].isalnum()
