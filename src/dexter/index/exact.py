"""Exact search: the k labels with the largest inner product, in bounded memory.

Scores are computed in tiles of queries x labels, and the full matrix never exists. A tile is not sorted: the maximum of
every 32 neighbouring columns is taken while they are in cache, and only groups whose maximum reaches the floor of the
query are examined again. The floor is the score of the query's k-th best label so far, in the first tile the k-th
largest maximum: at least k labels reach it, so nothing below it can be among the best. It rises from tile to tile, and
soon few groups reach it.

A score and its column are kept as one int64 key: comparing two keys compares the scores and then prefers the lower
column. Equal scores therefore rank the same way whatever the tiling, the number of threads or the selection algorithm.

Shapes: N queries, L labels, D dimensions, B queries and C labels in a tile, G groups in a tile, P pairs of a query and
a group that are examined again, K places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dexter.errors import ModelError, UsageError
from dexter.index.base import BackendName
from dexter.processes import Processes, SingleProcess, stack
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

GROUP = 32
"""Columns whose maximum is taken together: the shortest run that vectorises well."""
ROWS = 512
"""Queries in a tile: enough for the matrix product to run near its peak."""
COLUMNS = 8_192
"""Labels in a tile, a multiple of `GROUP`: few enough that its scores are still in the last cache when the group maxima
are taken, many enough that threads seldom wait for each other."""
KEYS = 2**21
"""Scores of a tile that are examined again at a time; reached only where very many labels are equal."""
MERGED_QUERIES = 2**16
"""Queries whose results from all processes are in memory and merged at a time."""
LOWER_HALF = 0xFFFFFFFF
"""Mask of the bits of a key that hold the column."""
NO_KEY = -0x7F800001 << 32
"""Below every other key: minus infinity, and no column."""


@torch.no_grad()
def search(
    queries_ND: Tensor | np.ndarray,
    labels_LD: Tensor | np.ndarray,
    k: int,
    *,
    exclude: csr_matrix | None = None,
    ceiling: np.ndarray | None = None,
) -> TopK:
    """Find the k labels with the largest inner product with each query, exactly.

    Args:
        queries_ND: one vector per query. Vectors of another type than float32 are converted, a part at a time.
        labels_LD: one vector per label; the search runs on the device they are on.
        k: labels per query. Fewer are found where there are fewer; such rows end in id -1 and score minus infinity.
        exclude: queries x labels; a stored entry marks a pair that is never returned (a filter pair, a positive).
        ceiling: one number per query; labels that score above it are never returned.
    """
    queries_ND, labels_LD = torch.as_tensor(queries_ND), torch.as_tensor(labels_LD)
    check_arguments(queries_ND, labels_LD, k, exclude, ceiling)
    num_queries, num_labels = len(queries_ND), len(labels_LD)
    num_rows, width = min(num_queries, ROWS), min(-(-num_labels // GROUP) * GROUP, COLUMNS)
    scores_BC = torch.empty(num_rows, width, device=labels_LD.device)
    found = TopK(np.full((num_queries, k), -1, dtype=np.int64), np.full((num_queries, k), -np.inf, dtype=np.float32))
    for rows in _slices(num_queries, ROWS):
        tile_queries_BD = queries_ND[rows].to(labels_LD.device, torch.float32)
        limits_B1 = None if ceiling is None else torch.as_tensor(ceiling[rows]).to(tile_queries_BD).unsqueeze(1)
        excluded = None if exclude is None else _ExcludedPairs.of(exclude[rows])
        best_BK = torch.empty(len(tile_queries_BD), 0, dtype=torch.int64, device=labels_LD.device)
        for columns in _slices(num_labels, COLUMNS):
            tile_BC, maxima_BG = _score(tile_queries_BD, labels_LD, columns, scores_BC, excluded, limits_B1)
            floors_B1 = kth_largest(maxima_BG, k) if best_BK.shape[1] < k else scores_of(best_BK.amin(1, keepdim=True))
            keys_BK = _select(tile_BC, maxima_BG, floors_B1, k, first_column=columns.start)
            best_BK = largest(torch.cat([best_BK, keys_BK], dim=1), k)
        _write(found, rows, best_BK.sort(dim=1, descending=True).values)
    return found


@dataclass(frozen=True)
class ExactIndex:
    """Scores every label, on the device the vectors are on."""

    vectors_LD: Tensor
    backend: BackendName = field(default="exact", init=False)
    recall: float | None = field(default=1.0, init=False)

    def search(
        self,
        queries_ND: Tensor | np.ndarray,
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: np.ndarray | None = None,
    ) -> TopK:
        """Return the k best labels of each query."""
        return search(queries_ND, self.vectors_LD, k, exclude=exclude, ceiling=ceiling)


def search_shards(
    queries_ND: Tensor,
    labels_LD: Tensor,
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
        _merge(processes, ids_NK[part], found.scores[part], k) for part in _slices(max(len(ids_NK), 1), MERGED_QUERIES)
    ]
    return TopK(np.concatenate([part.ids for part in merged]), np.concatenate([part.scores for part in merged]))


def _merge(processes: Processes, ids_NK: np.ndarray, scores_NK: np.ndarray, k: int) -> TopK:
    """Return the k best of what all processes found for the same queries."""
    ids, scores = (
        stack(processes, torch.from_numpy(np.ascontiguousarray(values))).transpose(0, 1).flatten(1).numpy()
        for values in (ids_NK, scores_NK)
    )
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return TopK(np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1))


class _ExcludedPairs(NamedTuple):
    """Pairs of a tile's queries and labels that are never returned, in order of column."""

    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of(cls, exclude: csr_matrix) -> _ExcludedPairs:
        rows = np.repeat(np.arange(exclude.shape[0]), np.diff(exclude.indptr))
        order = np.argsort(exclude.indices, kind="stable")
        return cls(rows[order], exclude.indices[order].astype(np.int64))

    def remove(self, scores_BC: Tensor, columns: slice) -> None:
        """Set the pairs of these columns, whose scores are given, to minus infinity."""
        first, last = np.searchsorted(self.columns, (columns.start, columns.stop))
        rows = torch.from_numpy(self.rows[first:last]).to(scores_BC.device)
        places = torch.from_numpy(self.columns[first:last] - columns.start).to(scores_BC.device)
        scores_BC[rows, places] = -torch.inf


def check_arguments(
    queries_ND: Tensor, labels_LD: Tensor, k: int, exclude: csr_matrix | None, ceiling: np.ndarray | None
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


def _slices(stop: int, size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` from 0 to stop."""
    for first in range(0, stop, size):
        yield slice(first, min(first + size, stop))


def _score(
    queries_BD: Tensor,
    labels_LD: Tensor,
    columns: slice,
    scores_BC: Tensor,
    excluded: _ExcludedPairs | None,
    limits_B1: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the scores of some columns; return them, padded to whole groups, and the maxima of the groups."""
    num_columns = columns.stop - columns.start
    padded_BC = scores_BC.view(-1)[: len(queries_BD) * -(-num_columns // GROUP) * GROUP].view(len(queries_BD), -1)
    real_BC = padded_BC[:, :num_columns]
    torch.mm(queries_BD, labels_LD[columns].to(torch.float32).T, out=real_BC)
    if excluded is not None:
        excluded.remove(real_BC, columns)
    if limits_B1 is not None:
        real_BC.masked_fill_(real_BC > limits_B1, -torch.inf)
    padded_BC[:, num_columns:] = -torch.inf
    maxima_BG = torch.amax(padded_BC.view(len(queries_BD), -1, GROUP), dim=2)
    if bool(maxima_BG.max().isnan()):
        raise ModelError("search met a score that is not a number: check the query and label vectors for NaN")
    return padded_BC, maxima_BG


def _select(scores_BC: Tensor, maxima_BG: Tensor, floors_B1: Tensor, k: int, *, first_column: int) -> Tensor:
    """Return keys of the k best columns of each row, a few rows at a time; `NO_KEY` where there are fewer."""
    parts = _slices(len(scores_BC), max(1, KEYS // scores_BC.shape[1]))
    found = [
        _best_above(scores_BC[rows], maxima_BG[rows], floors_B1[rows], k, first_column=first_column) for rows in parts
    ]
    width = max((keys.shape[1] for keys in found), default=0)
    return torch.cat([functional.pad(keys, (0, width - keys.shape[1]), value=NO_KEY) for keys in found])


def _best_above(scores_BC: Tensor, maxima_BG: Tensor, floors_B1: Tensor, k: int, *, first_column: int) -> Tensor:
    """Return keys of the k best columns of some rows, among those that reach the row's floor."""
    num_rows, num_groups = maxima_BG.shape
    places_P = flat_indices_reaching(maxima_BG, floors_B1)
    rows_P = places_P.div(num_groups, rounding_mode="floor")
    examined_PG = scores_BC.view(-1, GROUP).index_select(0, places_P)
    reached = flat_indices_reaching(examined_PG, floors_B1.index_select(0, rows_P))
    pairs = reached.div(GROUP, rounding_mode="floor")
    rows, groups = rows_P.index_select(0, pairs), places_P.index_select(0, pairs)
    columns = (groups - rows * num_groups - pairs).mul_(GROUP).add_(reached).add_(first_column)
    keys = make_keys(examined_PG.view(-1).index_select(0, reached), columns)
    return largest(_as_rows(keys, torch.bincount(rows, minlength=num_rows)), k)


def _as_rows(keys: Tensor, counts_B: Tensor) -> Tensor:
    """Return keys that lie one row after the other as a matrix; shorter rows end in `NO_KEY`."""
    width = int(counts_B.max())
    matrix = keys.new_full((len(counts_B), width), NO_KEY)
    matrix[torch.arange(width, device=keys.device) < counts_B.unsqueeze(1)] = keys
    return matrix


def _write(found: TopK, rows: slice, keys_BK: Tensor) -> None:
    """Decode sorted keys into the result; a score of minus infinity marks an excluded pair or padding."""
    scores = scores_of(keys_BK).cpu().numpy()
    ids = columns_of(keys_BK).cpu().numpy()
    found.scores[rows, : scores.shape[1]] = scores
    found.ids[rows, : ids.shape[1]] = np.where(scores == -np.inf, -1, ids)


def make_keys(scores: Tensor, columns: Tensor) -> Tensor:
    """Return int64 keys that order by score and then by lower column.

    The upper half holds the score in an order-preserving form, the lower half the complement of the column.
    """
    # Adding zero turns -0 into 0. The bits of negative floats count downwards: flip them all but the sign.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(LOWER_HALF - columns)


def columns_of(keys: Tensor) -> Tensor:
    """Return the columns of keys."""
    return LOWER_HALF - (keys & LOWER_HALF)


def scores_of(keys: Tensor) -> Tensor:
    """Return the scores of keys."""
    bits = (keys >> 32).to(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return bits.view(torch.float32)


def largest(keys: Tensor, k: int) -> Tensor:
    """Return the k largest keys of each row (all of them where there are fewer), in any order."""
    if keys.shape[1] <= k:
        return keys
    if keys.device.type != "cpu":
        return keys.topk(k, dim=1, sorted=False).values
    # NumPy's partition is several times faster on a CPU than torch.topk; it works in place on the tensor's memory.
    array = keys.numpy()
    array.partition(array.shape[1] - k, axis=1)
    return keys[:, -k:]


def kth_largest(values: Tensor, k: int) -> Tensor:
    """Return the k-th largest value of each row, as a column; minus infinity where a row has fewer."""
    if values.shape[1] < k:
        return values.new_full((len(values), 1), -torch.inf)
    if values.device.type != "cpu":
        return values.topk(k, dim=1).values[:, -1:]
    array = values.numpy().copy()
    array.partition(array.shape[1] - k, axis=1)
    return torch.from_numpy(array[:, -k, None].copy())


def flat_indices_reaching(values: Tensor, floors: Tensor) -> Tensor:
    """Return flat indices of the values that are at least the floor of their row."""
    if values.device.type != "cpu":
        return (values >= floors).view(-1).nonzero().squeeze(1)
    # Two to three times as fast as torch on a CPU.
    return torch.from_numpy(np.flatnonzero(values.numpy() >= floors.numpy()))
