"""The metrics that are means over labels, each label counting the same however common it is: coverage and macro-F1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix

from dexter.metrics.hits import Hits

_BLOCK_ROWS = 1 << 14


@dataclass(frozen=True, eq=False)
class LabelCounts:
    """For each label, over all queries: how often it was hit, predicted and relevant within the first k places."""

    hit: np.ndarray
    predicted: np.ndarray
    relevant: np.ndarray

    def coverage(self, among: np.ndarray | slice = slice(None)) -> float:
        """The share of relevant labels that were hit at least once, in percent; NaN when no label is relevant."""
        used = self.relevant[among] > 0
        return 100.0 * float((self.hit[among][used] > 0).mean()) if used.any() else float("nan")

    def macro_f1(self, among: np.ndarray | slice = slice(None)) -> float:
        """The mean over relevant labels of 2 hits / (predicted + relevant), in percent; NaN when none is."""
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
    """Coverage and macro-F1 at each k, over all labels or those that a boolean array chooses."""
    metrics: dict[str, float] = {}
    for k, count in counts.items():
        metrics |= {f"Coverage@{k}": count.coverage(among), f"F1@{k}": count.macro_f1(among)}
    return metrics


def _count_predictions(top_ids: np.ndarray, num_labels: int) -> np.ndarray:
    """How often each label is predicted; a block of rows at a time, because choosing the valid ids copies them."""
    predicted = np.zeros(num_labels, dtype=np.int64)
    for start in range(0, len(top_ids), _BLOCK_ROWS):
        ids = top_ids[start : start + _BLOCK_ROWS].ravel()
        predicted += np.bincount(ids[(ids >= 0) & (ids < num_labels)], minlength=num_labels)
    return predicted
