"""Approximate search: an engine names candidates, which are then scored exactly.

Scores and the order of ties are therefore those of exact search; only a label that the engine did not name can be
missing. Labels that were added after the engine was built are all candidates. A query that is left with too few
candidates, because many are excluded or removed, is searched exactly.

Recall, the share of the exact best labels that are found, is measured when an index is built.

Shapes: N queries, L labels, D dimensions, B queries in a block, W candidates per query.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, require
from dexter.index.base import BackendName, Engine, Index
from dexter.index.exact import (
    NOT_A_NUMBER,
    check_arguments,
    columns_of,
    largest,
    make_keys,
    scores_of,
    search,
)
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

MIN_PLACES = 25
"""Candidates are fetched as if at least this many labels were wanted: fetching fewer is not faster."""
MAX_EXCLUDED_RATIO = 4
"""A query with more excluded labels than this many times its places is searched exactly."""
BLOCK = 1_024
"""Queries per call of an engine."""
DEPTHS = (4, 8, 16, 32)
"""Candidates per wanted label that are tried, until recall reaches `TARGET_RECALL`."""
RECALL_AT = 100
"""Labels per query over which recall is measured."""
MIN_RECALL = 0.98
"""An index with a lower recall is refused."""
TARGET_RECALL = 0.99
_MAX_SAMPLED = 512
"""Queries that recall is measured on."""
_GATHERED_FLOATS = 2**19
"""Numbers of label vectors gathered at a time, so that they stay in cache."""


@dataclass(frozen=True, kw_only=True)
class ApproximateIndex:
    """An engine, and the label vectors that its candidates are scored with."""

    backend: BackendName
    engine: Engine
    vectors_LD: NDArray[np.float32]
    """Contiguous."""
    rows_L: NDArray[np.int64]
    """The engine's row of each label; -1 for labels added after the engine was built."""
    depth: int
    """Candidates per wanted label."""
    recall: float | None = None

    @cached_property
    def _label_of_row(self) -> NDArray[np.int64]:
        """The label of each of the engine's rows; -1 where it was removed, and in one more row at the end."""
        indexed = np.flatnonzero(self.rows_L >= 0)
        labels = np.full(self.engine.num_rows + 1, -1, dtype=np.int64)
        labels[self.rows_L[indexed]] = indexed
        return labels

    @cached_property
    def _unindexed_labels(self) -> NDArray[np.int64]:
        """Labels that the engine does not have."""
        return np.flatnonzero(self.rows_L < 0)

    @cached_property
    def _num_removed(self) -> int:
        """Rows of the engine whose labels were removed."""
        return self.engine.num_rows - (len(self.rows_L) - len(self._unindexed_labels))

    def search(
        self,
        queries_ND: NDArray[np.float32],
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: NDArray[np.float32] | None = None,
    ) -> TopK:
        """Return the k best labels of each query among the candidates."""
        queries_ND = np.ascontiguousarray(queries_ND, dtype=np.float32)
        check_arguments(queries_ND, self.vectors_LD, k, exclude, ceiling)
        parts = [slice(start, start + BLOCK) for start in range(0, len(queries_ND), BLOCK)]
        found = [
            self._search_block(
                queries_ND[part],
                k,
                None if exclude is None else exclude[part],
                None if ceiling is None else ceiling[part],
            )
            for part in parts
        ]
        if not found:
            return search(queries_ND, self.vectors_LD, k)
        return TopK(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))

    def _search_block(
        self,
        queries_BD: NDArray[np.float32],
        k: int,
        exclude: csr_matrix | None,
        ceiling: NDArray[np.float32] | None,
    ) -> TopK:
        places = max(k, MIN_PLACES)
        num_excluded_B = np.zeros(len(queries_BD), dtype=np.int64) if exclude is None else np.diff(exclude.indptr)
        # A query with very many excluded labels must not make all the others fetch as many candidates.
        is_crowded_B = num_excluded_B > MAX_EXCLUDED_RATIO * places
        wanted = (places + int(num_excluded_B[~is_crowded_B].max(initial=0))) * self.depth
        width = min(wanted + min(self._num_removed, wanted), self.engine.MAX_CANDIDATES)
        if width < k or width >= len(self.vectors_LD) - len(self._unindexed_labels):
            return search(queries_BD, self.vectors_LD, k, exclude=exclude, ceiling=ceiling)
        scores_BW, labels_BW = self._score_candidates(queries_BD, width, exclude, ceiling)
        best = make_keys(scores_BW, np.maximum(labels_BW, 0))
        if len(self._unindexed_labels):
            best = np.concatenate([best, self._search_unindexed(queries_BD, k, exclude, ceiling)], axis=1)
        best = np.sort(largest(best, k), axis=1)[:, ::-1]
        scores = scores_of(best)
        found = TopK(np.where(scores == -np.inf, -1, columns_of(best)), scores)
        # Engines are least reliable about the last candidates: a query that may use fewer than half is searched again.
        is_short_B = (scores_BW > -np.inf).sum(axis=1) < max(k, width // 2)
        again = np.flatnonzero(is_crowded_B | is_short_B)
        if len(again):
            found.ids[again], found.scores[again] = search(
                queries_BD[again],
                self.vectors_LD,
                found.ids.shape[1],
                exclude=None if exclude is None else exclude[again],
                ceiling=None if ceiling is None else ceiling[again],
            )
        return found

    def _score_candidates(
        self,
        queries_BD: NDArray[np.float32],
        width: int,
        exclude: csr_matrix | None,
        ceiling: NDArray[np.float32] | None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and labels of the candidates; those removed, excluded or above the ceiling score -inf."""
        rows_BW = self.engine.candidates(queries_BD, width)
        is_row_BW = (rows_BW >= 0) & (rows_BW < self.engine.num_rows)
        labels_BW = self._label_of_row[np.where(is_row_BW, rows_BW, -1)]
        scores_BW = score_pairs(queries_BD, self.vectors_LD, labels_BW)
        if np.isnan(scores_BW).any():
            raise ModelError(NOT_A_NUMBER)
        if exclude is not None:
            scores_BW[_is_stored(exclude, labels_BW)] = -np.inf
        if ceiling is not None:
            scores_BW[scores_BW > ceiling[:, None]] = -np.inf
        return scores_BW, labels_BW

    def _search_unindexed(
        self,
        queries_BD: NDArray[np.float32],
        k: int,
        exclude: csr_matrix | None,
        ceiling: NDArray[np.float32] | None,
    ) -> NDArray[np.int64]:
        """Return keys of the best labels among those that the engine does not have."""
        unindexed = self._unindexed_labels
        found = search(
            queries_BD,
            self.vectors_LD[unindexed],
            min(k, len(unindexed)),
            exclude=None if exclude is None else exclude[:, unindexed],
            ceiling=ceiling,
        )
        labels = unindexed[np.maximum(found.ids, 0)]
        return make_keys(found.scores, labels)


def build_measured(
    backend: BackendName,
    engine: Engine,
    vectors_LD: NDArray[np.float32],
    *,
    queries_ND: NDArray[np.float32] | None = None,
) -> ApproximateIndex:
    """Return the index with the fewest candidates that reach `TARGET_RECALL`, or else with the most.

    A recall below `MIN_RECALL` is a `ModelError`. Without `queries_ND` recall is measured on label vectors with noise.
    """
    sample_ND = _noisy_sample(vectors_LD) if queries_ND is None else _sample(queries_ND)
    exact = search(sample_ND, vectors_LD, min(RECALL_AT, len(vectors_LD)))
    rows_L = np.arange(len(vectors_LD))
    recall = 0.0
    for depth in (depth for depth in DEPTHS if depth * RECALL_AT <= engine.MAX_CANDIDATES):
        index = ApproximateIndex(backend=backend, engine=engine, vectors_LD=vectors_LD, rows_L=rows_L, depth=depth)
        recall = measure_recall(index, sample_ND, exact=exact)
        if recall >= TARGET_RECALL:
            break
    if recall < MIN_RECALL:
        raise ModelError(
            f"index {backend}: recall@{RECALL_AT} is {recall:.4f} against exact search, expected {MIN_RECALL} or "
            "more: choose another backend; `exact` always finds everything"
        )
    return ApproximateIndex(
        backend=backend, engine=engine, vectors_LD=vectors_LD, rows_L=rows_L, depth=depth, recall=recall
    )


def measure_recall(index: Index, queries_ND: NDArray[np.float32], *, exact: TopK) -> float:
    """Return the share of the best labels that an index finds; a label of equal score counts as found.

    `exact` holds what exact search finds for the same queries.
    """
    found = index.search(queries_ND, exact.ids.shape[1])
    # Two orders of summation differ in the last bits, in proportion to the largest scores.
    tolerance = 1e-5 * np.abs(exact.scores).max(axis=1, keepdims=True)
    return float((found.scores >= exact.scores[:, -1:] - tolerance).mean())


def score_pairs(
    queries_BD: NDArray[np.float32], vectors_LD: NDArray[np.float32], labels_BW: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the inner products of each query with labels of its own; minus infinity where the label is negative.

    The vectors are contiguous. faiss, where it is installed, does this without copying the label vectors, several times
    as fast.
    """
    score = _score_with_faiss if importlib.util.find_spec("faiss") is not None else _score_gathered
    scores_BW = score(queries_BD, vectors_LD, np.maximum(labels_BW, 0))
    scores_BW[labels_BW < 0] = -np.inf
    return scores_BW


def _score_with_faiss(
    queries_BD: NDArray[np.float32], vectors_LD: NDArray[np.float32], labels_BW: NDArray[np.int64]
) -> NDArray[np.float32]:
    faiss = require("faiss", extra="ann", purpose="an approximate index")
    num_queries, num_candidates = labels_BW.shape
    scores_BW = np.empty((num_queries, num_candidates), dtype=np.float32)
    pointers = [faiss.swig_ptr(array) for array in (scores_BW, queries_BD, vectors_LD, labels_BW)]
    faiss.fvec_inner_products_by_idx(*pointers, vectors_LD.shape[1], num_queries, num_candidates)
    return scores_BW


def _score_gathered(
    queries_BD: NDArray[np.float32], vectors_LD: NDArray[np.float32], labels_BW: NDArray[np.int64]
) -> NDArray[np.float32]:
    scores_BW = np.empty(labels_BW.shape, dtype=np.float32)
    size = max(1, _GATHERED_FLOATS // (labels_BW.shape[1] * vectors_LD.shape[1]))
    for start in range(0, len(queries_BD), size):
        part = slice(start, start + size)
        scores_BW[part] = np.matmul(vectors_LD[labels_BW[part]], queries_BD[part, :, None])[:, :, 0]
    return scores_BW


def _is_stored(pairs: csr_matrix, labels_BW: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell for each label whether a sparse matrix has an entry for it in the same row."""
    num_rows, num_labels = pairs.shape
    rows = np.repeat(np.arange(num_rows, dtype=np.int64), np.diff(pairs.indptr))
    stored = np.sort(rows * num_labels + pairs.indices)
    if not len(stored):
        return np.zeros(labels_BW.shape, dtype=np.bool_)
    keys_BW = np.arange(num_rows, dtype=np.int64)[:, None] * num_labels + labels_BW
    places = np.minimum(np.searchsorted(stored, keys_BW), len(stored) - 1)
    return np.asarray((stored[places] == keys_BW) & (labels_BW >= 0), dtype=np.bool_)


def _sample(vectors_ND: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return at most `_MAX_SAMPLED` of the vectors, evenly spread."""
    step = max(1, len(vectors_ND) // _MAX_SAMPLED)
    return np.ascontiguousarray(vectors_ND[::step][:_MAX_SAMPLED], dtype=np.float32)


def _noisy_sample(vectors_LD: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return some of the label vectors with noise of a third of their length, in place of queries."""
    sample_ND = _sample(vectors_LD)
    noise_ND = np.random.default_rng(0).standard_normal(sample_ND.shape, dtype=np.float32)
    lengths_N1: NDArray[np.float32] = np.linalg.norm(sample_ND, axis=1, keepdims=True)
    return sample_ND + noise_ND * lengths_N1 / np.float32(3 * math.sqrt(sample_ND.shape[1]))
