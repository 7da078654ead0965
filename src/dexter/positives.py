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
    """A set of (row, column) pairs, sorted by row and then column, with an optional weight each.

    Rows are queries of a batch and columns labels of its pool. A pair that is given twice counts once, with the larger
    of its weights. The same class holds pairs to be ignored: nothing in it says what the pairs mean.
    """

    rows: Tensor
    """int64, ascending. Lists, NumPy arrays and tensors are accepted."""
    columns: Tensor
    """int64, ascending within a row."""
    weights: Tensor | None = None
    """float32, one per pair; None stands for 1 throughout."""

    # The fields are declared as what they hold; this constructor says what they accept.
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
        """The stored entries of a queries x labels matrix; their values are kept as weights unless all are 1."""
        pairs = matrix.tocoo()
        weights = None if bool((pairs.data == 1).all()) else pairs.data
        return cls(pairs.row, pairs.col, weights)

    def to(self, device: torch.device | str) -> Positives:
        """The same pairs on a device."""
        if self.rows.device == torch.device(device):
            return self
        return self._like(
            self.rows.to(device), self.columns.to(device), _map(self.weights, lambda values: values.to(device))
        )

    def counts(self, num_rows: int) -> Tensor:
        """Number of pairs of each row."""
        return torch.bincount(self.rows, minlength=num_rows)

    def transpose(self) -> Positives:
        """The same pairs with rows and columns swapped: the positive queries of each label."""
        return Positives(self.columns, self.rows, self.weights)

    def select(self, chosen: Tensor) -> Positives:
        """Only the pairs where the mask is true."""
        return self._like(self.rows[chosen], self.columns[chosen], _map(self.weights, lambda values: values[chosen]))

    def within(self, places: Tensor) -> Positives:
        """Only the pairs whose column has a place of 0 or more, columns renumbered so; places ascend with columns."""
        columns = places[self.columns]
        inside = columns >= 0
        return self._like(self.rows[inside], columns[inside], _map(self.weights, lambda values: values[inside]))

    def _set(self, rows: Tensor, columns: Tensor, weights: Tensor | None) -> None:
        for name, values in (("rows", rows), ("columns", columns), ("weights", weights)):
            object.__setattr__(self, name, values)

    @classmethod
    def _like(cls, rows: Tensor, columns: Tensor, weights: Tensor | None) -> Positives:
        """Pairs that are known to be sorted and unique."""
        pairs = object.__new__(cls)
        pairs._set(rows, columns, weights)
        return pairs

    def check(self, num_queries: int, num_labels: int) -> None:
        """Raise a DataError that names the first pair outside num_queries x num_labels."""
        outside = (self.rows >= num_queries) | (self.columns >= num_labels)
        if bool(outside.any()):
            first = int(outside.nonzero()[0, 0])
            raise DataError(
                f"pair (query {int(self.rows[first])}, label {int(self.columns[first])}) lies outside "
                f"{num_queries} queries x {num_labels} labels: indices count within the batch and its label pool"
            )


def _map(values: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Apply a function to weights, if there are any."""
    return None if values is None else function(values)


def _as_indices(values: Indices, name: str) -> Tensor:
    """A one-dimensional int64 tensor of indices that are not negative."""
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
    """Pairs in (row, column) order without duplicates; the largest weight of equal pairs."""
    if not len(rows):
        return rows, columns, weights
    width = int(columns.max()) + 1
    keys = rows * width + columns
    # What a CSR matrix gives is in order already, and to see that takes a tenth of the time of sorting.
    if bool((keys[1:] > keys[:-1]).all()):
        return rows, columns, weights
    keys, group = torch.unique(keys, sorted=True, return_inverse=True)
    if weights is not None:
        weights = torch.zeros(len(keys), device=rows.device).scatter_reduce_(0, group, weights, reduce="amax")
    return keys // width, keys % width, weights
