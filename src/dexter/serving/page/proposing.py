"""A label that is not there yet: where it would rank for a text, and which labels it resembles."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from dexter.model.edits import LabelChange, apply_changes, encode_change
from dexter.model.similar import DUPLICATE_SIMILARITY, SimilarLabel
from dexter.predict.predictor import Prediction, Predictor

PLACES = 100
"""A proposed label is looked for among the first so many places."""
_NEIGHBOURS = 32
"""Labels nearest to the proposed one that are kept in the small model, for a classifier row is borrowed from them."""
_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Proposal:
    """What would become of a label."""

    text: str
    rank: int | None
    """Its place for the text; None where it is not among the first, or there is no text."""
    score: float | None
    above: Prediction | None
    """The label it would come right after."""
    similar: Sequence[SimilarLabel]

    @property
    def duplicates(self) -> list[SimilarLabel]:
        """Labels that mean the same already."""
        return [label for label in self.similar if label.same_text or label.similarity >= DUPLICATE_SIMILARITY]


def propose(predictor: Predictor, text: str, label_text: str, *, num_similar: int = 5) -> Proposal:
    """Rank a label that does not exist. Nothing is changed, and nothing of the size of all labels is copied.

    The labels that could stand before it and those it would borrow from make a small model, in which the new one
    competes.
    """
    model = predictor.model
    near = predictor.similar_labels(label_text, _NEIGHBOURS)
    similar = near[:num_similar]
    if not text.strip():
        return Proposal(label_text, None, None, None, similar)
    near_ids = {label.id for label in near}
    rows = predictor.top([text], PLACES).ids[0]
    near_rows = [row for row, label_id in enumerate(model.labels.ids) if label_id in near_ids]
    kept = np.unique(np.concatenate([rows[rows >= 0], np.array(near_rows, dtype=np.int64)]))
    new_id = free_id(label_text, set(model.labels.ids))
    new = encode_change(model, LabelChange(add=[(new_id, label_text)]))
    competing = apply_changes(model.select_labels(kept), new)
    small = Predictor(competing, head=predictor.head, neighbours=predictor.uses_neighbours, dial=predictor.dial)
    ranking = small.predict([text], k=PLACES)[0]
    place = next((place for place, label in enumerate(ranking) if label.id == new_id), None)
    if place is None:
        return Proposal(label_text, None, None, None, similar)
    above = ranking[place - 1] if place else None
    return Proposal(label_text, place + 1, ranking[place].score, above, similar)


def free_id(label_text: str, taken: Collection[str]) -> str:
    """An id for a new label, made of the words of its text, that no label has."""
    words = _NOT_WORDS.sub("-", label_text.casefold()).strip("-")[:80] or "label"
    candidate, number = words, 2
    while candidate in taken:
        candidate, number = f"{words}-{number}", number + 1
    return candidate
