"""Pairs that must not be predicted, such as an item recommending itself: removed from rankings before they are scored.

A removed prediction leaves no gap: what was ranked below moves up. For k predictions to remain, a ranking must be
fetched with `k + overfetch(filtered)` places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.errors import DataError, UsageError
from dexter.metrics.hits import checked_top_ids, member_mask, relevant_pairs
from dexter.types import TopK


def overfetch(filtered: csr_matrix | None) -> int:
    """Return how many places more than k a ranking needs so that k are left after filter pairs are removed."""
    if filtered is None or not filtered.nnz:
        return 0
    return int(np.diff(relevant_pairs(filtered).indptr).max())


def remove_filtered(top_ids: Any, top_scores: Any, filtered: csr_matrix | None, k: int) -> TopK:
    """Remove filter pairs from rankings, close the gaps and keep the first k places.

    Rows with fewer than k predictions left are filled up with id -1 and score minus infinity.

    Args:
        top_ids: integers, queries x places, best first.
        top_scores: the scores of these predictions, of the same shape.
        filtered: queries x labels; a value above zero marks a pair to remove. None removes nothing.
        k: places to keep.
    """
    ids = checked_top_ids(top_ids, len(top_ids) if filtered is None else filtered.shape[0])
    scores = np.asarray(top_scores)
    if scores.shape != ids.shape:
        raise DataError(f"scores have shape {scores.shape}, ids {ids.shape}: they must agree")
    if k < 1:
        raise UsageError(f"places to keep are {k}: expected 1 or more")
    kept = TopK(_first_places(ids, k, -1), _first_places(scores, k, -np.inf))
    if filtered is None or not ids.shape[1]:
        return kept
    removed = member_mask(ids, filtered)
    rows = np.flatnonzero(removed.any(axis=1))
    order = np.argsort(removed[rows], axis=1, kind="stable")
    gone = np.take_along_axis(removed[rows], order, axis=1)
    kept.ids[rows] = _first_places(np.where(gone, -1, np.take_along_axis(ids[rows], order, axis=1)), k, -1)
    moved_scores = np.where(gone, -np.inf, np.take_along_axis(scores[rows], order, axis=1))
    kept.scores[rows] = _first_places(moved_scores, k, -np.inf)
    return kept


def _first_places(array: np.ndarray, k: int, missing: float) -> np.ndarray:
    """Copy the first k columns, filled up with `missing` where there are fewer."""
    result = np.full((len(array), k), missing, dtype=np.result_type(array.dtype, np.min_scalar_type(missing)))
    result[:, : array.shape[1]] = array[:, :k]
    return result
