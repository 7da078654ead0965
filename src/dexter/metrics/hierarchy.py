"""Hierarchical metrics: hits on the parent of a relevant label, and precision and recall with all broader labels.

`broader` is child x parent over the labels; it may go on with rows and columns of concepts that are no labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, identity

from dexter.errors import DataError
from dexter.metrics.hits import checked_top_ids, find_hits, relevant_pairs
from dexter.metrics.scores import Ratio, checked_ks


def hierarchy_ratios(top_ids: Any, relevance: csr_matrix, broader: csr_matrix, ks: Sequence[int]) -> dict[str, Ratio]:
    """Return parentP@k, hP@k and hR@k as one numerator and one denominator per query.

    - parentP@k: the share of the first k places whose label is relevant, or directly broader than a relevant one.
    - hP@k: the first k labels and the relevant ones are both joined by all that is broader than them; the share of the
      first set that is in the second. Summed over queries (Kiritchenko et al., 2006).
    - hR@k: the share of the second set that is in the first.
    """
    relevance = relevant_pairs(relevance)
    num_queries, num_labels = relevance.shape
    top_ids = checked_top_ids(top_ids, num_queries)
    if broader.shape[0] != broader.shape[1] or broader.shape[0] < num_labels:
        raise DataError(f"broader has shape {broader.shape}: expected {num_labels} or more labels each way")
    with_parents = relevant_pairs(relevance + relevance @ broader[:num_labels, :num_labels])
    hits = find_hits(top_ids, with_parents)
    ancestors = _closure(broader)[:num_labels]
    relevant = relevance @ ancestors
    ratios = {}
    for k in checked_ks(ks):
        count = np.bincount(hits.queries[hits.ranks < k], minlength=num_queries)
        ratios[f"parentP@{k}"] = Ratio(count / k, np.ones(num_queries))
        predicted = _as_matrix(top_ids[:, :k], num_labels) @ ancestors
        common, size_predicted, size_relevant = (
            np.diff(matrix.indptr).astype(np.float64)
            for matrix in (relevant_pairs(predicted.multiply(relevant)), predicted, relevant)
        )
        ratios[f"hP@{k}"] = Ratio(common, size_predicted)
        ratios[f"hR@{k}"] = Ratio(common, size_relevant)
    return ratios


def _closure(broader: csr_matrix) -> csr_matrix:
    """Return label x everything at or above it; cycles are allowed."""
    step = csr_matrix(identity(broader.shape[0], format="csr") + broader)
    reached = step
    while True:
        further = csr_matrix(reached @ step)
        further.data[:] = 1.0
        if further.nnz == reached.nnz:
            return further
        reached = further


def _as_matrix(top_ids: np.ndarray, num_labels: int) -> csr_matrix:
    valid = (top_ids >= 0) & (top_ids < num_labels)
    rows = np.nonzero(valid)[0]
    return csr_matrix((np.ones(len(rows)), (rows, top_ids[valid])), shape=(len(top_ids), num_labels))
