"""Labels that mean nearly the same: the same text but for case and punctuation, or vectors that point the same way.

Shapes: N texts, L labels, D dimensions, K places.
"""

from __future__ import annotations

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
    from dexter.model.model import Labels

DUPLICATE_SIMILARITY = 0.95
"""Cosine of two label vectors from which on the labels are taken for the same."""
_BLOCK_TEXTS, _BLOCK_LABELS = 256, 65_536
_NOT_WORDS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class SimilarLabel:
    """A label and how near it is."""

    id: str
    text: str
    similarity: float
    """Cosine of the two labels' vectors, without the labels' priors."""
    same_text: bool
    """Whether the texts are equal but for case, spaces and punctuation."""


@dataclass(frozen=True)
class Duplicate:
    """A label that looks like labels there were already."""

    id: str
    text: str
    resembles: Sequence[SimilarLabel]

    def __str__(self) -> str:
        named = ", ".join(f"{label.id!r} ({_excerpt(label.text)}, {label.similarity:.2f})" for label in self.resembles)
        return f"label {self.id!r} ({_excerpt(self.text)}) looks like {named}"


def normal_text(text: str) -> str:
    """A text without what does not change its meaning: case, width of characters, spaces, punctuation."""
    plain = (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
    return _NOT_WORDS.sub(" ", plain).strip() or plain.strip()


def similar_labels(
    texts: Sequence[str],
    vectors_ND: Tensor,
    labels: Labels,
    label_vectors_LD: Tensor,
    k: int,
    *,
    by_vector: bool = True,
) -> list[list[SimilarLabel]]:
    """For each text the labels of the same text, then those with the nearest vectors: k in all, nearest first.

    Args:
        texts: what to compare.
        vectors_ND: their vectors, as if they were labels.
        labels: the labels there are.
        label_vectors_LD: their vectors, without priors.
        k: labels per text.
        by_vector: look for near vectors too, or for equal texts only.
    """
    if k < 1:
        raise UsageError(f"k must be 1 or more, got {k}")
    cosines_NK, rows_NK = _nearest(vectors_ND, label_vectors_LD, k if by_vector else 0)
    same = _same_texts(texts, labels)
    found = []
    for text, vector_D, cosines, rows in zip(texts, vectors_ND, cosines_NK.tolist(), rows_NK.tolist(), strict=True):
        near = dict(zip(rows, cosines, strict=True))
        twins = same[normal_text(text)][:k]
        missing = [row for row in twins if row not in near]
        if missing:
            near |= zip(
                missing, functional.cosine_similarity(vector_D, label_vectors_LD[missing]).tolist(), strict=True
            )
        # Labels of the same text come first whatever their vectors say: the reader wants to see those.
        order = sorted(near, key=lambda row: (row not in twins, -near[row], row))[:k]
        found.append([SimilarLabel(labels.ids[row], labels.texts[row], near[row], row in twins) for row in order])
    return found


def duplicates(ids: Sequence[str], texts: Sequence[str], found: Sequence[Sequence[SimilarLabel]]) -> list[Duplicate]:
    """Those of the labels that look like one there was already, given the nearest ones to each."""
    result = []
    for label_id, text, near in zip(ids, texts, found, strict=True):
        alike = [
            label
            for label in near
            if label.id != label_id and (label.same_text or label.similarity >= DUPLICATE_SIMILARITY)
        ]
        if alike:
            result.append(Duplicate(label_id, text, alike))
    return result


def _nearest(vectors_ND: Tensor, label_vectors_LD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and rows of the k nearest labels, in blocks, so that neither all scores nor a scaled copy exist."""
    parts = [_nearest_of_few(block_BD, label_vectors_LD, k) for block_BD in torch.split(vectors_ND, _BLOCK_TEXTS)]
    return torch.cat([cosines for cosines, _ in parts]), torch.cat([rows for _, rows in parts])


def _nearest_of_few(vectors_BD: Tensor, label_vectors_LD: Tensor, k: int) -> tuple[Tensor, Tensor]:
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


def _same_texts(texts: Sequence[str], labels: Labels) -> dict[str, list[int]]:
    """Rows of the labels that have one of the texts, by normal text."""
    wanted: dict[str, list[int]] = {normal_text(text): [] for text in texts}
    for row, text in enumerate(labels.texts):
        rows = wanted.get(normal_text(text))
        if rows is not None:
            rows.append(row)
    return wanted


def _excerpt(text: str, length: int = 60) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= length else flat[: length - 1] + "…")
