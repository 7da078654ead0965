"""Metrics by how often a label was seen in training: frequent, torso, tail and unseen.

A band keeps the ranking as it is and asks how well the band's own labels were found: relevance is restricted to them,
and queries with none of them are left out. So `P@1` of the tail is the share of queries with a rare label whose first
prediction is such a label. The bands' values do not add up to the overall ones, and even a perfect ranking may stay
below 100 in a band, because labels of other bands rightly take places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from dexter.metrics import Hits, LabelCounts, Ratio, label_metrics, query_ratios
from dexter.types import BANDS


@dataclass(frozen=True, kw_only=True)
class Band:
    """One band's metrics and what they were computed from."""

    metrics: dict[str, float]
    """The metrics in percent; NaN where no query takes part."""
    num_labels: int
    """Labels of the data set in this band."""
    num_queries: int
    """Queries with at least one relevant label in this band: those the metrics are taken over."""
    num_pairs: int
    """Relevant (query, label) pairs in this band."""


def score_bands(
    hits: Hits,
    counts: Mapping[int, LabelCounts],
    relevance: csr_matrix,
    num_train_of_label: np.ndarray,
    *,
    inverse_propensity: np.ndarray | None = None,
) -> dict[str, Band]:
    """Score a ranking for the labels of each band, at the cut-offs of `counts`.

    Args:
        hits: the ranking's hits, from `find_hits`.
        counts: each label's counts by cut-off, from `count_labels`.
        relevance: queries x labels, from `relevant_pairs`.
        num_train_of_label: number of training queries of each label.
        inverse_propensity: one weight per label; without it PSP and PSnDCG are left out.
    """
    bands = {}
    for name, (low, high) in BANDS.items():
        members = (num_train_of_label >= low) & (num_train_of_label <= high)
        in_band = _restrict(relevance, members)
        takes_part = np.diff(in_band.indptr) > 0
        ratios = query_ratios(hits.restrict(members[hits.labels]), in_band, inverse_propensity, tuple(counts))
        by_query = {metric: _mean_over(ratio, takes_part) for metric, ratio in ratios}
        bands[name] = Band(
            metrics=by_query | label_metrics(counts, members),
            num_labels=int(members.sum()),
            num_queries=int(takes_part.sum()),
            num_pairs=int(in_band.nnz),
        )
    return bands


def _restrict(relevance: csr_matrix, members: np.ndarray) -> csr_matrix:
    """The pairs whose label is a member; shape and column numbers stay."""
    keep = members[relevance.indices]
    kept_before = np.r_[0, np.cumsum(keep)]
    return csr_matrix(
        (relevance.data[keep], relevance.indices[keep], kept_before[relevance.indptr]), shape=relevance.shape
    )


def _mean_over(ratio: Ratio, takes_part: np.ndarray) -> float:
    """The metric over the queries that take part, in percent."""
    return Ratio(ratio.numerator[takes_part], ratio.denominator[takes_part]).value
