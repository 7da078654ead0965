"""Which predictions are relevant, and which must be removed: membership of (query, label) pairs in a sparse matrix.

Nothing of size queries x labels is made. A pair is one integer key, `query * num_labels + label`, and the keys of a
canonical CSR matrix are sorted, so membership is a binary search. Most predictions are misses: a small bit table rules
them out first, about four times faster than a binary search for every prediction.

Filter pairs must not be predicted, such as an item recommending itself. They are removed before a ranking is scored,
and what was ranked below moves up. For k predictions to remain, fetch `k + overfetch(filtered)` places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.errors import DataError, UsageError
from dexter.types import TopK

_BLOCK_PREDICTIONS = 1 << 19
"""Predictions processed at a time: few enough that the temporary arrays stay within about 20 MB."""


@dataclass(frozen=True, eq=False)
class Hits:
    """The predictions that are relevant, ordered by query and then rank."""

    queries: np.ndarray
    """Row of each hit."""
    ranks: np.ndarray
    """Place of each hit in its ranking, counted from 0."""
    labels: np.ndarray
    """Label of each hit."""

    def restrict(self, chosen: np.ndarray) -> Hits:
        """Return the hits for which a boolean array (one value per hit) is true."""
        return Hits(self.queries[chosen], self.ranks[chosen], self.labels[chosen])


def find_hits(top_ids: Any, relevance: csr_matrix) -> Hits:
    """Find the predictions that are relevant.

    Args:
        top_ids: integers, queries x places, best first. An id below 0 or at least the number of labels means "no
            prediction" at that place.
        relevance: queries x labels; a value above zero marks a relevant pair.

    A label that a row predicts twice is an error: it would be counted twice.
    """
    top_ids = checked_top_ids(top_ids, relevance.shape[0])
    relevance = relevant_pairs(relevance)
    found = [
        (start + place // top_ids.shape[1], place % top_ids.shape[1], block.ravel()[place])
        for start, block, place in _members_by_block(top_ids, relevance)
    ]
    columns = zip(*found, strict=True) if found else ((np.zeros(0, dtype=np.int64),),) * 3
    queries, ranks, labels = (np.concatenate(parts) for parts in columns)
    return Hits(queries, ranks, labels.astype(np.int64))


def member_mask(top_ids: np.ndarray, pairs: csr_matrix) -> np.ndarray:
    """Return a boolean array of the shape of `top_ids`: whether each (row, id) is a stored pair."""
    top_ids = checked_top_ids(top_ids, pairs.shape[0])
    mask = np.zeros(top_ids.shape, dtype=bool)
    for start, block, place in _members_by_block(top_ids, relevant_pairs(pairs)):
        mask[start : start + len(block)].ravel()[place] = True
    return mask


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


def relevant_pairs(relevance: Any) -> csr_matrix:
    """Return the pairs with a value above zero as a canonical CSR matrix; the input is not changed."""
    matrix = csr_matrix(relevance)
    if matrix.has_canonical_format and (not matrix.nnz or matrix.data.min() > 0):
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    matrix.data = np.where(matrix.data > 0, matrix.data, 0)
    matrix.eliminate_zeros()
    return matrix


def checked_top_ids(top_ids: Any, num_queries: int) -> np.ndarray:
    """Return the predictions as an integer array with one row per query, or raise."""
    array = np.asarray(top_ids)
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"top ids have shape {array.shape} and type {array.dtype}: expected integers of shape (queries, places); "
            "pad short rows with -1"
        )
    if len(array) != num_queries:
        raise DataError(f"got {len(array)} rows of predictions for {num_queries} rows of relevance: they must agree")
    # Unsigned 64-bit ids would turn sums with signed ones into floats; their largest value becomes -1, "no prediction".
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def _members_by_block(top_ids: np.ndarray, pairs: csr_matrix) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (first row, rows of `top_ids`, flat places in them that are stored pairs), one block of rows at a time."""
    num_labels = pairs.shape[1]
    if not top_ids.size or not num_labels:
        return
    rows_per_block = max(1, _BLOCK_PREDICTIONS // top_ids.shape[1])
    for start in range(0, len(top_ids), rows_per_block):
        block = top_ids[start : start + rows_per_block]
        _check_repeats(block, start, num_labels)
        offsets = pairs.indptr[start : start + len(block) + 1].astype(np.int64)
        stored_rows = np.repeat(np.arange(len(block), dtype=np.int64), np.diff(offsets))
        stored = stored_rows * num_labels + pairs.indices[offsets[0] : offsets[-1]]
        keys = np.arange(len(block), dtype=np.int64)[:, None] * num_labels + block
        # Ids outside the labels would alias pairs of neighbouring rows.
        valid = (block >= 0) & (block < num_labels)
        yield start, block, _places_in(np.where(valid, keys, -1).ravel(), stored)


def _places_in(keys: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return indices of the keys that occur in `stored`, which is sorted."""
    if not len(stored):
        return np.zeros(0, dtype=np.int64)
    bits = len(stored).bit_length() + 4  # a table 16 to 32 times as large as its content lets few misses through
    table = np.zeros(1 << bits, dtype=bool)
    table[_fold(stored, bits)] = True
    candidates = np.flatnonzero(table[_fold(keys, bits)])
    places = np.minimum(np.searchsorted(stored, keys[candidates]), len(stored) - 1)
    return np.asarray(candidates[stored[places] == keys[candidates]])


def _fold(keys: np.ndarray, bits: int) -> np.ndarray:
    """Return a table position for each key."""
    return np.asarray((keys ^ (keys >> bits)) & ((1 << bits) - 1))


def _check_repeats(block: np.ndarray, start: int, num_labels: int) -> None:
    """Raise when a row predicts a label twice; places without a prediction may repeat."""
    ordered = np.sort(block, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0) & (ordered[:, 1:] < num_labels)
    if repeated.any():
        row, place = np.argwhere(repeated)[0]
        raise DataError(
            f"row {start + row} of the predictions holds label {ordered[row, place]} more than once: a ranking names a "
            "label at most once; mark places without a prediction with -1"
        )
