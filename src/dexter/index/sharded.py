"""Exact search over labels that several ranks hold: each rank searches its own, the results are merged by score.

Every rank brings the same queries and leaves with the same result, which is that of one search over all labels: equal
scores rank by id, as they do there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dexter.index.exact import search
from dexter.processes import Processes, SingleProcess, stack
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

ROWS_AT_ONCE = 2**16
"""Queries whose results are merged at a time: all ranks' results for them are in memory."""


def search_shards(
    queries_ND: Tensor,
    labels_LD: Tensor,
    k: int,
    *,
    label_ids: np.ndarray | None = None,
    processes: Processes | None = None,
    exclude: csr_matrix | None = None,
    **settings: Any,
) -> TopK:
    """The k best labels of all ranks for each query.

    Args:
        queries_ND: the queries, the same on every rank.
        labels_LD: the labels that this rank holds, perhaps none.
        k: labels per query.
        label_ids: the ids of the held labels among those of all ranks, ascending; their numbers if left out.
        processes: who holds the others; nobody if left out.
        exclude: queries x held labels; pairs that are never returned.
        settings: what else `dexter.index.search` takes.
    """
    processes = processes or SingleProcess()
    if processes.size == 1:
        return search(queries_ND, labels_LD, k, exclude=exclude, **settings)
    found = search(queries_ND, labels_LD, k, exclude=exclude, **settings)
    assert label_ids is not None
    ids_NK = np.append(label_ids, -1)[found.ids]
    parts = [
        _merged(processes, ids_NK[start : start + ROWS_AT_ONCE], found.scores[start : start + ROWS_AT_ONCE], k)
        for start in range(0, max(len(ids_NK), 1), ROWS_AT_ONCE)
    ]
    return TopK(np.concatenate([part.ids for part in parts]), np.concatenate([part.scores for part in parts]))


def _merged(processes: Processes, ids_NK: np.ndarray, scores_NK: np.ndarray, k: int) -> TopK:
    ids, scores = (
        stack(processes, torch.from_numpy(np.ascontiguousarray(values))).transpose(0, 1).flatten(1).numpy()
        for values in (ids_NK, scores_NK)
    )
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return TopK(np.take_along_axis(ids, order, axis=1), np.take_along_axis(scores, order, axis=1))
