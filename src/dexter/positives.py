"""Positives: the sparse (query, label) pairs that batches, losses and the trainer share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dexter.errors import DataError, UsageError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Indices: TypeAlias = Sequence[int] | np.ndarray | Tensor
Weights: TypeAlias = Sequence[float] | np.ndarray | Tensor


@dataclass(frozen=True, eq=False, init=False)
class Positives:
    """A set of (row, column) pairs, sorted by row and then column, each with an optional weight.

    Rows are queries of a batch, columns labels of its pool. A pair given twice counts once, with the larger weight.
    The class also holds pairs to be ignored: nothing in it depends on what the pairs mean.
    """

    rows: Tensor
    """int64, ascending. Lists, NumPy arrays and tensors are accepted."""
    columns: Tensor
    """int64, ascending within a row."""
    weights: Tensor | None = None
    """float32, one per pair; None means that all are 1."""

    # The fields are annotated with the types they hold, this constructor with the types it accepts.
    def __init__(self, rows: Indices, columns: Indices, weights: Weights | None = None) -> None:
        row_ids, column_ids = _as_indices(rows, "rows"), _as_indices(columns, "columns")
        pair_weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float32).detach()
        for name, values in (("columns", column_ids), ("weights", pair_weights)):
            if values is not None and values.shape != row_ids.shape:
                raise UsageError(
                    f"positives need one entry per pair: got {len(row_ids)} rows, {name} of shape {tuple(values.shape)}"
                )
        if pair_weights is not None and not bool(torch.isfinite(pair_weights).all() & (pair_weights >= 0).all()):
            raise UsageError("weights of positives must be finite and not negative")
        column_ids = column_ids.to(row_ids.device)
        pair_weights = None if pair_weights is None else pair_weights.to(row_ids.device)
        self._set(*_sorted_set(row_ids, column_ids, pair_weights))

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def from_csr(cls, matrix: csr_matrix) -> Positives:
        """Take the stored entries of a queries x labels matrix; values are weights unless all are 1."""
        pairs = matrix.tocoo()
        weights = None if bool((pairs.data == 1).all()) else pairs.data
        return cls(pairs.row, pairs.col, weights)

    def to(self, device: torch.device | str) -> Positives:
        """Return the pairs on a device."""
        return self if self.rows.device == torch.device(device) else self._map(lambda values: values.to(device))

    def counts(self, num_rows: int) -> Tensor:
        """Count the pairs of each row."""
        return torch.bincount(self.rows, minlength=num_rows)

    def transpose(self) -> Positives:
        """Swap rows and columns: the positive queries of each label."""
        return Positives(self.columns, self.rows, self.weights)

    def select(self, chosen: Tensor) -> Positives:
        """Return the pairs for which a mask is true."""
        return self._map(lambda values: values[chosen])

    def renumber(self, *, rows: Tensor | None = None, columns: Tensor | None = None) -> Positives:
        """Replace each row or column by its new number, and drop pairs whose new number is -1.

        New numbers must ascend with the old ones.
        """
        new_rows = self.rows if rows is None else rows[self.rows]
        new_columns = self.columns if columns is None else columns[self.columns]
        kept = (new_rows >= 0) & (new_columns >= 0)
        pairs = self.select(kept)
        pairs._set(new_rows[kept], new_columns[kept], pairs.weights)
        return pairs

    def check(self, num_queries: int, num_labels: int) -> None:
        """Raise a `DataError` that names the first pair outside num_queries x num_labels."""
        outside = (self.rows >= num_queries) | (self.columns >= num_labels)
        if bool(outside.any()):
            first = int(outside.nonzero()[0, 0])
            raise DataError(
                f"pair (query {int(self.rows[first])}, label {int(self.columns[first])}) lies outside "
                f"{num_queries} queries x {num_labels} labels: indices count within the batch and its label pool"
            )

    def _set(self, rows: Tensor, columns: Tensor, weights: Tensor | None) -> None:
        for name, values in (("rows", rows), ("columns", columns), ("weights", weights)):
            object.__setattr__(self, name, values)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Positives:
        """Apply a function that keeps the order of the pairs to every field."""
        pairs = object.__new__(Positives)
        weights = None if self.weights is None else function(self.weights)
        pairs._set(function(self.rows), function(self.columns), weights)
        return pairs


def _as_indices(values: Indices, name: str) -> Tensor:
    """Return a one-dimensional int64 tensor of indices that are not negative."""
    indices = torch.as_tensor(values).detach()
    if indices.ndim != 1:
        raise UsageError(f"{name} of positives must be one-dimensional, got shape {tuple(indices.shape)}")
    if indices.numel() and (indices.is_floating_point() or indices.dtype == torch.bool):
        raise UsageError(
            f"{name} of positives must be integers, got {indices.dtype}: pass indices, not a mask or scores"
        )
    indices = indices.to(torch.int64)
    if indices.numel() and int(indices.min()) < 0:
        raise DataError(f"{name} of positives must not be negative, got {int(indices.min())}")
    return indices


def _sorted_set(rows: Tensor, columns: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sort pairs by row and column and remove duplicates, keeping the largest weight."""
    if not len(rows):
        return rows, columns, weights
    width = int(columns.max()) + 1
    keys = rows * width + columns
    # Pairs of a CSR matrix are sorted already, and checking that takes a tenth of the time of sorting.
    if bool((keys[1:] > keys[:-1]).all()):
        return rows, columns, weights
    keys, group = torch.unique(keys, sorted=True, return_inverse=True)
    if weights is not None:
        weights = torch.zeros(len(keys), device=rows.device).scatter_reduce_(0, group, weights, reduce="amax")
    return keys // width, keys % width, weights
