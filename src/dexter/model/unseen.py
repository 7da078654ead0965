"""Classifier rows for labels without training queries: made from the label's text and its nearest trained labels.

Shapes: L labels, U of them unseen (without training queries), V unseen labels of all processes, K nearest labels,
S rows in use, D dimensions of the dual encoder, C of the classifier.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.encoders.head_arrays import unit_rows
from dexter.errors import UsageError
from dexter.index import place, search_shards
from dexter.processes import Processes, SingleProcess, concatenate_arrays, sum_arrays


def fill_unseen_rows(
    rows_LC: NDArray[np.float32],
    counts_L: NDArray[np.integer],
    *,
    texts_UC: NDArray[np.float32],
    label_vectors_LD: NDArray[np.float32],
    num_neighbours: int = 10,
    processes: Processes | None = None,
    device: str = "cpu",
) -> NDArray[np.float32]:
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
        device: where the nearest labels are searched.
    """
    if len(counts_L) != len(label_vectors_LD):
        raise UsageError(
            f"got training counts of {len(counts_L)} labels for {len(label_vectors_LD)} vectors: expected one each"
        )
    seen_L = np.asarray(counts_L) > 0
    filled_LC = np.where(seen_L[:, None], rows_LC, np.float32(0.0))
    vectors_LD = unit_rows(label_vectors_LD)
    means_UC = _neighbour_means(vectors_LD, filled_LC, seen_L, num_neighbours, processes or SingleProcess(), device)
    if means_UC is not None:
        directions_UC, lengths_U1 = means_UC[:, :-1], means_UC[:, -1:]
        filled_LC[~seen_L] = unit_rows(unit_rows(directions_UC) + unit_rows(texts_UC)) * lengths_U1
    return filled_LC


def _neighbour_means(
    vectors_LD: NDArray[np.float32],
    rows_LC: NDArray[np.float32],
    seen_L: NDArray[np.bool_],
    num_neighbours: int,
    processes: Processes,
    device: str,
) -> NDArray[np.float32] | None:
    """Mean direction and, as the last column, mean length of the rows of each unseen label's nearest seen labels.

    Every process searches among its own seen labels and adds the rows of those that are among the nearest of all.
    None if there is no seen or no unseen label.
    """
    num_seen, num_unseen = int(seen_L.sum()), int((~seen_L).sum())
    seen_counts, unseen_counts = concatenate_arrays(processes, np.array([[num_seen, num_unseen]])).T
    num_neighbours = min(num_neighbours, int(seen_counts.sum()))
    if not num_neighbours or not int(unseen_counts.sum()):
        return None
    first = int(seen_counts[: processes.rank].sum())
    found = search_shards(
        concatenate_arrays(processes, vectors_LD[~seen_L]),
        place(vectors_LD[seen_L], device),
        num_neighbours,
        label_ids=np.arange(first, first + num_seen),
        processes=processes,
    )
    nearest_VK = found.ids - first
    held_VK = (nearest_VK >= 0) & (nearest_VK < num_seen)
    # Only rows that are a neighbour of some label are copied.
    used_S, positions = np.unique(nearest_VK[held_VK], return_inverse=True)
    rows_SC = rows_LC[np.flatnonzero(seen_L)[used_S]]
    lengths_S1: NDArray[np.float32] = np.linalg.norm(rows_SC, axis=1, keepdims=True)
    row_starts = np.concatenate([[0], np.cumsum(held_VK.sum(axis=1))])
    chosen = csr_matrix((np.ones(len(positions), np.float32), positions, row_starts), shape=(len(held_VK), len(used_S)))
    sums_VC = chosen @ np.concatenate([unit_rows(rows_SC), lengths_S1], axis=1)
    start = int(unseen_counts[: processes.rank].sum())
    means_VC = (sum_arrays(processes, sums_VC) / num_neighbours).astype(np.float32)
    return means_VC[start : start + num_unseen]
