"""The labels of a model: ids, texts and training counts in the order of its vectors, and search among them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError
from dexter.model.lexical import LabelWords

_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Labels:
    """The labels that a model can predict, in the order of its vectors."""

    ids: Sequence[str]
    texts: Sequence[str]
    counts: NDArray[np.int64]
    """Training queries of each label."""

    @cached_property
    def _row_by_id(self) -> dict[str, int]:
        return {label_id: row for row, label_id in enumerate(self.ids)}

    @cached_property
    def new_words(self) -> LabelWords | None:
        """The words of the labels without training queries; None where there are no such labels."""
        new = np.flatnonzero(self.counts == 0)
        return LabelWords(new, [self.texts[row] for row in new.tolist()]) if len(new) else None

    def rows(self, ids: Iterable[str]) -> list[int]:
        """Return the row of each id; raise `UsageError` for an unknown one."""
        try:
            return [self._row_by_id[label_id] for label_id in ids]
        except KeyError as error:
            raise UsageError(f"no label has the id {error.args[0]!r}") from None

    def find_unknown(self, ids: Sequence[str]) -> int | None:
        """Return the position of the first id that no label has; None if all are known."""
        return next((place for place, label_id in enumerate(ids) if label_id not in self._row_by_id), None)

    def select(self, rows: NDArray[np.int64]) -> Labels:
        """Return the labels of some rows, in the order given."""
        ids, texts = ([values[row] for row in rows] for values in (self.ids, self.texts))
        return Labels(ids, texts, self.counts[rows])

    def entry(self, row: int) -> LabelEntry:
        """Return one label with its id, text and count."""
        return LabelEntry(self.ids[row], self.texts[row], int(self.counts[row]))

    def find_rows(self, query: str) -> range | list[int]:
        """Return the rows of the labels whose id or text contains the query, ignoring case; all if it is empty.

        Labels whose id or text begins with the query come first; otherwise the order of the labels is kept.
        """
        wanted = query.strip().casefold()
        if not wanted:
            return range(len(self.ids))
        first, later = [], []
        for row, names in enumerate(zip(self.ids, self.texts, strict=True)):
            positions = [name.casefold().find(wanted) for name in names]
            if 0 in positions:
                first.append(row)
            elif max(positions) > 0:
                later.append(row)
        return first + later

    def search(self, query: str = "", *, limit: int | None = 20, offset: int = 0) -> LabelPage:
        """Return a page of the labels that `find_rows` finds, `limit` of them (None: all) from number `offset` on."""
        if offset < 0 or (limit is not None and limit < 0):
            raise UsageError(f"limit and offset must be 0 or more, got {limit} and {offset}")
        rows = self.find_rows(query)
        page = rows[offset:] if limit is None else rows[offset : offset + limit]
        return LabelPage([self.entry(row) for row in page], total=len(rows))


@dataclass(frozen=True)
class LabelEntry:
    """One label of a listing."""

    id: str
    text: str
    count: int
    """Training queries; 0 for a label that was added later."""


@dataclass(frozen=True)
class LabelPage:
    """One page of search results."""

    labels: list[LabelEntry]
    total: int
    """Number of labels on all pages."""


def new_label_id(text: str, taken: Collection[str]) -> str:
    """Make an unused id from the words of a label's text."""
    words = _NOT_WORDS.sub("-", text.casefold()).strip("-")[:80] or "label"
    candidate, number = words, 2
    while candidate in taken:
        candidate, number = f"{words}-{number}", number + 1
    return candidate
