"""How good a model is now: embed, search, score the validation queries. The same search that serves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from dexter.data import Split
from dexter.index import search_shards
from dexter.metrics import overfetch, remove_filtered, score
from dexter.processes import Processes


def validate(
    queries_ND: Tensor,
    labels_LD: Tensor,
    split: Split,
    train_relevance: csr_matrix,
    *,
    cut_off: int,
    label_ids: NDArray[np.int64] | None = None,
    processes: Processes | None = None,
) -> dict[str, float]:
    """Metrics at 1, 3, 5 and at the cut-off that decides; `labels_LD` are those that this rank holds."""
    ks = sorted({1, 3, 5, cut_off} & set(range(1, split.num_labels + 1)))
    extra = overfetch(split.filtered) if split.filtered is not None else 0
    found = search_shards(
        queries_ND, labels_LD, min(max(ks) + extra, split.num_labels), label_ids=label_ids, processes=processes
    )
    top_ids = found.ids
    if split.filtered is not None:
        top_ids = remove_filtered(found.ids, found.scores, split.filtered, max(ks)).ids
    return score(top_ids, split.relevance, train_relevance, ks=ks)
