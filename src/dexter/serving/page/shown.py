"""The list of labels as it is shown: how long each bar is, and how frequent the label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dexter.model.labels import Labels
from dexter.serving.protocol import RankedLabel


@dataclass(frozen=True)
class Shown:
    """A label of the list."""

    label: RankedLabel
    bar: float
    """How long its bar is, from 0 to 1."""
    count: int
    """Training texts that had it."""


def show(ranking: Sequence[RankedLabel], labels: Labels) -> list[Shown]:
    """Bars are probabilities where they are known, else relative to the best label: scores have no scale."""
    wanted = {label.id for label in ranking}
    counts = {
        label_id: int(labels.counts[row]) for row, label_id in enumerate(labels.ids) if label_id in wanted
    }  # A label that was removed meanwhile has none.
    best = max((label.score for label in ranking), default=0.0)
    return [Shown(label, _bar(label, best), counts.get(label.id, 0)) for label in ranking]


def _bar(label: RankedLabel, best: float) -> float:
    if label.probability is not None:
        return label.probability
    return label.score / best if best > 0 else 0.0
