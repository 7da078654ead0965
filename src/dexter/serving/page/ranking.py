"""Rankings laid out for reading: the list with its bars, several rankings side by side, the explanation of a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dexter.predict import Neighbour, Predictor, Word
from dexter.serving.protocol import RankedLabel

_LEVELS = 4
"""Shades of a word, from 1 to this; negative for a word that lowers the score."""
_MAX_SHOWN_CHARACTERS = 4_000
_PART_TITLES: Mapping[str, str] = {
    "encoder": "Dual encoder",
    "classifier": "Classifier",
    "neighbours": "Neighbours",
    "neighbours by words": "Neighbours by words",
    "encoder prior": "Label frequency",
    "classifier prior": "Label frequency",
    "frequency": "Label frequency",
}
"""Titles of the parts of a score, in the order shown; parts with the same title are added up."""


@dataclass(frozen=True)
class ListedLabel:
    """A label of the list."""

    label: RankedLabel
    bar: float
    """Length of its bar, from 0 to 1."""
    count: int
    """Training texts of the label."""


def list_labels(ranking: Sequence[RankedLabel], predictor: Predictor) -> list[ListedLabel]:
    """Add bars and counts. A bar is the probability if known, otherwise relative to the best score."""
    wanted, labels = {label.id for label in ranking}, predictor.labels
    # A label that was removed meanwhile has no count.
    counts = {label_id: int(labels.counts[row]) for row, label_id in enumerate(labels.ids) if label_id in wanted}
    best = max((label.score for label in ranking), default=0.0)
    bars = [
        label.probability if label.probability is not None else label.score / best if best > 0 else 0.0
        for label in ranking
    ]
    return [ListedLabel(label, bar, counts.get(label.id, 0)) for label, bar in zip(ranking, bars, strict=True)]


@dataclass(frozen=True)
class ComparedLabel:
    """A label of one of several rankings."""

    label: RankedLabel
    move: int | None
    """Ranks that it is higher than in the first ranking (lower if negative); None if the first does not have it."""


def side_by_side(rankings: Mapping[str, Sequence[RankedLabel]], *, num_shown: int) -> dict[str, list[ComparedLabel]]:
    """Compare rankings by title with the first one, and return the best labels of each.

    Rankings longer than `num_shown` find more labels that have moved far.
    """
    first = {label.id: label.rank for label in next(iter(rankings.values()))}
    return {
        title: [
            ComparedLabel(label, first[label.id] - label.rank if label.id in first else None)
            for label in labels[:num_shown]
        ]
        for title, labels in rankings.items()
    }


@dataclass(frozen=True)
class TextPiece:
    """A piece of a text, and its shade: 0 if it does not matter."""

    text: str
    level: int


@dataclass(frozen=True)
class ScoreStep:
    """A part of a score as a bar that begins where the one before ended; start and width are from 0 to 1."""

    title: str
    value: float
    start: float
    width: float


@dataclass(frozen=True)
class ShownExplanation:
    """The explanation of a label, laid out."""

    pieces: Sequence[TextPiece]
    steps: Sequence[ScoreStep]
    """The parts of the score; the last step is the score itself."""
    neighbours: Sequence[Neighbour]


def lay_out_explanation(label: RankedLabel, text: str) -> ShownExplanation | None:
    """Lay out the explanation of a label; None if the label was removed before it was explained."""
    if label.explanation is None:
        return None
    pieces = highlight(text[:_MAX_SHOWN_CHARACTERS], label.explanation.words)
    return ShownExplanation(pieces, score_steps(label.explanation.parts), label.explanation.neighbours)


def highlight(text: str, words: Sequence[Word]) -> list[TextPiece]:
    """Cut a text at its words; the word with the largest weight gets the darkest shade."""
    strongest = max((abs(word.weight) for word in words), default=0.0)
    pieces, position = [], 0
    for word in words:
        if word.end > len(text):
            break
        level = round(_LEVELS * word.weight / strongest) if strongest > 0 else 0
        pieces += [TextPiece(text[position : word.start], 0), TextPiece(text[word.start : word.end], level)]
        position = word.end
    return [piece for piece in [*pieces, TextPiece(text[position:], 0)] if piece.text]


def score_steps(parts: Mapping[str, float]) -> list[ScoreStep]:
    """Turn the parts of a score into steps on one scale, followed by the score."""
    values: dict[str, float] = {}
    for name in [name for name in _PART_TITLES if name in parts] + [name for name in parts if name not in _PART_TITLES]:
        title = _PART_TITLES.get(name, name)
        values[title] = values.get(title, 0.0) + parts[name]
    ends = list(accumulate(values.values()))
    score = ends[-1] if ends else 0.0
    low, high = min([0.0, *ends]), max([0.0, *ends])
    span = (high - low) or 1.0

    def step(title: str, start: float, end: float) -> ScoreStep:
        return ScoreStep(title, end - start, (min(start, end) - low) / span, abs(end - start) / span)

    steps = [step(title, start, end) for title, start, end in zip(values, [0.0, *ends], ends, strict=False)]
    return [*steps, step("Score", 0.0, score)]
