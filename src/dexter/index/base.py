"""The contract of an index: which backends there are, what each can do, and whose vectors it holds.

An index ranks labels by their inner product with a query. Labels are positions 0 to L - 1, in the order of the vectors
that the index was built from. `dexter.index.folder` builds, saves and opens one.

`ExactIndex` scores every label. `ApproximateIndex` asks an *engine* for candidates and scores those exactly. The row
numbers of an engine are the positions of the labels when the index was built.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, UsageError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from dexter.types import TopK

BackendName = Literal["exact", "pq", "hnsw", "pgvector", "qdrant"]
BACKENDS: tuple[BackendName, ...] = ("exact", "pq", "hnsw", "pgvector", "qdrant")
EXACT_UP_TO = 200_000
"""Number of labels up to which exact search is the default: below it, no other backend is faster (bench/index.py)."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,50}")
_MAX_ROWS = 2**40


class Index(Protocol):
    """Ranks labels by inner product."""

    @property
    def backend(self) -> BackendName:
        """Name of the backend."""
        ...

    @property
    def recall(self) -> float | None:
        """Share of the exact 100 best labels that it finds, as measured when it was built; None: not measured."""
        ...

    @property
    def vectors_LD(self) -> NDArray[np.float32]:
        """The label vectors."""
        ...

    def search(
        self,
        queries_ND: NDArray[np.float32],
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: NDArray[np.float32] | None = None,
    ) -> TopK:
        """Return the k best labels of each query; arguments as in `dexter.index.search`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Whose vectors an index holds."""

    fingerprint: str
    """Fingerprint of the encoder that made the vectors."""
    head: str
    """Model head whose vectors were indexed."""
    label_keys: NDArray[np.int64]
    """A hash of each label's id and text, in the order of the vectors."""


@dataclass(frozen=True, kw_only=True)
class DatabaseAddress:
    """Where a database keeps the vectors of an index.

    The URL is never written to a file: it may hold a password, and a folder that somebody else made must not decide
    which server is called.
    """

    url: str
    """Address of the server, or the folder of Qdrant's local mode."""
    name: str
    """Name of the table or collection."""


class SavedEngine(NamedTuple):
    """What an index folder holds of an engine, and where its database is."""

    arrays: Mapping[str, NDArray[Any]]
    description: Mapping[str, Any]
    dimension: int
    """Of the vectors."""
    url: str | None
    """Address of the database; from the caller, never from the folder."""


class Engine(ABC):
    """Finds rows whose vectors have large inner products with a query; fast, and may miss some."""

    ARRAYS: ClassVar[Mapping[str, type[np.generic]]] = {}
    """Name and type of each array that `arrays` returns; empty for a database."""
    MAX_CANDIDATES: ClassVar[int]
    """Largest number of candidates per query that it can return."""
    num_rows: int
    """Number of vectors."""

    @classmethod
    @abstractmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, address: DatabaseAddress | None = None) -> Self:
        """Build an engine whose rows are 0 to L - 1."""

    @classmethod
    @abstractmethod
    def restore(cls, saved: SavedEngine) -> Self:
        """Rebuild the engine from what `arrays` and `describe` returned; raise `ModelError` where they do not fit."""

    @abstractmethod
    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Return rows for each query in any order; -1 where there are fewer."""

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to save."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return plain values to save beside the arrays."""
        return {}


def default_backend(num_labels: int) -> BackendName:
    """Return `exact` as long as that is fast, then product quantisation."""
    return "exact" if num_labels <= EXACT_UP_TO else "pq"


def checked_backend(name: str) -> BackendName:
    """Return a backend's name, or raise an error that lists them."""
    for known in BACKENDS:
        if name == known:
            return known
    raise UsageError(f"unknown index backend {name!r}: expected one of {', '.join(BACKENDS)}")


def checked_address(address: DatabaseAddress | None, *, backend: str, example: str) -> DatabaseAddress:
    """Return the address; raise where it is missing, or where the name is not one that dexter gives."""
    if address is None or not address.url:
        raise UsageError(
            f"the backend {backend} needs the address of a server: give --url {example}, or set DEXTER_INDEX_URL"
        )
    if not _NAME.fullmatch(address.name):
        raise ModelError(f"{address.name!r} is not the name of a table or collection of dexter")
    return address


def read_table_description(description: Mapping[str, Any]) -> tuple[str, int]:
    """Return the name of the table or collection and its number of rows, from a database engine's `describe`."""
    name, num_rows = description.get("name"), description.get("num_rows")
    if not isinstance(name, str) or not isinstance(num_rows, int) or not 0 < num_rows <= _MAX_ROWS:
        raise ModelError("does not name the table that holds its vectors")
    return name, num_rows
