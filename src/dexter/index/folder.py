"""Build an index, save it as a folder, and open it again over the labels as they are now.

    index.json           format version, backend, encoder's fingerprint, head, sizes, measured recall, engine's values
    labels.safetensors   a hash of every label's id and text, in the order of the engine's rows
    engine.safetensors   the engine's arrays; absent for exact search and for databases
    MANIFEST.json        SHA-256 of every file, written last

No file is handed to a library that trusts what it reads: tensors are safetensors, and their values are checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, UsageError
from dexter.files import atomic_folder, verified, write_json
from dexter.index.approximate import RECALL_AT, ApproximateIndex, build_measured
from dexter.index.base import BackendName, DatabaseAddress, Engine, Index, SavedEngine, Stamp, checked_backend
from dexter.index.exact import ExactIndex

log = logging.getLogger("dexter")
FORMAT_VERSION = 1
_DESCRIPTION, _LABELS, _ENGINE = "index.json", "labels.safetensors", "engine.safetensors"
_REMEDY = "make the index anew with `dexter index`"


def build(
    backend: BackendName,
    vectors_LD: NDArray[np.float32],
    *,
    queries_ND: NDArray[np.float32] | None = None,
    address: DatabaseAddress | None = None,
) -> Index:
    """Build an index over label vectors; raise where it finds too little of what exact search finds.

    Args:
        backend: which kind of index.
        vectors_LD: one vector per label.
        queries_ND: vectors to measure recall on, of which at most 512 are used. Those of real queries say most; label
            vectors with added noise are used if left out.
        address: where a database keeps the vectors (pgvector, qdrant).
    """
    if backend == "exact":
        return ExactIndex(vectors_LD)
    vectors_LD = np.ascontiguousarray(vectors_LD, dtype=np.float32)
    started = time.perf_counter()
    engine = engine_class(backend).build(vectors_LD, address=address)
    seconds = time.perf_counter() - started
    index = build_measured(backend, engine, vectors_LD, queries_ND=queries_ND)
    log.info(
        "index %s: %s labels, built in %.1f s, recall@%d %.4f with %d candidates per label",
        *(backend, f"{len(vectors_LD):,}", seconds, RECALL_AT, index.recall, index.depth),
    )
    return index


def save_index(index: Index, folder: Path, *, stamp: Stamp) -> None:
    """Write a newly built index as a folder, whole or not at all; an older one in its place is replaced."""
    from safetensors.numpy import save_file

    num_labels, dimension = index.vectors_LD.shape
    assert len(stamp.label_keys) == num_labels, "one key per label"
    approximate = index if isinstance(index, ApproximateIndex) else None
    assert approximate is None or approximate.engine.num_rows == num_labels, "the engine has every label"
    with atomic_folder(folder, replace=True) as temporary:
        save_file({"keys": stamp.label_keys}, temporary / _LABELS)
        if approximate is not None and (arrays := approximate.engine.arrays()):
            save_file(arrays, temporary / _ENGINE)
        description = {
            "format_version": FORMAT_VERSION,
            "backend": index.backend,
            "fingerprint": stamp.fingerprint,
            "head": stamp.head,
            "num_labels": num_labels,
            "dimension": dimension,
            "recall": index.recall,
            "depth": 0 if approximate is None else approximate.depth,
            "engine": {} if approximate is None else approximate.engine.describe(),
        }
        write_json(temporary / _DESCRIPTION, description)


@dataclass(frozen=True, kw_only=True)
class StoredIndex:
    """An index read from a folder: an engine, and the labels that it was built from."""

    folder: Path
    backend: BackendName
    stamp: Stamp
    dimension: int
    recall: float
    depth: int
    engine: Engine | None
    """None for exact search."""

    def over(self, vectors_LD: NDArray[np.float32], *, stamp: Stamp) -> Index:
        """Return the index over the label vectors of a model as they are now.

        Labels that were added since the index was built are searched exactly; removed ones are left out.
        """
        self._check_stamp(vectors_LD, stamp)
        if self.engine is None:
            return ExactIndex(vectors_LD)
        rows_L = _find_rows(self.stamp.label_keys, stamp.label_keys)
        num_new = int((rows_L < 0).sum())
        num_removed = self.engine.num_rows - (len(rows_L) - num_new)
        if num_new or num_removed:
            log.info(
                "index %s: %d labels were added since and are searched exactly, %d were removed",
                *(self.backend, num_new, num_removed),
            )
        return ApproximateIndex(
            backend=self.backend,
            engine=self.engine,
            vectors_LD=np.ascontiguousarray(vectors_LD, dtype=np.float32),
            rows_L=rows_L,
            depth=self.depth,
            recall=self.recall,
        )

    def _check_stamp(self, vectors_LD: NDArray[np.float32], stamp: Stamp) -> None:
        """Raise unless the index was built from vectors of this encoder and head."""
        remedy = f"{_REMEDY}, or search without it: --index exact"
        if self.stamp.fingerprint != stamp.fingerprint:
            raise ModelError(
                f"{self.folder}: made for another encoder ({self.stamp.fingerprint}, the model has "
                f"{stamp.fingerprint}): {remedy}"
            )
        if (self.stamp.head, self.dimension) != (stamp.head, vectors_LD.shape[1]):
            raise ModelError(
                f"{self.folder}: made for head {self.stamp.head} with {self.dimension} dimensions, got {stamp.head} "
                f"with {vectors_LD.shape[1]}: {remedy}"
            )


def open_index(folder: Path, *, url: str | None = None) -> StoredIndex:
    """Read an index folder, after checking every file, and start its engine.

    Args:
        folder: where `save_index` wrote it.
        url: address of the database, where the backend needs one.
    """
    with verified(folder) as view:
        described = _read_description(view / _DESCRIPTION)
        keys = _read_tensors(view / _LABELS, {"keys": np.int64})["keys"]
        kind = None if described.backend == "exact" else engine_class(described.backend)
        arrays = _read_tensors(view / _ENGINE, kind.ARRAYS) if kind is not None and kind.ARRAYS else {}
    if keys.shape != (described.num_labels,):
        raise ModelError(f"{folder / _LABELS}: expected {described.num_labels} labels: {_REMEDY}")
    engine = None
    if kind is not None:  # only now: the arrays are the ones of the manifest
        try:
            engine = kind.restore(SavedEngine(arrays, described.engine, described.dimension, url))
        except ModelError as error:
            raise ModelError(f"{folder}: {error}: {_REMEDY}") from None
        if engine.num_rows != described.num_labels:
            raise ModelError(f"{folder}: {described.num_labels} labels, and {engine.num_rows} vectors: {_REMEDY}")
    return StoredIndex(
        folder=folder,
        backend=described.backend,
        stamp=Stamp(fingerprint=described.fingerprint, head=described.head, label_keys=keys),
        dimension=described.dimension,
        recall=described.recall,
        depth=described.depth,
        engine=engine,
    )


class _Description(NamedTuple):
    """What the description of an index says."""

    backend: BackendName
    num_labels: int
    dimension: int
    depth: int
    recall: float
    fingerprint: str
    head: str
    engine: dict[str, Any]


def _read_description(path: Path) -> _Description:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["format_version"]
        if version != FORMAT_VERSION:
            raise ModelError(f"{path}: format version {version!r}, this program reads {FORMAT_VERSION}: {_REMEDY}")
        backend = checked_backend(str(found["backend"]))
        return _Description(
            backend=backend,
            num_labels=_checked_number(found["num_labels"], at_least=1),
            dimension=_checked_number(found["dimension"], at_least=1),
            depth=_checked_number(found["depth"], at_least=0 if backend == "exact" else 1),
            recall=float(found["recall"]),
            fingerprint=str(found["fingerprint"]),
            head=str(found["head"]),
            engine=dict(found["engine"]),
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: not the description of an index ({error!r}): {_REMEDY}") from None


def label_keys(ids: Sequence[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """Hash each label's id and text, so that a label is recognised wherever it stands among others."""
    digests = (
        hashlib.blake2b(f"{label_id}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for label_id, text in zip(ids, texts, strict=True)
    )
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def engine_class(backend: BackendName) -> type[Engine]:
    """Import and return the engine behind a backend other than `exact`."""
    if backend == "pq":
        from dexter.index.faiss_engines import PQEngine

        return PQEngine
    if backend == "hnsw":
        from dexter.index.faiss_engines import HNSWEngine

        return HNSWEngine
    if backend == "pgvector":
        from dexter.index.pgvector import PgvectorEngine

        return PgvectorEngine
    if backend == "qdrant":
        from dexter.index.qdrant import QdrantEngine

        return QdrantEngine
    raise UsageError(f"the backend {backend!r} needs no engine")


def _read_tensors(path: Path, kinds: Mapping[str, type[np.generic]]) -> dict[str, NDArray[Any]]:
    """Read the tensors of a file, which must have exactly these names and types and finite values."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"{path}: missing or damaged ({error}): {_REMEDY}") from None
    found = {name: array.dtype for name, array in tensors.items()}
    if found != {name: np.dtype(kind) for name, kind in kinds.items()}:
        raise ModelError(f"{path}: expected {', '.join(kinds)}, got {', '.join(found) or 'nothing'}: {_REMEDY}")
    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ModelError(f"{path}: {name} holds values that are not finite: {_REMEDY}")
    return tensors


def _find_rows(stored_keys: NDArray[np.int64], keys_L: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the engine's row of each label; -1 for labels that were not there when the index was built."""
    if np.array_equal(stored_keys, keys_L):
        return np.arange(len(keys_L))
    row_of_key = {key: row for row, key in enumerate(stored_keys.tolist())}
    return np.array([row_of_key.pop(key, -1) for key in keys_L.tolist()], dtype=np.int64)


def _checked_number(value: object, *, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{value!r} is not a number of {at_least} or more")
    return value
