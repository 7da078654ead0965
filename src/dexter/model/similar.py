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

import torch
from torch import Tensor
from torch.nn import functional

from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.model.labels import Labels
    from dexter.model.model import Model

log = logging.getLogger("dexter")
DUPLICATE_SIMILARITY = 0.95
"""Smallest cosine of two label embeddings at which the labels count as duplicates."""
_REPORTED_DUPLICATES = 3
_MOST_PAIRS = 10**9
"""Largest number of pairs of changed and other labels whose embeddings are compared (about 20 s); texts always are."""
_BLOCK_TEXTS, _BLOCK_LABELS = 256, 65_536
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
    return similar_labels(texts, embeddings_ND, model.labels, model.label_embeddings(), k)


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
    found = similar_labels(texts, own_ND, model.labels, embeddings_LD, k, by_embedding=by_embedding)
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


def similar_labels(
    texts: Sequence[str],
    embeddings_ND: Tensor,
    labels: Labels,
    label_embeddings_LD: Tensor,
    k: int,
    *,
    by_embedding: bool = True,
) -> list[list[SimilarLabel]]:
    """Return k labels for each text: first those of equal text, then those of the highest cosine.

    Args:
        texts: the texts to compare.
        embeddings_ND: their embeddings as label texts.
        labels: the labels to search.
        label_embeddings_LD: the labels' embeddings, without priors.
        k: labels per text.
        by_embedding: whether to compare embeddings, or texts only.
    """
    if k < 1:
        raise UsageError(f"k must be 1 or more, got {k}")
    cosines_NK, rows_NK = _nearest(embeddings_ND, label_embeddings_LD, k if by_embedding else 0)
    same = _rows_by_text(texts, labels)
    found = []
    for text, vector_D, cosines, rows in zip(texts, embeddings_ND, cosines_NK.tolist(), rows_NK.tolist(), strict=True):
        near = dict(zip(rows, cosines, strict=True))
        twins = same[normal_text(text)][:k]
        missing = [row for row in twins if row not in near]
        if missing:
            cosines = functional.cosine_similarity(vector_D, label_embeddings_LD[missing]).tolist()
            near |= zip(missing, cosines, strict=True)
        # Labels of equal text come first whatever their embeddings: the reader wants to see those.
        order = sorted(near, key=lambda row: (row not in twins, -near[row], row))[:k]
        found.append([SimilarLabel(labels.ids[row], labels.texts[row], near[row], row in twins) for row in order])
    return found


def _nearest(vectors_ND: Tensor, label_vectors_LD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return cosines and rows of the k nearest labels, in blocks that bound the memory."""
    parts = [_nearest_of_block(block_BD, label_vectors_LD, k) for block_BD in torch.split(vectors_ND, _BLOCK_TEXTS)]
    return torch.cat([cosines for cosines, _ in parts]), torch.cat([rows for _, rows in parts])


def _nearest_of_block(vectors_BD: Tensor, label_vectors_LD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    queries_BD = functional.normalize(vectors_BD, dim=1)
    best_BK = queries_BD.new_empty(len(queries_BD), 0)
    rows_BK = torch.empty(len(queries_BD), 0, dtype=torch.int64, device=queries_BD.device)
    for start in range(0, len(label_vectors_LD) if k else 0, _BLOCK_LABELS):
        block_LD = functional.normalize(label_vectors_LD[start : start + _BLOCK_LABELS], dim=1)
        cosines, rows = (queries_BD @ block_LD.T).topk(min(k, len(block_LD)), dim=1)
        best_BK, rows_BK = torch.cat([best_BK, cosines], dim=1), torch.cat([rows_BK, rows + start], dim=1)
        best_BK, order = best_BK.topk(min(k, best_BK.shape[1]), dim=1)
        rows_BK = rows_BK.gather(1, order)
    return best_BK, rows_BK


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
