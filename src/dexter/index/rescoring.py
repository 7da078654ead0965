"""Exact scores of candidates: each query with labels of its own.

faiss, where it is installed, does so without copying the labels' vectors, five times as fast as torch.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.errors import require

GATHERED_FLOATS = 2**19
"""Numbers of label vectors gathered at a time: they stay in cache."""


def score_candidates(queries_BD: Tensor, labels_LD: Tensor, labels_BW: NDArray[np.int64]) -> NDArray[np.float32]:
    """Inner products of queries and their labels, float32; minus infinity where the label is negative.

    The vectors are float32 on a CPU, each in one piece.
    """
    places_BW = np.maximum(labels_BW, 0)
    score = _with_faiss if importlib.util.find_spec("faiss") is not None else _with_torch
    scores_BW = score(queries_BD, labels_LD, places_BW)
    scores_BW[labels_BW < 0] = -np.inf
    return scores_BW


def _with_faiss(queries_BD: Tensor, labels_LD: Tensor, labels_BW: NDArray[np.int64]) -> NDArray[np.float32]:
    faiss = require("faiss", extra="ann", purpose="an approximate index")
    num_queries, num_candidates = labels_BW.shape
    scores_BW = np.empty((num_queries, num_candidates), dtype=np.float32)
    pointers = [faiss.swig_ptr(array) for array in (scores_BW, queries_BD.numpy(), labels_LD.numpy(), labels_BW)]
    faiss.fvec_inner_products_by_idx(*pointers, labels_LD.shape[1], num_queries, num_candidates)
    return scores_BW


def _with_torch(queries_BD: Tensor, labels_LD: Tensor, labels_BW: NDArray[np.int64]) -> NDArray[np.float32]:
    scores_BW = torch.empty(labels_BW.shape, dtype=torch.float32)
    size = max(1, GATHERED_FLOATS // (labels_BW.shape[1] * labels_LD.shape[1]))
    for start in range(0, len(queries_BD), size):
        part = slice(start, start + size)
        places = torch.from_numpy(labels_BW[part])
        gathered_BWD = labels_LD.index_select(0, places.flatten()).view(*places.shape, -1)
        scores_BW[part] = torch.bmm(gathered_BWD, queries_BD[part].unsqueeze(2)).squeeze(2)
    scores: NDArray[np.float32] = scores_BW.numpy()
    return scores
