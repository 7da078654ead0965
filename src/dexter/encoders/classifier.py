"""The classifier table Psi: one learned vector per label, of which a step touches the rows of its label pool.

A lookup gives float32 rows whatever the storage. Its gradient is float32 too and sparse over rows; it arrives in
`weight.grad` in the ordinary way, for a row-sparse optimiser to consume. Nothing of the size of the table is made in a
step. Also here: where rows start (`centroids`, `starting_rows`), and what labels that were never trained have instead
(`fill_rows`).

Shapes: L labels, S seen in training, U unseen, M labels of a pool, N queries, K nearest labels, D dimensions
of the dual encoder, C of the classifier; over ranks: R ranks, V unseen labels of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dexter.errors import UsageError
from dexter.index import search
from dexter.index.sharded import search_shards
from dexter.processes import Ranks

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_TINY = 1e-12
"""What lengths are at least when they divide."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ClassifierTable(nn.Module):
    """One row per label; zero until `initialise` or training says otherwise.

    Args:
        num_labels: rows.
        dimension: width of a row, that of the classifier head.
        storage: "float32", or "bfloat16" for half the memory; then train with an optimiser that rounds stochastically.
        dropout: share of a looked-up row's elements that are dropped in training mode, the others scaled up.
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
        """Set every row, rounded to nearest where the storage is narrower."""
        if vectors_LC.shape != self.weight.shape:
            raise UsageError(
                f"classifier rows of shape {tuple(vectors_LC.shape)} do not fit a table of {tuple(self.weight.shape)}: "
                "expected labels x dimensions of the classifier head"
            )
        self.weight.copy_(vectors_LC)

    def appended(self, num_new: int) -> ClassifierTable:
        """A table with more rows, of zeros, at the end, for labels that were never trained."""
        weight = self.weight.detach()
        return self.with_rows(torch.cat([weight, weight.new_zeros(num_new, weight.shape[1])]))

    def selected(self, labels_M: Tensor) -> ClassifierTable:
        """A table with the rows of some labels, in the order given."""
        return self.with_rows(self.weight.detach()[labels_M])

    def rows(self, labels_M: Tensor | None = None) -> Tensor:
        """Rows of some labels (all, in order, if left out) as float32: [M, C], differentiable in `weight`.

        A label may be named several times, and lookups may be repeated within a step: gradients add up.
        """
        # Set here rather than once, because a copy of a module forgets it.
        self.weight.grad_dtype = _working_type(self.weight)
        rows_MC: Tensor = _Lookup.apply(self.weight, labels_M)  # type: ignore[no-untyped-call]
        return functional.dropout(rows_MC, self.dropout, self.training)

    def with_rows(self, weight_LC: Tensor) -> ClassifierTable:
        """A table of the same kind with other rows."""
        table = ClassifierTable(0, weight_LC.shape[1], storage=self.storage, dropout=self.dropout)
        table.weight = nn.Parameter(weight_LC)
        return table.train(self.training)


class _Lookup(torch.autograd.Function):
    """Rows of a table as float32, with a gradient that is sparse over rows and float32 as well."""

    @staticmethod
    def forward(ctx: Any, table_LC: Tensor, labels_M: Tensor | None) -> Tensor:
        ctx.save_for_backward(labels_M)
        ctx.shape = table_LC.shape
        # All rows of a float32 table are the table itself: no copy.
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
    """What rows are computed with: float32, also for narrower storage."""
    return torch.float64 if table_LC.dtype == torch.float64 else torch.float32


def centroids(query_vectors_ND: Tensor, relevance: csr_matrix) -> Tensor:
    """The mean vector of each label's training queries, weighted by relevance: [L, D]; zeros for a label without any.

    Args:
        query_vectors_ND: one vector per training query.
        relevance: queries x labels; stored values are weights.
    """
    if relevance.shape[0] != len(query_vectors_ND):
        raise UsageError(
            f"centroids need one vector per query: got {len(query_vectors_ND)} vectors for {relevance.shape[0]} queries"
        )
    # Transposing a CSR matrix is free, and the product walks the queries once, in order.
    pairs = relevance.astype(np.float32).T
    sums_LD = pairs @ query_vectors_ND.detach().float().cpu().numpy()
    totals_L1 = np.asarray(pairs.sum(axis=1), dtype=np.float32).reshape(-1, 1)
    np.divide(sums_LD, totals_L1, out=sums_LD, where=totals_L1 > 0)
    return torch.from_numpy(sums_LD).to(query_vectors_ND.device)


def starting_rows(label_vectors_LC: Tensor, query_vectors_NC: Tensor, relevance: csr_matrix) -> Tensor:
    """Where classifier rows start: the direction of the label's text plus that of its training queries' centroid.

    Both sides are what the classifier head makes of the encoder's representations, since rows are scored against its
    queries. A label without training queries starts at its text alone. Where queries are longer than one, as those of
    transformers are, rows are shorter by as much: scores then start as large as cosines, for which temperatures are
    chosen. At several times that size a softmax is saturated from the first step.
    """
    rows_LC = functional.normalize(label_vectors_LC, dim=1)
    typical_length = torch.linalg.vector_norm(query_vectors_NC.float(), dim=1).mean() if len(query_vectors_NC) else 1.0
    # In place: with a million labels every copy is gigabytes.
    middle_LC = centroids(query_vectors_NC, relevance).to(rows_LC)
    lengths_L1 = torch.linalg.vector_norm(middle_LC, dim=1, keepdim=True)
    rows_LC.add_(middle_LC.div_(lengths_L1.clamp_min_(_TINY)))
    return rows_LC.div_(max(1.0, float(typical_length)))


@torch.no_grad()
def fill_rows(
    rows_LC: Tensor,
    counts_L: NDArray[np.integer],
    *,
    texts_UC: Tensor,
    meanings_LD: Tensor,
    num_neighbours: int = 10,
    ranks: Ranks | None = None,
) -> Tensor:
    """Rows of all labels, that of an unseen label made from its text and its nearest seen labels: [L, C].

    Half of its direction is that of its own text, half the mean direction of the rows of the seen labels that mean most
    nearly the same; its length is their mean length. Either half alone finds fewer of them (bench/unseen_labels.py).
    Rows of seen labels stay as they are. Where nothing was seen, rows of unseen labels are zero.

    Args:
        rows_LC: the classifier's rows of all labels; those of unseen labels are not looked at.
        counts_L: training queries of each label; unseen labels have none.
        texts_UC: what the classifier head makes of the unseen labels' texts, in order.
        meanings_LD: the dual encoder's vectors of all labels, without priors.
        num_neighbours: seen labels that an unseen one borrows from.
        ranks: those that hold the other labels; an unseen label borrows from the labels of all.
    """
    seen_L = _seen(counts_L, meanings_LD)
    filled_LC = rows_LC.to(meanings_LD).masked_fill(~seen_L[:, None], 0.0)
    meanings_LD = functional.normalize(meanings_LD, dim=1)
    if ranks is not None and ranks.size > 1:
        borrowed = _borrow_over_ranks(meanings_LD, filled_LC, seen_L, num_neighbours, ranks)
    else:
        borrowed = _borrow(meanings_LD, filled_LC, seen_L, num_neighbours)
    if borrowed is not None:
        directions_UC = functional.normalize(borrowed.directions_UC, dim=1) + functional.normalize(texts_UC, dim=1)
        filled_LC[~seen_L] = functional.normalize(directions_UC, dim=1) * borrowed.lengths_U1
    return filled_LC


class _Borrowed(NamedTuple):
    """Means over the rows of an unseen label's nearest seen labels."""

    directions_UC: Tensor
    lengths_U1: Tensor


def _borrow(meanings_LD: Tensor, rows_LC: Tensor, seen_L: Tensor, num_neighbours: int) -> _Borrowed | None:
    """What unseen labels borrow; None where there are none, or nobody to borrow from."""
    if bool(seen_L.all()) or not bool(seen_L.any()):
        return None
    found = search(meanings_LD[~seen_L], meanings_LD[seen_L], min(num_neighbours, int(seen_L.sum())))
    # Of the seen labels' rows only those that somebody borrows are copied.
    used_S, places_UK = (torch.from_numpy(each) for each in np.unique(found.ids, return_inverse=True))
    rows_SC = rows_LC[seen_L.nonzero().squeeze(1)[used_S.to(seen_L.device)]]
    places_UK = places_UK.view(found.ids.shape).to(seen_L.device)
    lengths_S1 = torch.linalg.vector_norm(rows_SC, dim=1, keepdim=True)
    directions_SC = functional.normalize(rows_SC, dim=1)
    return _Borrowed(
        *(functional.embedding_bag(places_UK, values, mode="mean") for values in (directions_SC, lengths_S1))
    )


def _borrow_over_ranks(
    meanings_LD: Tensor, rows_LC: Tensor, seen_L: Tensor, num_neighbours: int, ranks: Ranks
) -> _Borrowed | None:
    """The same over ranks: each searches its seen labels, and adds the rows of those it holds among the nearest."""
    seen_counts_R = ranks.concatenate(seen_L.sum()[None])
    unseen_counts_R = ranks.concatenate((~seen_L).sum()[None])
    num_neighbours = min(num_neighbours, int(seen_counts_R.sum()))
    if not num_neighbours or not int(unseen_counts_R.sum()):
        return None
    first = int(seen_counts_R[: ranks.rank].sum())
    seen_ids = np.arange(first, first + int(seen_L.sum()))
    unseen_VD = ranks.concatenate(meanings_LD[~seen_L])
    found = search_shards(unseen_VD, meanings_LD[seen_L], num_neighbours, label_ids=seen_ids, ranks=ranks)
    nearest_VK = found.ids - first
    held_VK = (nearest_VK >= 0) & (nearest_VK < len(seen_ids))
    # One row more, of zeros, stands for what others hold.
    places_VK = torch.from_numpy(np.where(held_VK, nearest_VK, len(seen_ids))).to(meanings_LD.device)
    rows_SC = functional.pad(rows_LC[seen_L], (0, 0, 0, 1))
    lengths_S1 = torch.linalg.vector_norm(rows_SC, dim=1, keepdim=True)
    sums_VC = functional.embedding_bag(
        places_VK, torch.cat([functional.normalize(rows_SC, dim=1), lengths_S1], dim=1), mode="sum"
    )
    own = slice(int(unseen_counts_R[: ranks.rank].sum()), int(unseen_counts_R[: ranks.rank + 1].sum()))
    means_UC = (ranks.sum(sums_VC) / num_neighbours)[own]
    return _Borrowed(means_UC[:, :-1], means_UC[:, -1:])


def _seen(counts_L: NDArray[np.integer], like_LD: Tensor) -> Tensor:
    """Which labels have training queries, on the device of their vectors."""
    if len(counts_L) != len(like_LD):
        raise UsageError(f"got training counts of {len(counts_L)} labels for {len(like_LD)} vectors: expected one each")
    return torch.from_numpy(np.asarray(counts_L) > 0).to(like_LD.device)
