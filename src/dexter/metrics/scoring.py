"""All metrics of a ranking as one dictionary, in percent and named as the papers name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy.sparse import csr_matrix

from dexter.errors import DataError
from dexter.metrics.by_label import count_labels, label_metrics
from dexter.metrics.by_query import checked_ks, query_ratios
from dexter.metrics.hits import checked_top_ids, find_hits, relevant_pairs
from dexter.metrics.propensity import inverse_propensity


def score(
    top_ids: Any,
    relevance_csr: csr_matrix,
    train_relevance_csr: csr_matrix | None,
    ks: Sequence[int] = (1, 3, 5),
    propensity: tuple[float, float] = (0.55, 1.5),
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


def check_same_labels(relevance: csr_matrix, train_relevance: csr_matrix) -> None:
    """Raise unless test and training relevance have the same label columns."""
    if relevance.shape[1] != train_relevance.shape[1]:
        raise DataError(
            f"test relevance has {relevance.shape[1]} labels, training relevance {train_relevance.shape[1]}: "
            "the columns must be the same labels in the same order"
        )
