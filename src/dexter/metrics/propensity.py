"""How likely a relevant pair was to be recorded at all, given how often its label was seen in training.

Rare labels are missed more often, so a hit on one is worth more: its weight is the inverse propensity 1/p. The model
and its constants are those of Jain, Prabhu and Varma (2016), which every table of the field uses.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import numpy as np

from dexter.errors import DataError, UsageError
from dexter.metrics.hits import relevant_pairs

PROPENSITY = MappingProxyType({"default": (0.55, 1.5), "amazon": (0.6, 2.6), "wikipedia": (0.5, 0.4)})
"""The constants (a, b) by family of data sets. WikiSeeAlso belongs to the default, not to wikipedia."""


def inverse_propensity(train_relevance: Any, a: float = 0.55, b: float = 1.5) -> np.ndarray:
    """The weight 1/p of every label: 1 + C (n + b)^-a with C = (ln N - 1)(b + 1)^a.

    N is the number of training queries (those without labels included), n the number of them that have the label. C is
    kept from falling below zero, which it would for N < 3, so a weight is never less than 1.
    """
    if not (math.isfinite(a) and math.isfinite(b) and b > 0):
        raise UsageError(f"propensity constants are a = {a}, b = {b}: both must be finite and b above zero")
    relevance = relevant_pairs(train_relevance)
    num_queries, num_labels = relevance.shape
    if not num_queries:
        raise DataError("there are no training queries to count labels in: pass no training relevance to leave PSP out")
    counts = np.bincount(relevance.indices, minlength=num_labels).astype(np.float64)
    scale = max(math.log(num_queries) - 1.0, 0.0) * (b + 1.0) ** a
    return np.asarray(1.0 + scale * (counts + b) ** -a)
