"""Classifier rows for labels without training queries: made from the label's text and its nearest trained labels.

Shapes: L labels, U of them unseen (without training queries), V unseen labels of all processes, K nearest labels,
S rows in use, D dimensions of the dual encoder, C of the classifier.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dexter.errors import UsageError
from dexter.index import search_shards
from dexter.processes import Processes, SingleProcess


@torch.no_grad()
def fill_unseen_rows(
    rows_LC: Tensor,
    counts_L: NDArray[np.integer],
    *,
    texts_UC: Tensor,
    label_vectors_LD: Tensor,
    num_neighbours: int = 10,
    processes: Processes | None = None,
) -> Tensor:
    """Return the classifier rows of all labels with those of unseen labels filled in: [L, C].

    The direction of a filled row is the mean of two directions: that of the label's own text, and the mean direction
    of the rows of its nearest seen labels. Its length is the mean length of those rows. Either direction alone finds
    fewer unseen labels (bench/unseen_labels.py). Rows of seen labels are unchanged. If no label was seen, the rows of
    unseen labels are zero.

    Args:
        rows_LC: classifier rows of all labels; those of unseen labels are not read.
        counts_L: number of training queries of each label; 0 for an unseen label.
        texts_UC: the classifier head's output for the texts of the unseen labels, in order.
        label_vectors_LD: the dual encoder's vectors of all labels, without the label prior.
        num_neighbours: number of nearest seen labels to average over.
        processes: the processes that hold the other labels, if any; neighbours come from all of them.
    """
    if len(counts_L) != len(label_vectors_LD):
        raise UsageError(
            f"got training counts of {len(counts_L)} labels for {len(label_vectors_LD)} vectors: expected one each"
        )
    seen_L = torch.from_numpy(np.asarray(counts_L) > 0).to(label_vectors_LD.device)
    filled_LC = rows_LC.to(label_vectors_LD).masked_fill(~seen_L[:, None], 0.0)
    vectors_LD = functional.normalize(label_vectors_LD, dim=1)
    means_UC = _neighbour_means(vectors_LD, filled_LC, seen_L, num_neighbours, processes or SingleProcess())
    if means_UC is not None:
        directions_UC, lengths_U1 = means_UC[:, :-1], means_UC[:, -1:]
        directions_UC = functional.normalize(directions_UC, dim=1) + functional.normalize(texts_UC, dim=1)
        filled_LC[~seen_L] = functional.normalize(directions_UC, dim=1) * lengths_U1
    return filled_LC


def _neighbour_means(
    vectors_LD: Tensor, rows_LC: Tensor, seen_L: Tensor, num_neighbours: int, processes: Processes
) -> Tensor | None:
    """Mean direction and, as the last column, mean length of the rows of each unseen label's nearest seen labels.

    Every process searches among its own seen labels and adds the rows of those that are among the nearest of all.
    None if there is no seen or no unseen label.
    """
    seen_counts = processes.concatenate(seen_L.sum()[None])
    unseen_counts = processes.concatenate((~seen_L).sum()[None])
    num_neighbours = min(num_neighbours, int(seen_counts.sum()))
    if not num_neighbours or not int(unseen_counts.sum()):
        return None
    first, num_seen = int(seen_counts[: processes.rank].sum()), int(seen_L.sum())
    found = search_shards(
        processes.concatenate(vectors_LD[~seen_L]),
        vectors_LD[seen_L],
        num_neighbours,
        label_ids=np.arange(first, first + num_seen),
        processes=processes,
    )
    nearest_VK = found.ids - first
    held_VK = (nearest_VK >= 0) & (nearest_VK < num_seen)
    # Only rows that are a neighbour of some label are copied. Position 0 is a row of zeros: labels of other processes.
    used_S, positions_V = np.unique(nearest_VK[held_VK], return_inverse=True)
    positions_VK = np.zeros(nearest_VK.shape, dtype=np.int64)
    positions_VK[held_VK] = positions_V + 1
    used_rows = seen_L.nonzero().squeeze(1)[torch.from_numpy(used_S).to(seen_L.device)]
    rows_SC = functional.pad(rows_LC[used_rows], (0, 0, 1, 0))
    lengths_S1 = torch.linalg.vector_norm(rows_SC, dim=1, keepdim=True)
    sums_VC = functional.embedding_bag(
        torch.from_numpy(positions_VK).to(rows_LC.device),
        torch.cat([functional.normalize(rows_SC, dim=1), lengths_S1], dim=1),
        mode="sum",
    )
    start = int(unseen_counts[: processes.rank].sum())
    return (processes.sum(sums_VC) / num_neighbours)[start : start + int((~seen_L).sum())]
