"""How much an approximate index misses: its best labels against those of exact search, on a sample of queries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dexter.errors import ModelError
from dexter.index.exact import search

if TYPE_CHECKING:
    from dexter.index.base import Index
    from dexter.types import TopK

RECALL_AT = 100
"""Labels per query that are compared."""
BAR = 0.98
"""An index that finds less of them is not made."""
TARGET = 0.99
"""More candidates are looked at until so much is found."""
MOST_SAMPLED = 512
"""Queries that recall is measured on."""


def measure_recall(index: Index, queries_ND: Tensor | np.ndarray, *, exact: TopK | None = None) -> float:
    """The share of the exact best labels that the index finds; one of equal score is as good.

    `exact` is what exact search found for these queries; it is searched for where it is not given.
    """
    k = min(RECALL_AT, len(index.vectors_LD))
    wanted = search(queries_ND, index.vectors_LD, k) if exact is None else exact
    found = index.search(queries_ND, k)
    # Two orders of summation differ in the last bits, by a share of the largest scores.
    slack = 1e-5 * np.abs(wanted.scores).max(axis=1, keepdims=True)
    return float((found.scores >= wanted.scores[:, -1:] - slack).mean())


def check_recall(index: Index) -> None:
    """Raise where an index was measured and misses too much."""
    if index.recall is not None and index.recall < BAR:
        raise ModelError(
            f"index {index.backend}: recall@{RECALL_AT} is {index.recall:.4f} against exact search, expected {BAR} or "
            "more: choose another backend; `exact` always finds everything"
        )


def sample(vectors_ND: Tensor) -> Tensor:
    """Some of the vectors, evenly spread."""
    step = max(1, len(vectors_ND) // MOST_SAMPLED)
    return vectors_ND[::step][:MOST_SAMPLED].to("cpu", torch.float32)


def noisy_sample(labels_LD: Tensor) -> Tensor:
    """Vectors near some of the labels, in place of queries: with noise of a third of their length."""
    sample_ND = sample(labels_LD)
    noise_ND = torch.randn(sample_ND.shape, generator=torch.Generator().manual_seed(0))
    lengths_N1: Tensor = torch.linalg.vector_norm(sample_ND, dim=1, keepdim=True)
    return sample_ND + noise_ND * lengths_N1 / (3 * math.sqrt(sample_ND.shape[1]))
