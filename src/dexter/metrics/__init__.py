"""How good a ranking is: P, R, nDCG, PSP, PSnDCG, MRR, coverage and macro-F1, from top-k ids and sparse relevance.

    hits.py        which predictions are relevant, and filter pairs, which are removed before scoring
    scores.py      the metrics and their propensities; `score` returns all of them as one dictionary
    hierarchy.py   metrics that count broader labels too

Pure functions of arrays. The definitions and corner cases are in `docs/metrics.md`.
"""

from __future__ import annotations

from dexter.metrics.hierarchy import hierarchy_ratios
from dexter.metrics.hits import (
    Hits,
    checked_top_ids,
    find_hits,
    member_mask,
    overfetch,
    relevant_pairs,
    remove_filtered,
)
from dexter.metrics.scores import (
    LabelCounts,
    Ratio,
    check_same_labels,
    checked_ks,
    count_labels,
    inverse_propensity,
    label_metrics,
    per_query,
    query_ratios,
    score,
)
from dexter.types import PROPENSITY

__all__ = [
    "PROPENSITY",
    "Hits",
    "LabelCounts",
    "Ratio",
    "check_same_labels",
    "checked_ks",
    "checked_top_ids",
    "count_labels",
    "find_hits",
    "hierarchy_ratios",
    "inverse_propensity",
    "label_metrics",
    "member_mask",
    "overfetch",
    "per_query",
    "query_ratios",
    "relevant_pairs",
    "remove_filtered",
    "score",
]
