"""Explain why a text gets a label: the parts of its score, the words that carry it, and training queries that have it;
and preview the rank of a label that does not exist yet.

A word's weight is what the score loses when the word is left out of the text, so it may be negative. Weights need not
add up to the score, because words are not independent of each other; the parts of the score do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.index import ExactIndex, Index
from dexter.model.edits import LabelChange, apply_changes, encode_change
from dexter.model.labels import new_label_id
from dexter.model.model import Model
from dexter.model.similar import DUPLICATE_SIMILARITY, SimilarLabel, find_similar
from dexter.predict.neighbours import Neighbour, find_lexical_neighbours, find_neighbours
from dexter.predict.rank import RankingChoice, find_voters, rank, score_parts
from dexter.types import band_of

_WORD = re.compile(r"\w+(?:[.'’+#-]+\w+)*[+#]*")
_MOST_WORDS = 256
"""Words that are weighed, from the beginning of the text: encoders hardly read more."""
_MOST_CHARACTERS = 20_000
"""Characters of a text that are used; encoders read less."""
_SHOWN_WORDS = 8
"""Strongest words in the printed form."""
MAX_PREVIEW_RANK = 100
"""Lowest rank that is looked for in a preview."""
_NUM_SIMILAR, _NUM_COMPETING = 5, 32
"""Similar labels that a preview returns, and that the new label competes with (they lend it their classifier rows)."""

Parts = Mapping[str, NDArray[np.float32]]
"""The parts of scores by name, each texts x labels."""


@dataclass(frozen=True)
class Word:
    """A word of the text, its position in characters, and what the score loses without it."""

    text: str
    start: int
    end: int
    weight: float


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a text gets a label, or does not."""

    id: str
    text: str
    """The label's."""
    parts: Mapping[str, float]
    """What adds up to the score: inner products of encoder and classifier, their priors, the votes of neighbours,
    and for a new label the words that the text shares with it."""
    words: Sequence[Word]
    """The text's words in order."""
    neighbours: Sequence[Neighbour]
    """The training queries most similar to the text among those that have the label, where they are kept: by vectors,
    then more of them by words if such queries vote."""
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
        """Return plain values for JSON."""
        return {**asdict(self), "score": self.score, "band": self.band}

    def lines(self) -> list[str]:
        """Return lines to print: parts, strongest words, training queries."""
        strongest = sorted(self.words, key=lambda word: -abs(word.weight))[:_SHOWN_WORDS]
        shown = [
            "= " + " ".join(f"{value:+.4f} {name}" for name, value in self.parts.items()),
            "words: " + (", ".join(f"{word.text} {word.weight:+.4f}" for word in strongest) or "none"),
            f"{self.count:,} training queries ({self.band})" + ("; nearest of them:" if self.neighbours else ""),
        ]
        return shown + [
            f"  {neighbour.similarity:.4f}  {neighbour.text}{' (by words)' * (neighbour.by == 'words')}"
            for neighbour in self.neighbours
        ]


def explain_labels(
    model: Model, index: Index, choice: RankingChoice, text: str, labels: list[int], *, num_neighbours: int
) -> list[Explanation]:
    """Explain the scores of several labels (rows of the model's labels) of one text.

    `index` has the label vectors of the chosen head and dial. Each label gets up to `num_neighbours` training queries.
    """

    def score(texts: Sequence[str]) -> Parts:
        return score_parts(model, index, texts, choice, labels)

    parts, words = explain_scores(text, len(labels), score)
    near: list[list[Neighbour]] = [[] for _ in labels]
    if model.training_queries is not None and model.training_queries.index is not None:
        representations_ND = model.encode_queries([text])
        near = [find_neighbours(model, representations_ND, num_neighbours, label=row)[0] for row in labels]
    if choice.lexical_votes is not None:
        for row, found in zip(labels, near, strict=True):
            known = {neighbour.id for neighbour in found}
            by_words = find_lexical_neighbours(model, [text], num_neighbours, label=row)[0]
            found += [neighbour for neighbour in by_words if neighbour.id not in known]
    return [
        Explanation(
            id=model.labels.ids[row],
            text=model.labels.texts[row],
            parts=parts[place],
            words=words[place],
            neighbours=near[place],
            count=int(model.labels.counts[row]),
        )
        for place, row in enumerate(labels)
    ]


def explain_scores(
    text: str, num_labels: int, score: Callable[[Sequence[str]], Parts]
) -> tuple[list[dict[str, float]], list[list[Word]]]:
    """Return the parts of a text's score for each label, and the weight of each of its words for it.

    Args:
        text: the text.
        num_labels: the number of labels that `score` scores.
        score: returns the parts of the scores of texts; called once, with the text and with each of its words left out.
    """
    text = text[:_MOST_CHARACTERS]
    places = [match.span() for match in _WORD.finditer(text)][:_MOST_WORDS]
    parts = score([text, *(text[:start] + text[end:] for start, end in places)])
    scores_NK = np.stack(list(parts.values())).sum(axis=0, dtype=np.float64)
    lost_NK = scores_NK[:1] - scores_NK[1:]
    return (
        [{name: float(values_NK[0, label]) for name, values_NK in parts.items()} for label in range(num_labels)],
        [
            [Word(text[s:e], s, e, float(weight)) for (s, e), weight in zip(places, lost_NK[:, label], strict=True)]
            for label in range(num_labels)
        ],
    )


@dataclass(frozen=True)
class LabelPreview:
    """A label that does not exist yet."""

    text: str
    similar: Sequence[SimilarLabel]
    """The labels it resembles, nearest first."""
    rank: int | None = None
    """Its rank for the text; None without a text, or below `MAX_PREVIEW_RANK`."""
    score: float | None = None
    above: str | None = None
    """Text of the label one rank above it."""

    @property
    def duplicates(self) -> list[SimilarLabel]:
        """Labels that mean the same."""
        return [label for label in self.similar if label.same_text or label.similarity >= DUPLICATE_SIMILARITY]


def preview_label(model: Model, index: Index, choice: RankingChoice, text: str, label_text: str) -> LabelPreview:
    """Rank a new label for a text (if that is not empty) without adding it.

    The labels that could rank above it and those that it resembles make a small model, in which it competes, so that
    nothing of the size of all labels is copied.
    """
    [near] = find_similar(model, [label_text], _NUM_COMPETING)
    preview = LabelPreview(label_text, near[:_NUM_SIMILAR])
    if not text.strip():
        return preview
    representations_1D = model.encode_queries([text])
    voters = find_voters(model, [text], representations_1D, choice)
    best_rows = rank(model, index, representations_1D, choice, MAX_PREVIEW_RANK, voters=voters).ids[0]
    near_rows = np.array(model.labels.rows(label.id for label in near), dtype=np.int64)
    added = encode_change(model, LabelChange(add=[(new_label_id(label_text, set(model.labels.ids)), label_text)]))
    small = apply_changes(model.select_labels(np.union1d(best_rows[best_rows >= 0], near_rows)), added)
    small_index = ExactIndex(small.label_vectors(head=choice.head, dial=choice.dial))
    voters = find_voters(small, [text], representations_1D, choice)
    found = rank(small, small_index, representations_1D, choice, MAX_PREVIEW_RANK, voters=voters)
    rows = found.ids[0].tolist()
    new_row = len(small.labels.ids) - 1
    if new_row not in rows:
        return preview
    place = rows.index(new_row)
    above = small.labels.texts[rows[place - 1]] if place else None
    return LabelPreview(label_text, preview.similar, place + 1, float(found.scores[0, place]), above)
