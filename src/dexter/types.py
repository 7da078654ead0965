"""What several packages share: the best labels of a query, names of heads, bands of frequency, propensities."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np


class TopK(NamedTuple):
    """The best labels of each query, best first; equal scores in order of id."""

    ids: np.ndarray
    """int64, queries x k; -1 where a query has fewer than k labels to return."""
    scores: np.ndarray
    """float32, queries x k; minus infinity where there is no label."""


Side = Literal["query", "label"]
"""Which kind of text: limits on length, prefixes and positions differ."""

HeadName = Literal["encoder", "classifier", "unified"]
HEAD_NAMES: tuple[HeadName, ...] = ("encoder", "classifier", "unified")
"""Which vectors predict: those of the dual encoder, those of the classifier, or both end to end."""


BANDS: Mapping[str, tuple[int, float]] = {
    "frequent": (101, np.inf),
    "torso": (10, 100),
    "tail": (1, 9),
    "unseen": (0, 0),
}
"""Smallest and largest number of training queries of a label, by frequency band, from common to rare."""


PROPENSITY: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"default": (0.55, 1.5), "amazon": (0.6, 2.6), "wikipedia": (0.5, 0.4)}
)
"""The constants (a, b) of propensities by family of data sets. WikiSeeAlso belongs to the default, not to wikipedia."""


def band_of(count: int) -> str:
    """Return the frequency band of a label with `count` training queries."""
    return next(name for name, (least, most) in BANDS.items() if least <= count <= most)
