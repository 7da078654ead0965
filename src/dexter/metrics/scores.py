"""The metrics of a ranking: P, R, nDCG, MRR, PSP, PSnDCG, coverage and macro-F1, named as the papers name them.

Two kinds, both computed from the hits of a ranking (`dexter.metrics.hits`):

- Sums over queries, kept per query, from which intervals, bands and comparisons are made. Each metric is
  `100 * sum(numerator) / sum(denominator)`. For P the denominator is 1 for every query; for R, nDCG and MRR it is 1 for
  a query with labels and 0 for one without; for PSP and PSnDCG it is the best value that the query allows.
- Means over labels, in which each label counts the same however common it is: coverage and macro-F1.

PSP and PSnDCG weigh a hit by the inverse propensity 1/p of its label, because relevant pairs of rare labels are
recorded less often. The propensity model and its constants are those of Jain, Prabhu and Varma (2016), which every
table of the field uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.errors import DataError, UsageError
from dexter.metrics.hits import Hits, checked_top_ids, find_hits, relevant_pairs
from dexter.types import PROPENSITY

_BLOCK_ROWS = 1 << 14


def score(
    top_ids: Any,
    relevance_csr: csr_matrix,
    train_relevance_csr: csr_matrix | None,
    ks: Sequence[int] = (1, 3, 5),
    propensity: tuple[float, float] = PROPENSITY["default"],
) -> dict[str, float]:
    """Score rankings against relevance, in percent.

    Args:
        top_ids: integers, queries x places, best first; -1 (or an id of no label) where there is no prediction. Ties
            are the ranking's to break: the order is taken as it is.
        relevance_csr: queries x labels; a value above zero marks a relevant pair, however large it is.
        train_relevance_csr: training queries x labels, from which the propensities are counted; None leaves the
            propensity-scored metrics out.
        ks: the cut-offs. One beyond the number of places is scored as if the missing places held misses.
        propensity: the constants (a, b); see `PROPENSITY` for the values of the usual data sets.

    Returns:
        P@k, R@k, nDCG@k, MRR@k, PSP@k, PSnDCG@k, Coverage@k and F1@k (macro) for each k. Queries without labels count
        as misses in P and are left out of R, nDCG and MRR. A metric in which no query takes part is NaN.
    """
    ks = checked_ks(ks)
    relevance = relevant_pairs(relevance_csr)
    top_ids = checked_top_ids(top_ids, relevance.shape[0])[:, : max(ks)]
    weights = None
    if train_relevance_csr is not None:
        check_same_labels(relevance, train_relevance_csr)
        weights = inverse_propensity(train_relevance_csr, *propensity)
    hits = find_hits(top_ids, relevance)
    metrics = {name: ratio.value for name, ratio in query_ratios(hits, relevance, weights, ks)}
    return metrics | label_metrics(count_labels(top_ids, hits, relevance, ks))


def inverse_propensity(train_relevance: Any, a: float = 0.55, b: float = 1.5) -> np.ndarray:
    """Return the weight 1/p of every label: 1 + C (n + b)^-a with C = (ln N - 1)(b + 1)^a.

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
    """Return every metric that is a sum over queries, as one numerator and one denominator per query.

    Without `inverse_propensity` (one weight per label) PSP and PSnDCG are left out.
    """
    relevance = relevant_pairs(relevance)
    return dict(query_ratios(find_hits(top_ids, relevance), relevance, inverse_propensity, checked_ks(ks)))


def query_ratios(
    hits: Hits, relevance: csr_matrix, inverse_propensity: np.ndarray | None, ks: Sequence[int]
) -> Iterator[tuple[str, Ratio]]:
    """Yield (name, ratio) one metric at a time, so that a caller who needs only the sums keeps one in memory."""
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
    """Yield the metrics in which a hit weighs 1/p, relative to the best possible ranking."""
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


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """How often each label was hit and predicted within the first k places, and how often it is relevant."""

    hit: np.ndarray
    predicted: np.ndarray
    relevant: np.ndarray

    def coverage(self, among: np.ndarray | slice = slice(None)) -> float:
        """Return the share of relevant labels that were hit at least once, in percent; NaN when none is relevant."""
        used = self.relevant[among] > 0
        return 100.0 * float((self.hit[among][used] > 0).mean()) if used.any() else float("nan")

    def macro_f1(self, among: np.ndarray | slice = slice(None)) -> float:
        """Return the mean over relevant labels of 2 hits / (predicted + relevant), in percent; NaN when none is."""
        used = self.relevant[among] > 0
        both = (self.predicted + self.relevant)[among][used]
        return 100.0 * float((2.0 * self.hit[among][used] / both).mean()) if used.any() else float("nan")


def count_labels(top_ids: np.ndarray, hits: Hits, relevance: csr_matrix, ks: Sequence[int]) -> dict[int, LabelCounts]:
    """Count each label's hits, predictions and relevant queries within the first k places, for each k (increasing)."""
    num_labels = relevance.shape[1]
    relevant = np.bincount(relevance.indices, minlength=num_labels)
    predicted = np.zeros(num_labels, dtype=np.int64)
    counts = {}
    for before, k in pairwise([0, *ks]):
        predicted = predicted + _count_predictions(top_ids[:, before:k], num_labels)
        hit = np.bincount(hits.labels[hits.ranks < k], minlength=num_labels)
        counts[k] = LabelCounts(hit, predicted, relevant)
    return counts


def label_metrics(counts: Mapping[int, LabelCounts], among: np.ndarray | slice = slice(None)) -> dict[str, float]:
    """Return coverage and macro-F1 at each k, over all labels or those that a boolean array chooses."""
    metrics: dict[str, float] = {}
    for k, count in counts.items():
        metrics |= {f"Coverage@{k}": count.coverage(among), f"F1@{k}": count.macro_f1(among)}
    return metrics


def checked_ks(ks: Sequence[int]) -> tuple[int, ...]:
    """Return the cut-offs, each once and in increasing order, or raise."""
    if not len(ks) or any(isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1 for k in ks):
        raise UsageError(f"cut-offs are {tuple(ks)}: expected at least one whole number, each 1 or more")
    return tuple(sorted({int(k) for k in ks}))


def check_same_labels(relevance: csr_matrix, train_relevance: csr_matrix) -> None:
    """Raise unless test and training relevance have the same label columns."""
    if relevance.shape[1] != train_relevance.shape[1]:
        raise DataError(
            f"test relevance has {relevance.shape[1]} labels, training relevance {train_relevance.shape[1]}: "
            "the columns must be the same labels in the same order"
        )


def _ideal_gain(num_relevant: np.ndarray, discount: np.ndarray) -> np.ndarray:
    """Return the discounted gain of a ranking that starts with all relevant labels; 1 where there is none."""
    sums = np.cumsum(discount)
    return np.asarray(sums[np.clip(num_relevant, 1, len(sums)) - 1])


def _reciprocal_rank(hits: Hits, num_queries: int) -> np.ndarray:
    """Return 1 / rank of each query's first hit, 0 for a query without one."""
    first = np.ones(len(hits.queries), dtype=bool)
    first[1:] = hits.queries[1:] != hits.queries[:-1]
    result = np.zeros(num_queries)
    result[hits.queries[first]] = 1.0 / (hits.ranks[first] + 1.0)
    return result


def _weigh(hits: Hits, weights: np.ndarray, discount: np.ndarray, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum the label weights of each query's hits in the first `len(discount)` places, plain and discounted by rank."""
    inside = hits.restrict(hits.ranks < len(discount))
    values = weights[inside.labels]
    plain = np.bincount(inside.queries, weights=values, minlength=num_queries)
    discounted = np.bincount(inside.queries, weights=values * discount[inside.ranks], minlength=num_queries)
    return plain, discounted


def _best_hits(relevance: csr_matrix, weights: np.ndarray) -> Hits:
    """Return the hits of the best possible ranking: each query's relevant labels, heaviest first.

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


def _count_predictions(top_ids: np.ndarray, num_labels: int) -> np.ndarray:
    """Count how often each label is predicted; a block of rows at a time, because choosing valid ids copies them."""
    predicted = np.zeros(num_labels, dtype=np.int64)
    for start in range(0, len(top_ids), _BLOCK_ROWS):
        ids = top_ids[start : start + _BLOCK_ROWS].ravel()
        predicted += np.bincount(ids[(ids >= 0) & (ids < num_labels)], minlength=num_labels)
    return predicted
