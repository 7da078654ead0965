"""Exact search: the k labels with the largest inner product, in bounded memory.

Scores are computed in tiles of queries x labels, and the full matrix never exists. A tile is not sorted: its scores are
compared with the floor of their query while they are in cache, and only those above it are looked at again. The floor
is the score of the query's k-th best label so far; in the first tile it is the k-th largest maximum of groups of
columns, which at least k labels reach. It rises from tile to tile, and soon few scores are above it.

A score and its column are kept as one int64 key: comparing two keys compares the scores and then prefers the lower
column. Equal scores therefore rank the same way whatever the tiling, the number of threads or the selection algorithm.

Labels are arrays, or a tensor on an accelerator, which is searched there (`dexter.index.device`).

Shapes: N queries, L labels, D dimensions, B queries and C labels in a tile, G groups of its labels, P pairs that are
looked at again, K places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, UsageError
from dexter.index.base import BackendName
from dexter.index.prefix import PrefixScan, largest_scores
from dexter.processes import Processes, SingleProcess, concatenate_arrays
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from torch import Tensor

ROWS = 512
"""Queries in a tile: enough for the matrix product to run near its peak."""
COLUMNS = 2_048
"""Labels in a tile: few enough that its scores are still in a near cache when they are compared, many enough that
threads seldom wait for each other."""
_WORD = 8
"""Bytes that are compared with zero at once."""
_MOST_PER_PLACE = 3
"""A row with more keys than this for each label wanted is cut before rows become a matrix."""
_GROUPS_PER_PLACE, _FEWEST_GROUPS = 4, 64
"""Groups of columns for each label wanted: the more, the fewer scores are above the first floor."""
FEW = 4
"""Queries that are searched one by one."""
MANY, SEARCHED_PLAIN = 4_096, 16
"""Labels from which on, and searches of few queries after which, rotated prefixes are used (`dexter.index.prefix`)."""
MERGED_QUERIES = 2**16
"""Queries whose results from all processes are in memory and merged at a time."""
LOWER_HALF = 0xFFFFFFFF
"""Mask of the bits of a key that hold the column."""
NO_KEY = -0x7F800001 << 32
"""Below every other key: minus infinity, and no column."""
NOT_A_NUMBER = "search met a score that is not a number: check the query and label vectors for NaN"

Keys = NDArray[np.int64]
Scores = NDArray[np.float32]


def search(
    queries_ND: NDArray[Any],
    labels_LD: NDArray[Any] | Tensor,
    k: int,
    *,
    exclude: csr_matrix | None = None,
    ceiling: NDArray[np.float32] | None = None,
) -> TopK:
    """Find the k labels with the largest inner product with each query, exactly.

    Args:
        queries_ND: one vector per query. Vectors of another type than float32 are converted, a part at a time.
        labels_LD: one vector per label; the search runs on the device they are on (see `place`).
        k: labels per query. Fewer are found where there are fewer; such rows end in id -1 and score minus infinity.
        exclude: queries x labels; a stored entry marks a pair that is never returned (a filter pair, a positive).
        ceiling: one number per query; labels that score above it are never returned.
    """
    check_arguments(queries_ND, labels_LD, k, exclude, ceiling)
    if not isinstance(labels_LD, np.ndarray):
        from dexter.index.device import search_on_device

        return search_on_device(queries_ND, labels_LD, k, exclude=exclude, ceiling=ceiling)
    num_queries, num_labels = len(queries_ND), len(labels_LD)
    tile = min(num_queries, ROWS) * min(num_labels, COLUMNS)
    scores, above = np.empty(tile, dtype=np.float32), np.zeros(-(-tile // _WORD) * _WORD, dtype=np.bool_)
    found = nothing_found(num_queries, k)
    for rows in slices(num_queries, ROWS):
        tile_queries_BD = queries_ND[rows].astype(np.float32, copy=False)
        limits_B = None if ceiling is None else ceiling[rows]
        excluded = None if exclude is None else ExcludedPairs.of(exclude[rows])
        best_BK = np.empty((len(tile_queries_BD), 0), dtype=np.int64)
        for columns in slices(num_labels, COLUMNS):
            scores_CB = _score(tile_queries_BD, labels_LD, columns, scores, excluded, limits_B)
            keys_BK = _select(scores_CB, best_BK, k, above, first_column=columns.start)
            best_BK = largest(np.concatenate([best_BK, keys_BK], axis=1), k)
        write_found(found, rows, np.sort(best_BK, axis=1)[:, ::-1])
    return found


def place(vectors_LD: NDArray[np.float32], device: str) -> NDArray[np.float32] | Tensor:
    """Return vectors where they are to be searched: as they are for a CPU, as a tensor on another device."""
    if device == "cpu":
        return vectors_LD
    import torch

    return torch.from_numpy(vectors_LD).to(device)


@dataclass(frozen=True)
class ExactIndex:
    """Scores every label."""

    vectors_LD: NDArray[np.float32]
    device: str = "cpu"
    """Where it computes."""
    sample_queries: Callable[[], NDArray[np.float32] | None] | None = field(default=None, repr=False, compare=False)
    """Gives vectors like those that will be searched with, if there are any: one query is then found faster."""
    backend: BackendName = field(default="exact", init=False)
    recall: float | None = field(default=1.0, init=False)
    _few_searched: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)
    """Counts the searches of few queries."""

    def vectors(self, rows: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the vectors of some labels."""
        return np.asarray(self.vectors_LD[rows])

    @cached_property
    def _prefixes(self) -> PrefixScan:
        return PrefixScan.of(self.vectors_LD, None if self.sample_queries is None else self.sample_queries())

    @cached_property
    def _placed(self) -> NDArray[np.float32] | Tensor:
        return place(self.vectors_LD, self.device)

    def search(
        self,
        queries_ND: NDArray[np.float32],
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: NDArray[np.float32] | None = None,
    ) -> TopK:
        """Return the k best labels of each query; few queries are searched one by one, which is faster."""
        if self.device == "cpu" and 0 < len(queries_ND) <= FEW and ceiling is None:
            check_arguments(queries_ND, self.vectors_LD, k, exclude, ceiling)
            # Rotating the vectors takes as long as many searches: the command line must not wait for it.
            rotated = len(self.vectors_LD) >= MANY and next(self._few_searched) >= SEARCHED_PLAIN
            found = []
            for row, query_D in enumerate(queries_ND):
                excluded = None if exclude is None else exclude.indices[exclude.indptr[row] : exclude.indptr[row + 1]]
                labels = self._prefixes.find(query_D, k, excluded) if rotated else None
                found.append(_search_one(query_D, self.vectors_LD, k, labels, excluded))
            return join_rows(found, k)
        return search(queries_ND, self._placed, k, exclude=exclude, ceiling=ceiling)


def _search_one(
    query_D: Scores,
    vectors_LD: Scores,
    k: int,
    labels: NDArray[np.int64] | None,
    excluded: NDArray[np.integer] | None,
) -> TopK:
    """Return the k best of some labels (None: all) for one query."""
    scores = (vectors_LD if labels is None else np.take(vectors_LD, labels, axis=0)) @ query_D
    if labels is None:
        if excluded is not None:
            scores[excluded] = -np.inf
        labels = largest_scores(scores, k)
        scores = scores[labels]
    elif excluded is not None:
        scores[np.isin(labels, excluded)] = -np.inf
    return best_of_one(labels, scores, k)


def best_of_one(ids: NDArray[np.integer], scores: Scores, k: int) -> TopK:
    """Return the k best of some ids for one query; a score of minus infinity marks one that is not returned.

    Raises `ModelError` for scores that are not numbers.
    """
    order = np.lexsort((ids, -scores))
    if len(order) and np.isnan(scores[order[-1]]):  # sorted to the end
        raise ModelError(NOT_A_NUMBER)
    order = order[:k]
    ids, scores = ids[order].astype(np.int64, copy=False), scores[order]
    if len(order) == k and scores[-1] > -np.inf:
        return TopK(ids[None], scores[None])
    found = nothing_found(1, k)
    found.ids[0, : len(ids)] = np.where(scores > -np.inf, ids, -1)
    found.scores[0, : len(ids)] = scores
    return found


def join_rows(found: Sequence[TopK], k: int) -> TopK:
    """Return the results of queries that were searched one by one as one result."""
    if len(found) == 1:
        return found[0]
    parts = [nothing_found(0, k), *found]
    return TopK(np.concatenate([each.ids for each in parts]), np.concatenate([each.scores for each in parts]))


def search_shards(
    queries_ND: NDArray[np.float32],
    labels_LD: NDArray[np.float32] | Tensor,
    k: int,
    *,
    label_ids: np.ndarray | None = None,
    processes: Processes | None = None,
    exclude: csr_matrix | None = None,
) -> TopK:
    """Find the k best labels of all processes for each query: each searches its own labels, the results are merged.

    Every process passes the same queries and returns the same result, which is that of one search over all labels;
    equal scores rank by id.

    Args:
        queries_ND: the queries, equal on every process.
        labels_LD: vectors of the labels that this process holds, possibly none.
        k: labels per query.
        label_ids: ids of the held labels among those of all processes, ascending; needed where there are several.
        processes: those that hold the other labels; a single process if left out.
        exclude: queries x held labels; pairs that are never returned.
    """
    processes = processes or SingleProcess()
    found = search(queries_ND, labels_LD, k, exclude=exclude)
    if processes.size == 1:
        return found
    assert label_ids is not None
    ids_NK = np.append(label_ids, -1)[found.ids]
    merged = [
        _merge(processes, ids_NK[part], found.scores[part], k) for part in slices(max(len(ids_NK), 1), MERGED_QUERIES)
    ]
    return TopK(np.concatenate([part.ids for part in merged]), np.concatenate([part.scores for part in merged]))


def _merge(processes: Processes, ids_NK: np.ndarray, scores_NK: np.ndarray, k: int) -> TopK:
    """Return the k best of what all processes found for the same queries."""
    ids, scores = (
        concatenate_arrays(processes, values[None]).swapaxes(0, 1).reshape(len(values), -1)
        for values in (ids_NK, scores_NK)
    )
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return TopK(np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1))


class ExcludedPairs(NamedTuple):
    """Pairs of a tile's queries and labels that are never returned, in order of column."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]

    @classmethod
    def of(cls, exclude: csr_matrix) -> ExcludedPairs:
        """Collect the stored entries of a matrix of queries x labels."""
        rows = np.repeat(np.arange(exclude.shape[0]), np.diff(exclude.indptr))
        order = np.argsort(exclude.indices, kind="stable")
        return cls(rows[order], exclude.indices[order].astype(np.int64))

    def within(self, columns: slice) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return row and column of the pairs of some columns, counted from the first of these."""
        first, last = np.searchsorted(self.columns, (columns.start, columns.stop))
        return self.rows[first:last], self.columns[first:last] - columns.start


def check_arguments(
    queries_ND: NDArray[Any],
    labels_LD: NDArray[Any] | Tensor,
    k: int,
    exclude: csr_matrix | None,
    ceiling: NDArray[np.float32] | None,
) -> None:
    """Raise a UsageError for arguments that do not fit together."""
    if queries_ND.ndim != 2 or labels_LD.ndim != 2 or queries_ND.shape[1] != labels_LD.shape[1]:
        raise UsageError(
            f"search needs query and label vectors of one width: got shapes {tuple(queries_ND.shape)} and "
            f"{tuple(labels_LD.shape)}"
        )
    if k < 1:
        raise UsageError(f"search got k = {k} labels per query: expected 1 or more")
    expected = (len(queries_ND), len(labels_LD))
    if exclude is not None and exclude.shape != expected:
        raise UsageError(f"pairs to exclude have shape {exclude.shape}: expected queries x labels, {expected}")
    if ceiling is not None and ceiling.shape != expected[:1]:
        raise UsageError(f"the ceiling has shape {ceiling.shape}: expected one number per query, {expected[:1]}")


def slices(stop: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` from 0 to stop."""
    for first in range(0, stop, size):
        yield slice(first, min(first + size, stop))


def nothing_found(num_queries: int, k: int) -> TopK:
    """Return a result without labels, to be written to."""
    return TopK(np.full((num_queries, k), -1, dtype=np.int64), np.full((num_queries, k), -np.inf, dtype=np.float32))


def write_found(found: TopK, rows: slice, keys_BK: Keys) -> None:
    """Decode sorted keys into the result; a score of minus infinity marks an excluded pair or padding."""
    scores, ids = scores_of(keys_BK), columns_of(keys_BK)
    found.scores[rows, : scores.shape[1]] = scores
    found.ids[rows, : ids.shape[1]] = np.where(scores == -np.inf, -1, ids)


def _score(
    queries_BD: Scores,
    labels_LD: NDArray[Any],
    columns: slice,
    scores: Scores,
    excluded: ExcludedPairs | None,
    limits_B: Scores | None,
) -> Scores:
    """Compute the scores of some columns, the labels first: where processors have AVX-512 that is 7% faster."""
    shape = columns.stop - columns.start, len(queries_BD)
    scores_CB = scores[: math.prod(shape)].reshape(shape)
    np.matmul(labels_LD[columns].astype(np.float32, copy=False), queries_BD.T, out=scores_CB)
    if excluded is not None:
        scores_CB[excluded.within(columns)[::-1]] = -np.inf
    if limits_B is not None:
        scores_CB[scores_CB > limits_B] = -np.inf
    return scores_CB


def _select(scores_CB: Scores, best_BK: Keys, k: int, above: NDArray[np.bool_], *, first_column: int) -> Keys:
    """Return keys of the columns of each row that can be among its k best, given the best keys before."""
    num_rows = scores_CB.shape[1]
    is_above_CB = above[: scores_CB.size].reshape(scores_CB.shape)
    # What is not a number is not below the floor, and so comes to light.
    if best_BK.shape[1] < k:
        np.less(scores_CB, _first_floor(scores_CB, k), out=is_above_CB)
    else:
        np.less_equal(scores_CB, scores_of(best_BK.min(axis=1)), out=is_above_CB)
    np.logical_not(is_above_CB, out=is_above_CB)
    above[scores_CB.size :] = False
    places_P = _true_places(above)
    scores_P = np.take(scores_CB, places_P)
    if np.isnan(scores_P).any():
        raise ModelError(NOT_A_NUMBER)
    columns_P, rows_P = np.divmod(places_P, num_rows)
    by_row = np.argsort(rows_P.astype(np.int16), kind="stable")
    keys_P = make_keys(scores_P, columns_P + first_column)[by_row]
    return as_rows(keys_P, np.bincount(rows_P, minlength=num_rows), k)


def _first_floor(scores_CB: Scores, k: int) -> Scores:
    """Return for each row a score that at least k of its columns reach."""
    num_columns, num_rows = scores_CB.shape
    width = max(1, num_columns // max(_GROUPS_PER_PLACE * k, _FEWEST_GROUPS))
    num_groups = num_columns // width
    maxima_GB = scores_CB[: width * num_groups].reshape(width, num_groups, num_rows).max(axis=0)
    return kth_largest(np.ascontiguousarray(maxima_GB.T), k)[:, 0]


def _true_places(values: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where an array of some multiple of eight bytes is true, which is seldom: whole words are skipped."""
    words = np.flatnonzero(values.view(np.uint64) != 0)
    found, places = values.reshape(-1, _WORD)[words].nonzero()
    return words[found] * _WORD + places


def as_rows(keys_P: Keys, counts_B: NDArray[np.int64], k: int) -> Keys:
    """Return keys that lie one row after the other as a matrix; shorter rows end in `NO_KEY`.

    Of a row with many only the k largest are kept, because the longest decides the width; sorts `keys_P` partly.
    """
    kept_P, stops_B = np.ones(len(keys_P), dtype=np.bool_), np.cumsum(counts_B)
    for row in np.flatnonzero(counts_B > _MOST_PER_PLACE * k).tolist():
        start, stop = stops_B[row] - counts_B[row], stops_B[row]
        keys_P[start:stop].partition(counts_B[row] - k)
        kept_P[start : stop - k] = False
    counts_B = np.where(counts_B > _MOST_PER_PLACE * k, k, counts_B)
    matrix = np.full((len(counts_B), int(counts_B.max(initial=0))), NO_KEY, dtype=np.int64)
    matrix[np.arange(matrix.shape[1]) < counts_B[:, None]] = keys_P if kept_P.all() else keys_P[kept_P]
    return matrix


def make_keys(scores: Scores, columns: NDArray[np.int64]) -> Keys:
    """Return int64 keys that order by score and then by lower column.

    The upper half holds the score in an order-preserving form, the lower half the complement of the column.
    """
    # Adding zero turns -0 into 0. The bits of negative floats count downwards: flip them all but the sign.
    bits = (scores + np.float32(0.0)).view(np.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return (bits.astype(np.int64) << 32) | (LOWER_HALF - columns)


def columns_of(keys: Keys) -> NDArray[np.int64]:
    """Return the columns of keys."""
    return LOWER_HALF - (keys & LOWER_HALF)


def scores_of(keys: Keys) -> Scores:
    """Return the scores of keys."""
    bits = (keys >> 32).astype(np.int32)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.view(np.float32)


def largest(keys: Keys, k: int) -> Keys:
    """Return the k largest keys of each row (all of them where there are fewer), in any order; sorts `keys` partly."""
    if keys.shape[1] <= k:
        return keys
    keys.partition(keys.shape[1] - k, axis=1)
    return keys[:, -k:]


def kth_largest(values: Scores, k: int) -> Scores:
    """Return the k-th largest value of each row, as a column; minus infinity where a row has fewer."""
    if values.shape[1] < k:
        return np.full((len(values), 1), -np.inf, dtype=np.float32)
    return np.partition(values, values.shape[1] - k, axis=1)[:, -k, None]
