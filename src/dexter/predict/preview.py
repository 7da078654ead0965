"""Preview a label that does not exist yet: its rank for a text, and the labels it resembles."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dexter.model.edits import LabelChange, apply_changes, encode_change
from dexter.model.similar import DUPLICATE_SIMILARITY, SimilarLabel
from dexter.predict.predictor import Prediction, Predictor

MAX_PREVIEW_RANK = 100
"""Lowest rank that is looked for."""
_NUM_SHOWN, _NUM_NEIGHBOURS = 5, 32
"""Similar labels that are returned, and that are kept in the small model, where they lend their classifier rows."""
_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class LabelPreview:
    """A label that does not exist yet."""

    text: str
    similar: Sequence[SimilarLabel]
    """The labels it resembles, nearest first."""
    rank: int | None = None
    """Its rank for the text; None without a text, or below `MAX_PREVIEW_RANK`."""
    score: float | None = None
    above: Prediction | None = None
    """The label one rank above it."""

    @property
    def duplicates(self) -> list[SimilarLabel]:
        """Labels that mean the same."""
        return [label for label in self.similar if label.same_text or label.similarity >= DUPLICATE_SIMILARITY]


def preview_label(predictor: Predictor, text: str, label_text: str) -> LabelPreview:
    """Rank a new label for a text (if it is not empty) without adding it.

    The labels that could rank above it and those that it resembles make a small model, in which it competes, so that
    nothing of the size of all labels is copied.
    """
    predictor = predictor.variant()  # labels that are changed meanwhile do not reach it
    model = predictor.model
    near = predictor.similar_labels(label_text, _NUM_NEIGHBOURS)
    preview = LabelPreview(label_text, near[:_NUM_SHOWN])
    if not text.strip():
        return preview
    best_rows = predictor.top([text], MAX_PREVIEW_RANK).ids[0]
    near_rows = np.array(model.labels.rows(label.id for label in near), dtype=np.int64)
    label_id = new_label_id(label_text, set(model.labels.ids))
    added = encode_change(model, LabelChange(add=[(label_id, label_text)]))
    competing = apply_changes(model.select_labels(np.union1d(best_rows[best_rows >= 0], near_rows)), added)
    small = predictor.variant(model=competing)
    [ranking] = small.predict([text], k=MAX_PREVIEW_RANK)
    place = next((place for place, label in enumerate(ranking) if label.id == label_id), None)
    if place is None:
        return preview
    above = ranking[place - 1] if place else None
    return LabelPreview(label_text, preview.similar, place + 1, ranking[place].score, above)


def new_label_id(label_text: str, taken: Collection[str]) -> str:
    """Make an unused id from the words of a label's text."""
    words = _NOT_WORDS.sub("-", label_text.casefold()).strip("-")[:80] or "label"
    candidate, number = words, 2
    while candidate in taken:
        candidate, number = f"{words}-{number}", number + 1
    return candidate
