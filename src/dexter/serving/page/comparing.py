"""Rankings of one text side by side: where each label stands, and how far it is from where the first ranking has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dexter.serving.protocol import RankedLabel


@dataclass(frozen=True)
class Place:
    """A label in a ranking."""

    label: RankedLabel
    move: int | None
    """Places up (or, negative, down) from the first ranking; None where that one does not have it at all."""


@dataclass(frozen=True)
class Column:
    """One ranking."""

    title: str
    places: Sequence[Place]


def side_by_side(rankings: Mapping[str, Sequence[RankedLabel]], *, shown: int) -> list[Column]:
    """The first places of each ranking. Rankings longer than what is shown tell more exactly how labels moved."""
    if not rankings:
        return []
    first = {label.id: label.rank for label in next(iter(rankings.values()))}
    return [
        Column(
            title,
            [Place(label, first[label.id] - label.rank if label.id in first else None) for label in labels[:shown]],
        )
        for title, labels in rankings.items()
    ]
