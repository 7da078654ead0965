"""Why a label, laid out for reading: the text in pieces, each with how strongly it speaks for the label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dexter.explain import Explanation, Word
from dexter.predictor import Predictor

_LEVELS = 4
"""Shades of a word; a word that speaks against the label has a negative one."""
_LONGEST = 4_000
"""So much of a text is shown."""


@dataclass(frozen=True)
class Piece:
    """A part of the text, and its shade: 0 where it does not matter."""

    text: str
    level: int


@dataclass(frozen=True)
class Why:
    """An explanation, and the text it is about in pieces."""

    explanation: Explanation
    pieces: Sequence[Piece]


def why(predictor: Predictor, text: str, label_id: str) -> Why | None:
    """Why the run ranks the label as it does; None where there is no such label any more."""
    if label_id not in predictor.labels.ids:
        return None
    explanation = predictor.explain(text, label_id)
    return Why(explanation, highlight(text[:_LONGEST], explanation.words))


def highlight(text: str, words: Sequence[Word]) -> list[Piece]:
    """Cut a text at its words; the word that matters most has the darkest shade."""
    strongest = max((abs(word.weight) for word in words), default=0.0)
    pieces, place = [], 0
    for word in words:
        if word.end > len(text):
            break
        level = round(_LEVELS * word.weight / strongest) if strongest > 0 else 0
        pieces += [Piece(text[place : word.start], 0), Piece(text[word.start : word.end], level)]
        place = word.end
    return [piece for piece in [*pieces, Piece(text[place:], 0)] if piece.text]
