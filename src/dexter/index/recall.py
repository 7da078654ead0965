"""How much an approximate index misses: its best labels against those of exact search, on a sample of queries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from dexter.index.exact import search

if TYPE_CHECKING:
    from dexter.index.base import Index
    from dexter.ranking import TopK

RECALL_AT = 100
"""Labels per query that are compared."""
BAR = 0.98
"""An index that finds less of them is not made."""
TARGET = 0.99
"""More candidates are looked at until so much is found."""


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
