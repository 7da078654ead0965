"""Heads in use: from a text's representation to the vectors that are searched with and among, on arrays.

They compute what `dexter.encoders.heads` trains, and hold their weights under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.tensor_files import widened

_TINY = 1e-12


_ALIGNED = 8
"""Matrix products of 385 dimensions take a quarter more time than those of 392, on a CPU: rows then start anywhere."""


def num_prior_elements(width: int) -> int:
    """Return how many elements make room for the label prior in training, and the width a multiple of 8."""
    return _ALIGNED - width % _ALIGNED


@dataclass(frozen=True, eq=False)
class LinearArrays:
    """A linear layer."""

    weight_PD: NDArray[np.float32]
    bias_P: NDArray[np.float32]

    def __call__(self, vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Apply the layer."""
        return np.asarray(vectors_ND @ self.weight_PD.T + self.bias_P)


@dataclass(frozen=True, kw_only=True, eq=False)
class DualArrays:
    """The dual-encoder head: one map for queries and labels, with the label prior as one more dimension."""

    temperature: float
    normalize: bool = False
    """Whether vectors have length one."""
    projection: LinearArrays | None = None
    """Followed by tanh."""
    prior_L: NDArray[np.float32] | None = None
    """A bias for each label."""

    @classmethod
    def of(cls, state: Mapping[str, NDArray[Any]], *, temperature: float, normalize: bool) -> DualArrays:
        """Make the head from its weights by name."""
        return cls(
            temperature=temperature, normalize=normalize, projection=_linear(state), prior_L=state.get("prior.bias")
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the weights by name."""
        return _state(self.projection, self.prior_L)

    def for_labels(self, prior_L: NDArray[np.float32] | None) -> DualArrays:
        """Return this head for other labels, given their biases."""
        return replace(self, prior_L=prior_L)

    def vectors(self, representations_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors of queries or labels without the dimension of the prior."""
        vectors_ND = representations_ND
        if self.projection is not None:
            vectors_ND = np.tanh(self.projection(vectors_ND))
        return unit_rows(vectors_ND) if self.normalize else vectors_ND

    def queries(self, representations_ND: NDArray[np.float32], prior_weight: float) -> list[NDArray[np.float32]]:
        """Return vectors of queries, and if there is a prior the column of its weight."""
        return _with_column(self.vectors(representations_ND), None if self.prior_L is None else prior_weight)

    def labels(self, representations_LD: NDArray[np.float32], labels: slice) -> list[NDArray[np.float32]]:
        """Return vectors of some labels, and if there is a prior the column of their scaled biases."""
        scaled_L = None if self.prior_L is None else np.float32(self.temperature) * self.prior_L[labels]
        return _with_column(self.vectors(representations_LD), scaled_L)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassifierArrays:
    """The classifier head: a map for queries, and one row of a table for each label."""

    temperature: float
    table_LC: NDArray[Any]
    """float32, or the bits of bfloat16 as uint16."""
    projection: LinearArrays | None = None
    prior_L: NDArray[np.float32] | None = None
    """A bias for each label. Without one, search uses cosines, as published; with one the lengths of vectors count."""

    @classmethod
    def of(cls, state: Mapping[str, NDArray[Any]], *, temperature: float) -> ClassifierArrays:
        """Make the head from its weights by name."""
        return cls(
            temperature=temperature,
            table_LC=state["table.weight"],
            projection=_linear(state),
            prior_L=state.get("prior.bias"),
        )

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the weights by name."""
        return {"table.weight": self.table_LC, **_state(self.projection, self.prior_L)}

    @property
    def storage(self) -> str:
        """The type of number that the table is stored in."""
        return "bfloat16" if self.table_LC.dtype == np.uint16 else "float32"

    def for_labels(self, table_LC: NDArray[Any], prior_L: NDArray[np.float32] | None) -> ClassifierArrays:
        """Return this head for other labels, given their rows and biases."""
        return replace(self, table_LC=table_LC, prior_L=prior_L)

    def rows(self, labels: slice | NDArray[np.int64] = slice(None)) -> NDArray[np.float32]:
        """Return the rows of some labels (all if left out) as float32."""
        return widened(self.table_LC[labels])

    def project(self, representations_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return vectors of texts, not normalised."""
        return representations_ND if self.projection is None else self.projection(representations_ND)

    def queries(self, representations_ND: NDArray[np.float32], prior_weight: float) -> list[NDArray[np.float32]]:
        """Return vectors of queries, and if there is a prior the column of its weight."""
        vectors_NC = self.project(representations_ND)
        if self.prior_L is None:
            return [unit_rows(vectors_NC)]
        return _with_column(vectors_NC, prior_weight)

    def labels(self, rows_LC: NDArray[np.float32], labels: slice) -> list[NDArray[np.float32]]:
        """Return vectors of some labels from their rows, in which those of unseen labels are filled in."""
        if self.prior_L is None:
            return [unit_rows(rows_LC)]
        return _with_column(rows_LC, np.float32(self.temperature) * self.prior_L[labels])


def unit_rows(vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each vector to length one; zero stays zero."""
    lengths_N: NDArray[np.float32] = np.sqrt(np.einsum("nd,nd->n", vectors_ND, vectors_ND))
    return np.asarray(vectors_ND / np.maximum(lengths_N, _TINY)[:, None], dtype=vectors_ND.dtype)


def _with_column(
    vectors_ND: NDArray[np.float32], column: NDArray[np.float32] | float | None
) -> list[NDArray[np.float32]]:
    """Return the vectors and one more column, a number for each or the same for all, as parts to be joined."""
    if column is None:
        return [vectors_ND]
    column_N1 = np.empty((len(vectors_ND), 1), dtype=np.float32)
    column_N1[:, 0] = column
    return [vectors_ND, column_N1]


def _linear(state: Mapping[str, NDArray[Any]]) -> LinearArrays | None:
    return LinearArrays(state["project.0.weight"], state["project.0.bias"]) if "project.0.weight" in state else None


def _state(projection: LinearArrays | None, prior_L: NDArray[np.float32] | None) -> dict[str, NDArray[Any]]:
    named = {}
    if projection is not None:
        named = {"project.0.weight": projection.weight_PD, "project.0.bias": projection.bias_P}
    return named if prior_L is None else named | {"prior.bias": prior_L}
