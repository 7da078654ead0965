"""The classifier table Psi: one learned vector per label, and the vectors that its rows are initialised with.

A step looks up the rows of its label pool. The lookup returns float32 whatever the storage type, and its gradient in
`weight.grad` is float32 and sparse over rows, for a row-sparse optimiser. No step allocates a tensor of the size of the
table. Rows of labels without training queries are made by `dexter.model.unseen`.

Shapes: L labels, M labels of a pool, N queries, D dimensions of the encoder, C of the classifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dexter.errors import UsageError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_TINY = 1e-12
"""Smallest length that a vector is divided by."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ClassifierTable(nn.Module):
    """One row per label; zero until `initialise` or training sets it.

    Args:
        num_labels: number of rows.
        dimension: size of a row, that of the classifier head.
        storage: "float32", or "bfloat16" for half the memory, which needs an optimiser with stochastic rounding.
        dropout: probability that an element of a looked-up row is dropped in training mode.
    """

    def __init__(
        self,
        num_labels: int,
        dimension: int,
        *,
        storage: Literal["float32", "bfloat16"] = "float32",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if storage not in _DTYPES:
            raise UsageError(f"classifier storage is {storage!r}: expected one of {', '.join(_DTYPES)}")
        if not 0 <= dropout < 1:
            raise UsageError(f"classifier dropout is {dropout}: expected 0 or more and less than 1")
        self.dropout = dropout
        self.storage = storage
        self.weight = nn.Parameter(torch.zeros(num_labels, dimension, dtype=_DTYPES[storage]))

    @torch.no_grad()
    def initialise(self, vectors_LC: Tensor) -> None:
        """Set every row; values are rounded to nearest if the storage is narrower."""
        if vectors_LC.shape != self.weight.shape:
            raise UsageError(
                f"classifier rows of shape {tuple(vectors_LC.shape)} do not fit a table of {tuple(self.weight.shape)}: "
                "expected labels x dimensions of the classifier head"
            )
        self.weight.copy_(vectors_LC)

    def rows(self, labels_M: Tensor | None = None) -> Tensor:
        """Return rows of some labels (default: all, in order) as float32: [M, C], differentiable in `weight`.

        A label may occur several times, and lookups may be repeated within a step: gradients add up.
        """
        # Set here and not in the constructor, because a copied module loses it.
        self.weight.grad_dtype = _working_type(self.weight)
        rows_MC: Tensor = _Lookup.apply(self.weight, labels_M)  # type: ignore[no-untyped-call]
        return functional.dropout(rows_MC, self.dropout, self.training)


class _Lookup(torch.autograd.Function):
    """Look up rows of a table as float32; the gradient is float32 and sparse over rows."""

    @staticmethod
    def forward(ctx: Any, table_LC: Tensor, labels_M: Tensor | None) -> Tensor:
        ctx.save_for_backward(labels_M)
        ctx.shape = table_LC.shape
        # All rows of a float32 table are the table itself, without a copy.
        chosen_MC = table_LC if labels_M is None else table_LC.index_select(0, labels_M)
        return chosen_MC.to(_working_type(table_LC))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients_MC: Tensor) -> tuple[Tensor, None]:
        (labels_M,) = ctx.saved_tensors
        if labels_M is None:
            labels_M = torch.arange(ctx.shape[0], device=gradients_MC.device)
        sparse = torch.sparse_coo_tensor(labels_M.long()[None], gradients_MC, ctx.shape, check_invariants=False)
        return sparse, None


def _working_type(table_LC: Tensor) -> torch.dtype:
    """Return the type that rows are looked up in: float32, also for narrower storage."""
    return torch.float64 if table_LC.dtype == torch.float64 else torch.float32


def centroids(query_vectors_ND: Tensor, relevance: csr_matrix) -> Tensor:
    """Average the vectors of each label's training queries, weighted by relevance: [L, D]; zeros for unseen labels.

    Args:
        query_vectors_ND: one vector per training query.
        relevance: queries x labels; values are weights.
    """
    if relevance.shape[0] != len(query_vectors_ND):
        raise UsageError(
            f"centroids need one vector per query: got {len(query_vectors_ND)} vectors for {relevance.shape[0]} queries"
        )
    # Transposing a CSR matrix is free, and the product reads the queries once, in order.
    pairs = relevance.astype(np.float32).T
    sums_LD = pairs @ query_vectors_ND.detach().float().cpu().numpy()
    totals_L1 = np.asarray(pairs.sum(axis=1), dtype=np.float32).reshape(-1, 1)
    np.divide(sums_LD, totals_L1, out=sums_LD, where=totals_L1 > 0)
    return torch.from_numpy(sums_LD).to(query_vectors_ND.device)


def starting_rows(label_vectors_LC: Tensor, query_vectors_NC: Tensor, relevance: csr_matrix) -> Tensor:
    """Return initial classifier rows: the direction of the label's text plus that of its queries' centroid.

    Both arguments are outputs of the classifier head, since rows are scored against its queries. The row of a label
    without training queries is the direction of its text. If the mean length of queries exceeds one, as with
    transformers, rows are divided by it: scores then start in the range of cosines, for which temperatures are chosen.
    At several times that size a softmax is saturated from the first step.
    """
    rows_LC = functional.normalize(label_vectors_LC, dim=1)
    typical_length = torch.linalg.vector_norm(query_vectors_NC.float(), dim=1).mean() if len(query_vectors_NC) else 1.0
    # In place: with a million labels every copy is gigabytes.
    middle_LC = centroids(query_vectors_NC, relevance).to(rows_LC)
    lengths_L1 = torch.linalg.vector_norm(middle_LC, dim=1, keepdim=True)
    rows_LC.add_(middle_LC.div_(lengths_L1.clamp_min_(_TINY)))
    return rows_LC.div_(max(1.0, float(typical_length)))
