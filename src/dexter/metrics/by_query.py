"""The metrics that are sums over queries, kept per query: what intervals, bands and comparisons are made from.

Each metric is `100 * sum(numerator) / sum(denominator)`. For P the denominator is 1 for every query; for R, nDCG and
MRR it is 1 for a query with labels and 0 for one without; for PSP and PSnDCG it is the best value the query allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.errors import DataError, UsageError
from dexter.metrics.hits import Hits, find_hits, relevant_pairs


@dataclass(frozen=True, eq=False)
class Ratio:
    """A metric as a ratio of sums over queries."""

    numerator: np.ndarray
    denominator: np.ndarray

    @property
    def value(self) -> float:
        """The metric in percent; NaN when no query takes part."""
        total = float(self.denominator.sum())
        return 100.0 * float(self.numerator.sum()) / total if total else float("nan")


def per_query(
    top_ids: Any, relevance: csr_matrix, inverse_propensity: np.ndarray | None = None, ks: Sequence[int] = (1, 3, 5)
) -> dict[str, Ratio]:
    """Every metric that is a sum over queries, as one numerator and one denominator per query.

    Without `inverse_propensity` (one weight per label) PSP and PSnDCG are left out.
    """
    relevance = relevant_pairs(relevance)
    return dict(query_ratios(find_hits(top_ids, relevance), relevance, inverse_propensity, checked_ks(ks)))


def query_ratios(
    hits: Hits, relevance: csr_matrix, inverse_propensity: np.ndarray | None, ks: Sequence[int]
) -> Iterator[tuple[str, Ratio]]:
    """Yield (name, ratio) one metric at a time, so that a caller who only needs the sums keeps one in memory."""
    num_queries = relevance.shape[0]
    num_relevant = np.diff(relevance.indptr)
    labelled = (num_relevant > 0).astype(np.float64)
    discount = 1.0 / np.log2(np.arange(2, max(ks) + 2))
    for k in ks:
        inside = hits.restrict(hits.ranks < k)
        ideal = _ideal_gain(num_relevant, discount[:k])
        count = np.bincount(inside.queries, minlength=num_queries)
        gain = np.bincount(inside.queries, weights=discount[inside.ranks], minlength=num_queries)
        yield f"P@{k}", Ratio(count / k, np.ones(num_queries))
        yield f"R@{k}", Ratio(count / np.maximum(num_relevant, 1), labelled)
        yield f"nDCG@{k}", Ratio(gain / ideal, labelled)
        yield f"MRR@{k}", Ratio(_reciprocal_rank(inside, num_queries), labelled)
    if inverse_propensity is not None:
        yield from _propensity_ratios(hits, relevance, inverse_propensity, ks, discount)


def _propensity_ratios(
    hits: Hits, relevance: csr_matrix, inverse_propensity: np.ndarray, ks: Sequence[int], discount: np.ndarray
) -> Iterator[tuple[str, Ratio]]:
    """The metrics in which a hit weighs 1/p, against the same for the best possible ranking."""
    num_queries, num_labels = relevance.shape
    if inverse_propensity.shape != (num_labels,):
        raise DataError(
            f"got propensities of shape {inverse_propensity.shape} for {num_labels} labels: one each is needed"
        )
    best_hits = _best_hits(relevance, inverse_propensity)
    for k in ks:
        ideal = _ideal_gain(np.diff(relevance.indptr), discount[:k])
        weight, gain = _weigh(hits, inverse_propensity, discount[:k], num_queries)
        best_weight, best_gain = _weigh(best_hits, inverse_propensity, discount[:k], num_queries)
        yield f"PSP@{k}", Ratio(weight / k, best_weight / k)
        yield f"PSnDCG@{k}", Ratio(gain / ideal, best_gain / ideal)


def checked_ks(ks: Sequence[int]) -> tuple[int, ...]:
    """The cut-offs, each once and in increasing order, or an error."""
    if not len(ks) or any(isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1 for k in ks):
        raise UsageError(f"cut-offs are {tuple(ks)}: expected at least one whole number, each 1 or more")
    return tuple(sorted({int(k) for k in ks}))


def _ideal_gain(num_relevant: np.ndarray, discount: np.ndarray) -> np.ndarray:
    """The discounted gain of a ranking that starts with all relevant labels; 1 where there is none, to divide by."""
    sums = np.cumsum(discount)
    return np.asarray(sums[np.clip(num_relevant, 1, len(sums)) - 1])


def _reciprocal_rank(hits: Hits, num_queries: int) -> np.ndarray:
    """1 / rank of each query's first hit, 0 for a query without one."""
    first = np.ones(len(hits.queries), dtype=bool)
    first[1:] = hits.queries[1:] != hits.queries[:-1]
    result = np.zeros(num_queries)
    result[hits.queries[first]] = 1.0 / (hits.ranks[first] + 1.0)
    return result


def _weigh(hits: Hits, weights: np.ndarray, discount: np.ndarray, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Per query: the label weights of its hits summed, plain and discounted by rank, as far as `discount` reaches."""
    inside = hits.restrict(hits.ranks < len(discount))
    values = weights[inside.labels]
    plain = np.bincount(inside.queries, weights=values, minlength=num_queries)
    discounted = np.bincount(inside.queries, weights=values * discount[inside.ranks], minlength=num_queries)
    return plain, discounted


def _best_hits(relevance: csr_matrix, weights: np.ndarray) -> Hits:
    """The hits of the best possible ranking: each query's relevant labels, heaviest first.

    Labels are replaced by their place in the order of the weights, so that one sort of integers orders all queries.
    """
    num_queries, num_labels = relevance.shape
    order = np.argsort(-weights, kind="stable")
    place_of_label = np.empty(num_labels, dtype=np.int64)
    place_of_label[order] = np.arange(num_labels)
    num_relevant = np.diff(relevance.indptr)
    queries = np.repeat(np.arange(num_queries, dtype=np.int64), num_relevant)
    keys = np.sort(queries * num_labels + place_of_label[relevance.indices])
    ranks = np.arange(len(keys)) - np.repeat(relevance.indptr[:-1], num_relevant)
    return Hits(queries, ranks, order[keys - queries * num_labels])
