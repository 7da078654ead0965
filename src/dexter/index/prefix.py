"""Exact search for one query at a time: scan a few rotated dimensions of all labels, and bound what the others can add.

The vectors are rotated so that the first dimensions hold most of their length, and of that of the queries, if some are
known: a bound is as loose as what the others hold of both. The inner product over a prefix of
dimensions, plus the product of what is left of the two lengths, is an upper bound of a score (Cauchy-Schwarz). Labels
whose bound is below the k-th best score known are out: after a short prefix most are, after a longer one nearly all,
and only the rest are scored in full. The result is that of scoring every label, for a fraction of the memory traffic,
which is what one query costs. Batches are better served by one matrix product.

The short prefix is stored one dimension after the other, in which order a product with one vector is twice as fast; the
dimensions up to the longer prefix one label after the other, so that those of some labels can be picked.

Shapes: L labels, D dimensions, S of the short prefix, P of the longer one, C candidates, K places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
_SAMPLED = 4_096
"""Vectors from which the rotation is computed."""
_SHARES, _SHARES_BY_QUERIES = (5, 2), (10, 4)
"""The prefixes are a fifth and half of the dimensions, or half as many where the rotation suits the queries too.
Shorter ones are as fast for most queries, slower for the hardest."""
_SEEDS = 4
"""Labels per place that are scored first, for a floor under the k-th best score."""
_GROUP = 32
_TINY = 1e-30
_ROUNDING = 4e-6
"""Relative error of lengths and products, generously."""


@dataclass(frozen=True, eq=False)
class PrefixScan:
    """The rotated prefixes of label vectors, and the lengths of the rest."""

    vectors_LD: Vectors
    rotation_DP: Vectors
    short_SL: Vectors
    """The dimensions of the short prefix, and as one more the length of what follows them."""
    next_LP: Vectors
    """The dimensions from there to the end of the longer prefix, and as two more the lengths of what follows the longer
    prefix and, less than 0, the short one."""
    longest: float
    """Length of the longest vector."""

    @classmethod
    def of(cls, vectors_LD: Vectors, queries_ND: Vectors | None = None) -> PrefixScan:
        """Rotate vectors, if given for queries like these; takes about as long as searching a hundred queries."""
        dimension = vectors_LD.shape[1]
        shares = _SHARES if queries_ND is None else _SHARES_BY_QUERIES
        short, long = (max(least, dimension // share) for least, share in zip((1, 2), shares, strict=True))
        moments_DD = _second_moments(vectors_LD)
        if queries_ND is not None:
            moments_DD += _second_moments(queries_ND)
        _, directions_DD = np.linalg.eigh(moments_DD)
        rotation_DP = np.ascontiguousarray(directions_DD[:, ::-1][:, :long])
        prefixes_LP = vectors_LD @ rotation_DP
        squares_L = np.einsum("ld,ld->l", vectors_LD, vectors_LD)
        first_L, both_L = (np.einsum("lp,lp->l", part, part) for part in (prefixes_LP[:, :short], prefixes_LP))
        short_rest_L, long_rest_L = _rest(squares_L, first_L), _rest(squares_L, both_L)
        return cls(
            vectors_LD,
            rotation_DP,
            np.concatenate([prefixes_LP[:, :short].T, short_rest_L[None]]),
            np.concatenate([prefixes_LP[:, short:], long_rest_L[:, None], -short_rest_L[:, None]], axis=1),
            float(np.sqrt(squares_L.max())),
        )

    def find(self, query_D: Vectors, k: int, excluded: NDArray[np.integer] | None = None) -> NDArray[np.int64]:
        """Return labels, ascending, among which the k best are, apart from the excluded ones."""
        short = len(self.short_SL) - 1
        num_seeds = _SEEDS * (k + (0 if excluded is None else len(excluded)))
        query_P = query_D @ self.rotation_DP
        square, first = float(query_D @ query_D), float(query_P[:short] @ query_P[:short])
        rests = np.array(
            [math.sqrt(max(square - part, 0.0) + _ROUNDING * square) for part in (float(query_P @ query_P), first)],
            dtype=np.float32,
        )
        bounds_L = np.concatenate([query_P[:short], rests[1:]]) @ self.short_SL
        seeds = largest_scores(bounds_L, num_seeds)
        scores = np.take(self.vectors_LD, seeds, axis=0) @ query_D
        if excluded is not None:
            scores[np.isin(seeds, excluded)] = -np.inf
        if k >= len(scores):
            return np.arange(len(self.vectors_LD))
        scores.partition(len(scores) - k)
        floor = scores[-k] - np.float32(_ROUNDING * self.longest * math.sqrt(square))
        found = (~(bounds_L < floor)).nonzero()[0]  # also what is not a number, which the caller finds
        bounds_C = np.take(self.next_LP, found, axis=0) @ np.concatenate([query_P[short:], rests])
        bounds_C += bounds_L[found]
        return np.asarray(found[~(bounds_C < floor)])


def _second_moments(vectors_ND: Vectors) -> Vectors:
    """Return the products of dimensions over some of the vectors, scaled so that their squares add up to one."""
    sample_SD = vectors_ND[:: max(1, len(vectors_ND) // _SAMPLED)]
    moments_DD: Vectors = sample_SD.T @ sample_SD
    return moments_DD / max(float(np.trace(moments_DD)), _TINY)


def largest_scores(scores_L: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Return the places, ascending, of at least the `count` largest of many scores and of all that are not numbers."""
    num_groups = len(scores_L) // _GROUP
    if num_groups < count:
        return np.arange(len(scores_L))
    maxima_G = np.maximum.reduce(scores_L[: num_groups * _GROUP].reshape(_GROUP, num_groups))
    maxima_G.partition(num_groups - count)
    return np.flatnonzero(~(scores_L < maxima_G[num_groups - count]))


def _rest(squares_L: Vectors, parts_L: Vectors) -> Vectors:
    """Return the lengths of what parts of vectors leave, at least."""
    return np.asarray(np.sqrt(np.maximum(squares_L - parts_L, 0.0) + _ROUNDING * squares_L), dtype=np.float32)
