"""Texts to begin with, from the run itself."""

from __future__ import annotations

from dexter.predict.predictor import Predictor

_NUM_EXAMPLES = 4
_SHORTEST = 12
_CANDIDATES = 64


def example_texts(predictor: Predictor) -> list[str]:
    """A few training texts where the run kept them, else texts of labels from common to rare."""
    kept = predictor.model.training_queries
    if kept is not None and len(kept):
        step = max(1, len(kept) // _CANDIDATES)
        return spread([kept.texts[row] for row in range(0, len(kept), step)])
    texts, counts = predictor.labels.texts, predictor.labels.counts
    order = (-counts).argsort(kind="stable")
    step = max(1, len(order) // _CANDIDATES)
    candidates = [text for row in order[::step] if len(text := str(texts[row])) >= _SHORTEST]
    return spread(candidates or [str(text) for text in texts])


def spread(texts: list[str]) -> list[str]:
    """So many of the texts as are shown, at equal distances."""
    step = max(1, len(texts) // _NUM_EXAMPLES)
    return texts[step // 2 :: step][:_NUM_EXAMPLES]
