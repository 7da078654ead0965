"""Build an index and measure it; load one and check that it fits."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.errors import ModelError, UsageError
from dexter.index.approximate import ApproximateIndex
from dexter.index.base import BackendName, Engine, Index, Place, Stamp, checked_backend
from dexter.index.exact import ExactIndex, search
from dexter.index.folder import StoredIndex, damaged, read_index
from dexter.index.recall import RECALL_AT, TARGET, check_recall, measure_recall, noisy_sample, sample

log = logging.getLogger("dexter")
DEPTHS = (4, 8, 16, 32)
"""Candidates per label asked for: the fewest that reach the wanted recall are taken."""


def build(
    backend: BackendName,
    vectors_LD: Tensor,
    *,
    queries_ND: Tensor | np.ndarray | None = None,
    place: Place | None = None,
) -> Index:
    """An index over label vectors; one that finds too little of what exact search finds is an error.

    Args:
        backend: its kind.
        vectors_LD: one vector per label.
        queries_ND: what recall is measured on, of which at most 512 are taken. Vectors of real queries say most; label
            vectors with some noise are taken if left out.
        place: where a database keeps the vectors (pgvector, qdrant).
    """
    if backend == "exact":
        return ExactIndex(vectors_LD)
    vectors_LD = vectors_LD.detach().to("cpu", torch.float32).contiguous()
    sample_ND = noisy_sample(vectors_LD) if queries_ND is None else sample(torch.as_tensor(queries_ND))
    started = time.perf_counter()
    engine = engine_of(backend).build(vectors_LD.numpy(), place=place)
    seconds = time.perf_counter() - started
    index = _deep_enough(backend, engine, vectors_LD, sample_ND)
    assert index.recall is not None
    log.info(
        "index %s: %s labels, built in %.1f s, recall@%d %.4f on %d queries with %d candidates per label",
        *(backend, f"{len(vectors_LD):,}", seconds, RECALL_AT, index.recall, len(sample_ND), index.depth),
    )
    check_recall(index)
    return index


@dataclass(frozen=True)
class OpenIndex:
    """An index read from a folder: an engine and whose labels it has. Labels may have changed since it was made."""

    folder: Path
    stored: StoredIndex
    backend: BackendName
    engine: Engine | None
    """None for exact search."""

    def over(self, vectors_LD: Tensor, *, stamp: Stamp) -> Index:
        """The index over the vectors of a model's labels as they are now.

        Labels that were added since it was made are searched exactly; those that were removed are left out.
        """
        _check_stamp(self.folder, self.stored, vectors_LD, stamp)
        if self.engine is None:
            return ExactIndex(vectors_LD)
        rows_L, gone = _match(self.stored, stamp.label_keys)
        num_new = int((rows_L < 0).sum())
        if num_new or len(gone):
            log.info(
                "index %s: %d labels are newer and searched exactly, %d are gone", self.backend, num_new, len(gone)
            )
        return ApproximateIndex(
            backend=self.backend,
            engine=self.engine,
            vectors_LD=vectors_LD.detach().to("cpu", torch.float32).contiguous(),
            rows_L=rows_L,
            depth=self.stored.depth,
            recall=self.stored.recall,
            gone=gone,
        )


def open_index(folder: Path, *, url: str | None = None) -> OpenIndex:
    """Read an index folder and start its engine; `url` is the address of the database, where it needs one."""
    stored = read_index(folder)
    backend = _backend_of(folder, stored)
    if backend == "exact":
        return OpenIndex(folder, stored, backend, None)
    place = None if url is None else Place(url=url, name="")
    engine = engine_of(backend).read(folder, stored.engine, dimension=stored.dimension, place=place)
    _check_rows(folder, stored, engine)
    return OpenIndex(folder, stored, backend, engine)


def load(folder: Path, vectors_LD: Tensor, *, stamp: Stamp, url: str | None = None) -> Index:
    """The index in a folder, over the vectors of a model's labels as they are now."""
    return open_index(folder, url=url).over(vectors_LD, stamp=stamp)


def engine_of(backend: BackendName) -> type[Engine]:
    """The engine behind a backend other than `exact`."""
    if backend == "pq":
        from dexter.index.pq import PQEngine

        return PQEngine
    if backend == "hnsw":
        from dexter.index.hnsw import HNSWEngine

        return HNSWEngine
    if backend == "pgvector":
        from dexter.index.pgvector import PgvectorEngine

        return PgvectorEngine
    if backend == "qdrant":
        from dexter.index.qdrant import QdrantEngine

        return QdrantEngine
    raise UsageError(f"the backend {backend!r} needs no engine")


def _deep_enough(backend: BackendName, engine: Engine, vectors_LD: Tensor, sample_ND: Tensor) -> ApproximateIndex:
    """The index with the fewest candidates that finds what it should, or else with the most."""
    wanted = search(sample_ND, vectors_LD, min(RECALL_AT, len(vectors_LD)))
    rows_L = np.arange(len(vectors_LD))
    for depth in (depth for depth in DEPTHS if depth * RECALL_AT <= engine.most_candidates):
        index = ApproximateIndex(backend=backend, engine=engine, vectors_LD=vectors_LD, rows_L=rows_L, depth=depth)
        recall = measure_recall(index, sample_ND, exact=wanted)
        if recall >= TARGET:
            break
    return ApproximateIndex(
        backend=backend, engine=engine, vectors_LD=vectors_LD, rows_L=rows_L, depth=depth, recall=recall
    )


def _backend_of(folder: Path, stored: StoredIndex) -> BackendName:
    try:
        return checked_backend(stored.backend)
    except UsageError as error:
        raise damaged(folder, str(error)) from None


def _check_stamp(folder: Path, stored: StoredIndex, vectors_LD: Tensor, stamp: Stamp) -> None:
    """Raise unless the index was made from vectors of this encoder and head."""
    if stored.fingerprint != stamp.fingerprint:
        raise ModelError(
            f"{folder}: made for another encoder ({stored.fingerprint}, the model has {stamp.fingerprint}): "
            "make it anew with `dexter index`, or search without it: --index exact"
        )
    if (stored.head, stored.dimension) != (stamp.head, vectors_LD.shape[1]):
        raise ModelError(
            f"{folder}: made for head {stored.head} with {stored.dimension} dimensions, got {stamp.head} with "
            f"{vectors_LD.shape[1]}: make it anew with `dexter index`, or search without it: --index exact"
        )


def _check_rows(folder: Path, stored: StoredIndex, engine: Engine) -> None:
    """Raise unless the rows are numbers of the engine's, each of them once."""
    rows = stored.rows
    if len(np.unique(rows)) != len(rows) or rows.min() < 0 or rows.max() >= engine.rows_end or stored.depth < 1:
        raise damaged(folder, "labels and vectors do not fit together")


def _match(stored: StoredIndex, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The engine's row of each label as it is now, -1 for new ones; and the rows that are nobody's any more."""
    if np.array_equal(stored.label_keys, keys):
        return stored.rows, stored.rows[:0]
    row_of_key = dict(zip(stored.label_keys.tolist(), stored.rows.tolist(), strict=True))
    rows_L = np.array([row_of_key.pop(key, -1) for key in keys.tolist()], dtype=np.int64)
    return rows_L, np.fromiter(row_of_key.values(), dtype=np.int64)
