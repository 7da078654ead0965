"""Labels that mean nearly the same: equal texts up to case and punctuation, or embeddings with a high cosine.

Shapes: N texts, L labels, D dimensions, K results.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dexter.encoders.head_arrays import unit_rows
from dexter.errors import UsageError
from dexter.index import search

if TYPE_CHECKING:
    from dexter.model.labels import Labels
    from dexter.model.model import Model

log = logging.getLogger("dexter")
DUPLICATE_SIMILARITY = 0.95
"""Smallest cosine of two label embeddings at which the labels count as duplicates."""
_REPORTED_DUPLICATES = 3
_MOST_PAIRS = 10**9
"""Largest number of pairs of changed and other labels whose embeddings are compared (about 20 s); texts always are."""
_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class SimilarLabel:
    """A label that resembles a text."""

    id: str
    text: str
    similarity: float
    """Cosine of the embeddings, without label priors."""
    same_text: bool
    """Whether the texts are equal up to case, spaces and punctuation."""


@dataclass(frozen=True)
class Duplicate:
    """An added or renamed label that resembles other labels."""

    id: str
    text: str
    resembles: Sequence[SimilarLabel]

    def __str__(self) -> str:
        named = ", ".join(f"{label.id!r} ({_excerpt(label.text)}, {label.similarity:.2f})" for label in self.resembles)
        return f"label {self.id!r} ({_excerpt(self.text)}) looks like {named}"


def normal_text(text: str) -> str:
    """Return the text without differences in case, character width, spaces and punctuation."""
    plain = (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
    return _NOT_WORDS.sub(" ", plain).strip() or plain.strip()


def find_similar(model: Model, texts: Sequence[str], k: int) -> list[list[SimilarLabel]]:
    """Return the k labels most similar to each text, which is encoded as a label's text."""
    embeddings_ND = model.label_embeddings(model.encode_labels(texts))
    return _similar_labels(texts, embeddings_ND, model.labels, model.label_embeddings(), k)


def find_duplicates(model: Model, changed: Sequence[tuple[str, str]]) -> list[Duplicate]:
    """Return those of some labels of the model, given as (id, text), that resemble other labels."""
    if not changed:
        return []
    ids, texts = [label_id for label_id, _ in changed], [text for _, text in changed]
    embeddings_LD = model.label_embeddings()
    by_embedding = len(changed) * len(embeddings_LD) <= _MOST_PAIRS
    if not by_embedding:
        log.warning("%s new labels: compared with the others by text only", f"{len(changed):,}")
    # One more than is reported, because a label is the nearest to itself.
    k = _REPORTED_DUPLICATES + 1
    own_ND = embeddings_LD[model.labels.rows(ids)]
    found = _similar_labels(texts, own_ND, model.labels, embeddings_LD, k, by_embedding=by_embedding)
    duplicates = []
    for label_id, text, near in zip(ids, texts, found, strict=True):
        resembles = [
            label
            for label in near
            if label.id != label_id and (label.same_text or label.similarity >= DUPLICATE_SIMILARITY)
        ]
        if resembles:
            duplicates.append(Duplicate(label_id, text, resembles))
    return duplicates


def _similar_labels(
    texts: Sequence[str],
    embeddings_ND: NDArray[np.float32],
    labels: Labels,
    label_embeddings_LD: NDArray[np.float32],
    k: int,
    *,
    by_embedding: bool = True,
) -> list[list[SimilarLabel]]:
    """Return k labels for each text: first those of equal text, then those of the highest cosine.

    Both embeddings are without priors. Unless `by_embedding`, only labels of equal text are found.
    """
    if k < 1:
        raise UsageError(f"k must be 1 or more, got {k}")
    nearest: list[dict[int, float]] = [{} for _ in texts]
    if by_embedding:
        directions_ND, directions_LD = (unit_rows(vectors) for vectors in (embeddings_ND, label_embeddings_LD))
        top = search(directions_ND, directions_LD, min(k, len(directions_LD)))
        nearest = [dict(zip(*row, strict=True)) for row in zip(top.ids.tolist(), top.scores.tolist(), strict=True)]
    same = _rows_by_text(texts, labels)
    found = []
    for text, vector_D, near in zip(texts, embeddings_ND, nearest, strict=True):
        twins = same[normal_text(text)][:k]
        missing = [row for row in twins if row not in near]
        if missing:
            cosines = (unit_rows(label_embeddings_LD[missing]) @ unit_rows(vector_D[None])[0]).tolist()
            near |= zip(missing, cosines, strict=True)
        # Labels of equal text come first whatever their embeddings: the reader wants to see those.
        order = sorted(near, key=lambda row: (row not in twins, -near[row], row))[:k]
        found.append([SimilarLabel(labels.ids[row], labels.texts[row], near[row], row in twins) for row in order])
    return found


def _rows_by_text(texts: Sequence[str], labels: Labels) -> dict[str, list[int]]:
    """Return the rows of the labels that have one of the texts, by normal text."""
    wanted: dict[str, list[int]] = {normal_text(text): [] for text in texts}
    for row, text in enumerate(labels.texts):
        rows = wanted.get(normal_text(text))
        if rows is not None:
            rows.append(row)
    return wanted


def _excerpt(text: str, length: int = 60) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= length else flat[: length - 1] + "…")
