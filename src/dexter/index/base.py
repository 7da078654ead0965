"""What an index is, which there are, and which one a number of labels asks for.

An index ranks labels by inner product with a query. Labels are positions 0 to L - 1, in the order of the vectors that
the index was built from; `add` appends, `remove` closes ranks. Both return another index and leave the old one as it
was, so that a search under way in another thread never sees half a change.

    build   `dexter.index.build`: measured against exact search, refused below the bar
    load    `dexter.index.load`: refused where files are damaged or belong to another encoder

`ExactIndex` looks at every label. `ApproximateIndex` asks an *engine* for candidates and scores those exactly; an
engine knows vectors by row numbers of its own, that are never used twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from dexter.types import TopK

BackendName = Literal["exact", "pq", "hnsw", "pgvector", "qdrant"]
BACKENDS: tuple[BackendName, ...] = ("exact", "pq", "hnsw", "pgvector", "qdrant")
EXACT_UP_TO = 200_000
"""Labels up to which exact search is the default: it is as quick as anything until about there (bench/index.py)."""


class Index(Protocol):
    """Ranks labels by inner product."""

    @property
    def backend(self) -> BackendName:
        """Its kind."""
        ...

    @property
    def recall(self) -> float | None:
        """The share of the exact 100 best labels that it finds, as measured when it was built; None: not measured."""
        ...

    @property
    def vectors_LD(self) -> Tensor:
        """The labels' vectors."""
        ...

    def search(
        self,
        queries_ND: Tensor | np.ndarray,
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: np.ndarray | None = None,
    ) -> TopK:
        """The k best labels of each query; arguments as in `dexter.index.search`."""
        ...

    def add(self, vectors_MD: Tensor) -> Index:
        """The index with more labels at the end."""
        ...

    def remove(self, positions: NDArray[np.int64]) -> Index:
        """The index without some labels; the others keep their order."""
        ...

    def save(self, folder: Path, *, stamp: Stamp) -> None:
        """Write it as a folder, whole or not at all; an older one in its place is replaced."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """Whose vectors an index holds."""

    fingerprint: str
    """Of the encoder that made them."""
    head: str
    """Of the model, whose vectors were indexed."""
    label_keys: NDArray[np.int64]
    """A hash of each label's id and text, in the order of the vectors."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an engine outside this process keeps vectors."""

    url: str
    """Address of the server, or the folder of Qdrant's local mode."""
    name: str
    """Of the table or collection."""


class Engine(Protocol):
    """Finds rows whose vectors have large inner products with a query, quickly and not always all of them."""

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, place: Place | None = None) -> Self:
        """An engine over vectors, whose rows are 0 to L - 1."""
        ...

    @classmethod
    def read(cls, folder: Path, described: dict[str, Any], *, dimension: int, place: Place | None = None) -> Self:
        """The engine that `write` wrote, which returned `described`; damage is a `ModelError`."""
        ...

    @property
    def rows_end(self) -> int:
        """Every row is below this number."""
        ...

    @property
    def most_candidates(self) -> int:
        """How many candidates it can be asked for."""
        ...

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Rows for each query in any order; -1 where there are fewer."""
        ...

    def write(self, folder: Path) -> dict[str, Any]:
        """Put its files into a folder and return what else `read` needs."""
        ...


@runtime_checkable
class StoringEngine(Protocol):
    """An engine whose rows live in a database and can change one by one."""

    def change(self, gone: NDArray[np.int64], vectors_MD: NDArray[np.float32]) -> NDArray[np.int64]:
        """Delete some rows and insert vectors; returns the rows of these."""
        ...


def default_backend(num_labels: int) -> BackendName:
    """Exact search as long as it is quick, then product quantisation."""
    return "exact" if num_labels <= EXACT_UP_TO else "pq"


def checked_backend(name: str) -> BackendName:
    """A backend's name, or an error that lists them."""
    for known in BACKENDS:
        if name == known:
            return known
    raise UsageError(f"unknown index backend {name!r}: expected one of {', '.join(BACKENDS)}")
