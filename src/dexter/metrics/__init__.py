"""How good a ranking is: P, R, nDCG, PSP, PSnDCG, MRR, coverage and macro-F1, from top-k ids and sparse relevance.

    hits.py        which predictions are relevant: the (query, rank, label) triples all else is computed from
    propensity.py  how likely a relevant pair was to be recorded: the weights of the propensity-scored metrics
    by_query.py    the metrics that are sums over queries, as one numerator and one denominator per query
    by_label.py    the metrics that are means over labels: coverage and macro-F1
    scoring.py     `score`: all of them as one dictionary
    filters.py     pairs that must not be predicted: removed before scoring, the gap closed

Pure functions of arrays. The definitions, and what happens in the corner cases, are in `docs/metrics.md`.
"""

from __future__ import annotations

from dexter.metrics.by_label import LabelCounts, count_labels, label_metrics
from dexter.metrics.by_query import Ratio, per_query, query_ratios
from dexter.metrics.filters import overfetch, remove_filtered
from dexter.metrics.hits import Hits, find_hits, relevant_pairs
from dexter.metrics.propensity import PROPENSITY, inverse_propensity
from dexter.metrics.scoring import score

__all__ = [
    "PROPENSITY",
    "Hits",
    "LabelCounts",
    "Ratio",
    "count_labels",
    "find_hits",
    "inverse_propensity",
    "label_metrics",
    "overfetch",
    "per_query",
    "query_ratios",
    "relevant_pairs",
    "remove_filtered",
    "score",
]
