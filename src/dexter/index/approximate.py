"""Approximate search: an engine names candidates, and these are scored exactly.

Scores and the order of ties are therefore those of exact search; only a label that the engine did not name is missing.
Labels that the engine does not know (added since it was built) are all candidates. A query that is left with too few
labels, because many are excluded or removed, is searched exactly.

Shapes: N queries, L labels, D dimensions, B queries in a block, W candidates, T labels that the engine does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.errors import ModelError
from dexter.index.base import BackendName, Engine, Stamp, StoringEngine
from dexter.index.exact import check_arguments, kept_positions, search
from dexter.index.folder import write_index
from dexter.index.keys import columns_of, largest, make_keys, scores_of
from dexter.index.recall import check_recall, measure_recall, noisy_sample
from dexter.index.rescoring import score_candidates
from dexter.types import TopK

if TYPE_CHECKING:
    from pathlib import Path

    from scipy.sparse import csr_matrix

FEWEST_PLACES = 25
"""Candidates are fetched as if at least so many labels were asked for: the first few are found in the same breath."""
CROWD = 4
"""A query with more excluded labels than so many times its places is searched exactly."""
BLOCK = 1_024
"""Queries that an engine is asked at a time."""


@dataclass(frozen=True, kw_only=True)
class ApproximateIndex:
    """An engine, and the vectors and rows of the labels."""

    backend: BackendName
    engine: Engine
    vectors_LD: Tensor
    """float32 on a CPU."""
    rows_L: NDArray[np.int64]
    """The engine's row of each label; -1 where it has none."""
    depth: int
    """Candidates per label asked for."""
    recall: float | None = None
    gone: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The engine's rows of removed labels."""

    @cached_property
    def _label_of_row(self) -> NDArray[np.int64]:
        """The label of each of the engine's rows; -1 where it was removed."""
        known = np.flatnonzero(self.rows_L >= 0)
        labels = np.full(int(self.rows_L.max(initial=-1)) + 1, -1, dtype=np.int64)
        labels[self.rows_L[known]] = known
        return labels

    @cached_property
    def _strangers(self) -> NDArray[np.int64]:
        """The labels that the engine does not know."""
        return np.flatnonzero(self.rows_L < 0)

    def search(
        self,
        queries_ND: Tensor | np.ndarray,
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: np.ndarray | None = None,
    ) -> TopK:
        """The k best labels of each query among the candidates."""
        queries_ND = torch.as_tensor(queries_ND).to("cpu", torch.float32).contiguous()
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

    def add(self, vectors_MD: Tensor) -> ApproximateIndex:
        """The index with more labels at the end; the engine does not know them until the index is saved."""
        vectors_LD = torch.cat([self.vectors_LD, vectors_MD.to(self.vectors_LD)])
        rows_L = np.concatenate([self.rows_L, np.full(len(vectors_MD), -1, dtype=np.int64)])
        return replace(self, vectors_LD=vectors_LD, rows_L=rows_L)

    def remove(self, positions: NDArray[np.int64]) -> ApproximateIndex:
        """The index without some labels; the engine forgets them when the index is saved."""
        keep = kept_positions(len(self.vectors_LD), positions)
        rows = self.rows_L[np.unique(positions)]
        gone = np.concatenate([self.gone, rows[rows >= 0]])
        return replace(self, vectors_LD=self.vectors_LD[keep], rows_L=self.rows_L[keep.numpy()], gone=gone)

    def save(self, folder: Path, *, stamp: Stamp) -> None:
        """Write it as a folder, after the engine has taken in the labels that were added and removed.

        Recall is then measured anew, beside some of the labels.
        """
        whole = self
        if len(self.gone) or len(self._strangers):
            whole = self._settled()
            whole = replace(whole, recall=measure_recall(whole, noisy_sample(self.vectors_LD)))
            check_recall(whole)
        write_index(folder, whole, stamp=stamp, depth=whole.depth, rows=whole.rows_L, write_engine=whole.engine.write)

    def _settled(self) -> ApproximateIndex:
        """The same labels, all of them known to the engine."""
        vectors_LD = self.vectors_LD.numpy()
        if not isinstance(self.engine, StoringEngine):
            engine = type(self.engine).build(vectors_LD)
            return replace(self, engine=engine, rows_L=np.arange(len(vectors_LD)), gone=self.gone[:0])
        rows_L, strangers = self.rows_L.copy(), self._strangers
        rows_L[strangers] = self.engine.change(self.gone, vectors_LD[strangers])
        return replace(self, rows_L=rows_L, gone=self.gone[:0])

    def _search_block(
        self, queries_BD: Tensor, k: int, exclude: csr_matrix | None, ceiling: NDArray[np.float32] | None
    ) -> TopK:
        places = max(k, FEWEST_PLACES)
        num_excluded_B = np.zeros(len(queries_BD), dtype=np.int64) if exclude is None else np.diff(exclude.indptr)
        # A query with very many excluded labels is searched exactly; it shall not make all the others fetch as many.
        crowded_B = num_excluded_B > CROWD * places
        wanted = (places + int(num_excluded_B[~crowded_B].max(initial=0))) * self.depth
        width = min(wanted + min(len(self.gone), wanted), self.engine.most_candidates)
        if width < k or width >= len(self.vectors_LD) - len(self._strangers):
            return search(queries_BD, self.vectors_LD, k, exclude=exclude, ceiling=ceiling)
        scores_BW, labels_BW = self._candidates(queries_BD, width, exclude, ceiling)
        best = make_keys(torch.from_numpy(scores_BW), torch.from_numpy(np.maximum(labels_BW, 0)))
        if len(self._strangers):
            best = torch.cat([best, self._keys_of_strangers(queries_BD, k, exclude, ceiling)], dim=1)
        best = largest(best, k).sort(dim=1, descending=True).values
        scores = scores_of(best).numpy()
        found = TopK(np.where(scores == -np.inf, -1, columns_of(best).numpy()), scores)
        # The last candidates are the least sure: where the first half is not allowed, what is left is not good enough.
        thin_B = (scores_BW > -np.inf).sum(axis=1) < max(k, width // 2)
        self._search_again(found, np.flatnonzero(crowded_B | thin_B), queries_BD, exclude, ceiling)
        return found

    def _search_again(
        self,
        found: TopK,
        rows: NDArray[np.int64],
        queries_BD: Tensor,
        exclude: csr_matrix | None,
        ceiling: NDArray[np.float32] | None,
    ) -> None:
        """Put what exact search finds in place of some rows."""
        if len(rows):
            found.ids[rows], found.scores[rows] = search(
                queries_BD[torch.from_numpy(rows)],
                self.vectors_LD,
                found.ids.shape[1],
                exclude=None if exclude is None else exclude[rows],
                ceiling=None if ceiling is None else ceiling[rows],
            )

    def _candidates(
        self, queries_BD: Tensor, width: int, exclude: csr_matrix | None, ceiling: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Scores and labels of what the engine names; what is removed, excluded or above the ceiling scores -inf."""
        rows_BW = self.engine.candidates(queries_BD.numpy(), width)
        # A row beyond those of the labels, or -1, is nobody's.
        known = np.append(self._label_of_row, -1)
        labels_BW = known[np.where((rows_BW < 0) | (rows_BW >= len(known)), -1, rows_BW)]
        scores_BW = score_candidates(queries_BD, self.vectors_LD, labels_BW)
        if np.isnan(scores_BW).any():
            raise ModelError("search met a score that is not a number: check the query and label vectors for NaN")
        if exclude is not None:
            scores_BW[_stored(exclude, labels_BW)] = -np.inf
        if ceiling is not None:
            scores_BW[scores_BW > ceiling[:, None]] = -np.inf
        return scores_BW, labels_BW

    def _keys_of_strangers(
        self, queries_BD: Tensor, k: int, exclude: csr_matrix | None, ceiling: NDArray[np.float32] | None
    ) -> Tensor:
        """The best labels among those that the engine does not know."""
        strangers = self._strangers
        found = search(
            queries_BD,
            self.vectors_LD[torch.from_numpy(strangers)],
            min(k, len(strangers)),
            exclude=None if exclude is None else exclude[:, strangers],
            ceiling=ceiling,
        )
        labels = strangers[np.maximum(found.ids, 0)]
        return make_keys(torch.from_numpy(found.scores), torch.from_numpy(labels))


def _stored(exclude: csr_matrix, labels_BW: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these labels a sparse matrix has an entry for, in the same row."""
    num_rows, num_labels = exclude.shape
    rows = np.repeat(np.arange(num_rows, dtype=np.int64), np.diff(exclude.indptr))
    pairs = np.sort(rows * num_labels + exclude.indices)
    asked = np.arange(num_rows, dtype=np.int64)[:, None] * num_labels + labels_BW
    if not len(pairs):
        return np.zeros(labels_BW.shape, dtype=np.bool_)
    places = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    found: Any = (pairs[places] == asked) & (labels_BW >= 0)
    return np.asarray(found, dtype=np.bool_)
