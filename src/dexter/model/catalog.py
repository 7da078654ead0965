"""Find labels by a part of their id or text: what begins with it first, then what has it anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.model.model import Labels


@dataclass(frozen=True)
class LabelEntry:
    """One label as a list shows it."""

    id: str
    text: str
    count: int
    """Training queries it had; 0 for a label that was added later."""


@dataclass(frozen=True)
class LabelPage:
    """Some of the labels that were found."""

    labels: list[LabelEntry]
    total: int
    """How many were found in all."""


def search_labels(labels: Labels, query: str, *, limit: int | None = 20, offset: int = 0) -> LabelPage:
    """Labels whose id or text holds the query, whatever the case; an empty query finds all.

    Where the id or text begins with it comes first; within both groups the order is that of the labels.

    Args:
        labels: where to look.
        query: a part of an id or text.
        limit: at most so many are returned; None: all.
        offset: how many of those found are passed over first.
    """
    if offset < 0 or (limit is not None and limit < 0):
        raise UsageError(f"limit and offset must be 0 or more, got {limit} and {offset}")
    rows = find_rows(labels, query)
    shown = rows[offset:] if limit is None else rows[offset : offset + limit]
    entries = [LabelEntry(labels.ids[row], labels.texts[row], int(labels.counts[row])) for row in shown]
    return LabelPage(entries, total=len(rows))


def find_rows(labels: Labels, query: str) -> range | list[int]:
    """The same as positions, all of them."""
    wanted = query.strip().casefold()
    if not wanted:
        return range(len(labels.ids))
    first, later = [], []
    for row, names in enumerate(zip(labels.ids, labels.texts, strict=True)):
        places = [name.casefold().find(wanted) for name in names]
        if 0 in places:
            first.append(row)
        elif max(places) > 0:
            later.append(row)
    return first + later
