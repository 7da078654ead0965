"""An index as a folder: what it is and whose labels it holds, beside the files of its engine.

    index.json           format version, backend, encoder's fingerprint, head, sizes, measured recall, the engine's own
    labels.safetensors   a hash of every label's id and text, and the engine's row of it (-1: none)
    *.safetensors        the engine's own
    MANIFEST.json        SHA-256 of every file, written last

No file is handed to a library that trusts what it reads: tensors are safetensors, and their values are checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError
from dexter.files import atomic_folder, verify_manifest, write_json

if TYPE_CHECKING:
    from dexter.index.base import Index, Stamp

FORMAT_VERSION = 1
_DESCRIPTION, _LABELS = "index.json", "labels.safetensors"


@dataclass(frozen=True)
class StoredIndex:
    """What an index folder says, checked as far as one can without its engine."""

    backend: str
    fingerprint: str
    head: str
    num_labels: int
    dimension: int
    recall: float
    depth: int
    engine: dict[str, Any]
    label_keys: NDArray[np.int64]
    rows: NDArray[np.int64]


def label_keys(ids: Sequence[str], texts: Sequence[str]) -> NDArray[np.int64]:
    """A hash of each label: the same label has the same key wherever it stands among others."""
    digests = (
        hashlib.blake2b(f"{label_id}\0{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for label_id, text in zip(ids, texts, strict=True)
    )
    return np.frombuffer(b"".join(digests), dtype="<i8").astype(np.int64)


def write_index(
    folder: Path,
    index: Index,
    *,
    stamp: Stamp,
    depth: int = 0,
    rows: NDArray[np.int64] | None = None,
    write_engine: Callable[[Path], Mapping[str, Any]] | None = None,
) -> None:
    """Write an index folder, whole or not at all; an older one in its place is replaced."""
    from safetensors.numpy import save_file

    num_labels, dimension = index.vectors_LD.shape
    assert len(stamp.label_keys) == num_labels, "one key per label"
    with atomic_folder(folder, replace=True) as temporary:
        engine = dict(write_engine(temporary)) if write_engine is not None else {}
        rows = np.full(num_labels, -1, dtype=np.int64) if rows is None else rows
        save_file({"keys": stamp.label_keys, "rows": rows}, temporary / _LABELS)
        described = {
            "format_version": FORMAT_VERSION,
            "backend": index.backend,
            "fingerprint": stamp.fingerprint,
            "head": stamp.head,
            "num_labels": num_labels,
            "dimension": dimension,
            "recall": index.recall,
            "depth": depth,
            "engine": engine,
        }
        write_json(temporary / _DESCRIPTION, described)


def read_index(folder: Path) -> StoredIndex:
    """Read what an index folder says, after checking every file against the manifest."""
    verify_manifest(folder)
    path = folder / _DESCRIPTION
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        version = described["format_version"]
        if version != FORMAT_VERSION:
            raise ModelError(f"{path}: format version {version!r}, this program reads {FORMAT_VERSION}: {_REMEDY}")
        tensors = read_tensors(folder / _LABELS, {"keys": np.int64, "rows": np.int64})
        stored = StoredIndex(
            backend=str(described["backend"]),
            fingerprint=str(described["fingerprint"]),
            head=str(described["head"]),
            num_labels=_number(described["num_labels"], at_least=1),
            dimension=_number(described["dimension"], at_least=1),
            recall=float(described["recall"]),
            depth=_number(described["depth"], at_least=0),
            engine=dict(described["engine"]),
            label_keys=tensors["keys"],
            rows=tensors["rows"],
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: not the description of an index ({error!r}): {_REMEDY}") from None
    if stored.label_keys.shape != (stored.num_labels,) or stored.rows.shape != (stored.num_labels,):
        raise ModelError(f"{folder / _LABELS}: expected {stored.num_labels} labels: {_REMEDY}")
    return stored


_REMEDY = "make the index anew with `dexter index`"


def read_tensors(path: Path, kinds: Mapping[str, type[np.generic]]) -> dict[str, NDArray[Any]]:
    """The tensors of a file, which must be these, of these types, and finite."""
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


def damaged(folder: Path, what: str) -> ModelError:
    """The error for an engine whose files contradict each other."""
    return ModelError(f"{folder}: {what}: {_REMEDY}")


def _number(value: object, *, at_least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{value!r} is not a number of {at_least} or more")
    return value
