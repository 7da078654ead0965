"""Why a label, laid out for reading: the text in pieces, each with how strongly it speaks for the label, and what its
score is made of, as steps that lead from nothing to the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dexter.serving.protocol import NearText, RankedLabel, WordWeight

_LEVELS = 4
"""Shades of a word; a word that speaks against the label has a negative one."""
_LONGEST = 4_000
"""So much of a text is shown."""
_TITLES: Mapping[str, str] = {
    "encoder": "Dual encoder",
    "classifier": "Classifier",
    "neighbours": "Neighbours",
    "encoder prior": "Label frequency",
    "classifier prior": "Label frequency",
    "frequency": "Label frequency",
}
"""What the parts of a score are called, in this order; parts of one title are one step."""


@dataclass(frozen=True)
class Piece:
    """A part of the text, and its shade: 0 where it does not matter."""

    text: str
    level: int


@dataclass(frozen=True)
class Step:
    """A part of a score, and where its bar lies when each begins where the one before ended; from 0 to 1."""

    title: str
    value: float
    start: float
    width: float


@dataclass(frozen=True)
class Why:
    """An explanation of a label's place for a text."""

    pieces: Sequence[Piece]
    steps: Sequence[Step]
    """They add up to the score, which is the last one."""
    neighbours: Sequence[NearText]


def why(label: RankedLabel, text: str) -> Why | None:
    """What explains the label's score; None where it was removed before that was found out."""
    if label.why is None:
        return None
    return Why(highlight(text[:_LONGEST], label.why.words), add_up(label.why.parts), label.why.neighbours)


def highlight(text: str, words: Sequence[WordWeight]) -> list[Piece]:
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


def add_up(parts: Mapping[str, float]) -> list[Step]:
    """The parts as steps on one scale, and the score that they lead to."""
    values: dict[str, float] = {}
    for name in [name for name in _TITLES if name in parts] + [name for name in parts if name not in _TITLES]:
        title = _TITLES.get(name, name)
        values[title] = values.get(title, 0.0) + parts[name]
    ends = list(accumulate(values.values()))
    score = ends[-1] if ends else 0.0
    low, high = min([0.0, *ends]), max([0.0, *ends])
    span = (high - low) or 1.0

    def step(title: str, start: float, end: float) -> Step:
        return Step(title, end - start, (min(start, end) - low) / span, abs(end - start) / span)

    steps = [step(title, start, end) for title, start, end in zip(values, [0.0, *ends], ends, strict=False)]
    return [*steps, step("Score", 0.0, score)]
