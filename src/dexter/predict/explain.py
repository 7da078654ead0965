"""Why a label: what its score is made of, the words of the text that carry it, and training queries that have it.

A word's weight is what the score loses when the word is left out of the text, so it may be negative; weights need not
add up to the score, because words are not independent of each other. The parts of the score do add up to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dexter.types import band_of

if TYPE_CHECKING:
    from dexter.predict.predictor import Neighbour

_WORD = re.compile(r"\w+(?:[.'’+#-]+\w+)*[+#]*")
_MOST_WORDS = 256
"""So many words are weighed, from the beginning: what follows is hardly read by an encoder."""
_MOST_CHARACTERS = 20_000
"""So much of a text is looked at; encoders read less."""
_SHOWN_WORDS = 8

Parts = Mapping[str, NDArray[np.float32]]
"""The parts of scores by name, each texts x labels."""


@dataclass(frozen=True)
class Word:
    """A word of the text, where it stands, and what the score loses without it."""

    text: str
    start: int
    end: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a text got a label, or did not."""

    id: str
    text: str
    """The label's."""
    parts: Mapping[str, float]
    """What adds up to the score: inner products of encoder and classifier, their priors, the memory's votes."""
    words: Sequence[Word]
    """The text's words in order."""
    neighbours: Sequence[Neighbour]
    """The training queries most similar to the text among those that have the label, where they are kept."""
    count: int
    """Training queries of the label."""

    @property
    def score(self) -> float:
        """The sum of the parts."""
        return float(sum(self.parts.values()))

    @property
    def band(self) -> str:
        """How frequent the label is: frequent, torso, tail or unseen."""
        return band_of(self.count)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "score": self.score, "band": self.band}

    def lines(self) -> list[str]:
        """The same to read: parts, strongest words, training queries."""
        strongest = sorted(self.words, key=lambda word: -abs(word.weight))[:_SHOWN_WORDS]
        shown = [
            "= " + " ".join(f"{value:+.4f} {name}" for name, value in self.parts.items()),
            "words: " + (", ".join(f"{word.text} {word.weight:+.4f}" for word in strongest) or "none"),
            f"{self.count:,} training queries ({self.band})" + ("; nearest of them:" if self.neighbours else ""),
        ]
        return shown + [f"  {neighbour.similarity:.4f}  {neighbour.text}" for neighbour in self.neighbours]


def explain_scores(
    text: str, num_labels: int, score_parts: Callable[[Sequence[str]], Parts]
) -> tuple[list[dict[str, float]], list[list[Word]]]:
    """The parts of a text's scores for some labels, and the weight of each of its words for each of them.

    Args:
        text: the text.
        num_labels: of how many labels `score_parts` gives the scores.
        score_parts: the parts of the scores of texts; called once, with the text and with each of its words left out.
    """
    text = text[:_MOST_CHARACTERS]
    places = [match.span() for match in _WORD.finditer(text)][:_MOST_WORDS]
    parts = score_parts([text, *(text[:start] + text[end:] for start, end in places)])
    scores_NK = np.stack(list(parts.values())).sum(axis=0, dtype=np.float64)
    lost_NK = scores_NK[:1] - scores_NK[1:]
    return (
        [{name: float(values_NK[0, label]) for name, values_NK in parts.items()} for label in range(num_labels)],
        [
            [Word(text[s:e], s, e, float(weight)) for (s, e), weight in zip(places, lost_NK[:, label], strict=True)]
            for label in range(num_labels)
        ],
    )
