"""A graph of near neighbours (HNSW), its vectors kept as one byte per dimension.

faiss builds and walks the graph; the files are plain arrays, and a graph that is read is checked link by link, because
faiss follows links without looking. Quick for single queries; slow to build.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dexter.index.base import Place
from dexter.index.folder import damaged, read_tensors
from dexter.index.pq import require_faiss

_FILE = "hnsw.safetensors"
_LINKS = 32
"""Links per vector and level; twice as many at the lowest."""
_BREADTH = 100
"""Candidates for links while building."""
_MOST_CANDIDATES = 2**16
_ARRAYS: dict[str, type[np.generic]] = {
    "neighbors": np.int32,
    "offsets": np.uint64,
    "levels": np.int32,
    "trained": np.float32,
    "codes": np.uint8,
    "entry": np.int32,
}


class HNSWEngine:
    """The graph of faiss."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, place: Place | None = None) -> Self:
        """Build the graph by inserting every vector."""
        graph = _empty_graph(vectors_LD.shape[1])
        graph.hnsw.efConstruction = _BREADTH
        graph.train(vectors_LD)
        graph.add(vectors_LD)
        return cls(graph)

    @classmethod
    def read(cls, folder: Path, described: dict[str, Any], *, dimension: int, place: Place | None = None) -> Self:
        """Read the graph, and check that every link leads somewhere."""
        arrays = read_tensors(folder / _FILE, _ARRAYS)
        graph = _empty_graph(dimension)
        problem = _find_problem(arrays, dimension, _ends_of_levels(graph))
        if problem is not None:
            raise damaged(folder / _FILE, problem)
        _fill(graph, arrays)
        return cls(graph)

    @property
    def rows_end(self) -> int:
        """Every row is below this number."""
        return int(self._graph.ntotal)

    @property
    def most_candidates(self) -> int:
        """More make no sense: the walk through the graph would take longer than exact search."""
        return _MOST_CANDIDATES

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """The rows that a walk of this breadth meets."""
        parameters = require_faiss().SearchParametersHNSW(efSearch=num_candidates)
        rows: NDArray[np.int64] = self._graph.search(queries_ND, num_candidates, params=parameters)[1]
        return rows

    def write(self, folder: Path) -> dict[str, Any]:
        """Write links and codes."""
        from safetensors.numpy import save_file

        save_file(_arrays_of(self._graph), folder / _FILE)
        return {}


def _empty_graph(dimension: int) -> Any:
    faiss = require_faiss()
    return faiss.IndexHNSWSQ(dimension, faiss.ScalarQuantizer.QT_8bit, _LINKS, faiss.METRIC_INNER_PRODUCT)


def _arrays_of(graph: Any) -> dict[str, NDArray[Any]]:
    faiss = require_faiss()
    hnsw, storage = graph.hnsw, faiss.downcast_index(graph.storage)
    return {
        "neighbors": faiss.vector_to_array(hnsw.neighbors),
        "offsets": faiss.vector_to_array(hnsw.offsets),
        "levels": faiss.vector_to_array(hnsw.levels),
        "trained": faiss.vector_to_array(storage.sq.trained),
        "codes": faiss.vector_to_array(storage.codes).reshape(graph.ntotal, graph.d),
        "entry": np.array([hnsw.entry_point, hnsw.max_level], dtype=np.int32),
    }


def _fill(graph: Any, arrays: dict[str, NDArray[Any]]) -> None:
    faiss = require_faiss()
    hnsw, storage = graph.hnsw, faiss.downcast_index(graph.storage)
    for name in ("neighbors", "offsets", "levels"):
        faiss.copy_array_to_vector(arrays[name], getattr(hnsw, name))
    hnsw.entry_point, hnsw.max_level = (int(value) for value in arrays["entry"])
    faiss.copy_array_to_vector(arrays["trained"], storage.sq.trained)
    faiss.copy_array_to_vector(arrays["codes"].ravel(), storage.codes)
    storage.ntotal = graph.ntotal = len(arrays["codes"])
    storage.is_trained = graph.is_trained = True


def _ends_of_levels(graph: Any) -> NDArray[np.int64]:
    """How many links a vector has on its lowest levels together: none, the first, the first two, ..."""
    ends: NDArray[np.int32] = require_faiss().vector_to_array(graph.hnsw.cum_nneighbor_per_level)
    return ends.astype(np.int64)


def _find_problem(arrays: dict[str, NDArray[Any]], dimension: int, ends: NDArray[np.int64]) -> str | None:
    """What is wrong with a graph, if anything: every array has its size, every link leads to a vector of its level."""
    codes, levels, neighbors = arrays["codes"], arrays["levels"], arrays["neighbors"]
    size = len(levels)
    flat = all(arrays[name].ndim == 1 for name in ("neighbors", "offsets", "levels", "trained", "entry"))
    if not flat or size == 0 or codes.shape != (size, dimension) or arrays["trained"].size != 2 * dimension:
        return "the arrays are not those of one graph"
    if levels.min() < 1 or levels.max() >= len(ends):
        return "a vector is on a level that does not exist"
    offsets = np.concatenate([[0], np.cumsum(ends[levels])]).astype(np.uint64)
    if not np.array_equal(arrays["offsets"], offsets) or len(neighbors) != offsets[-1]:
        return "the links of a vector are not where they should be"
    if neighbors.min() < -1 or neighbors.max() >= size:
        return "a link leads to no vector"
    entry = arrays["entry"]
    if entry.shape != (2,) or not 0 <= entry[0] < size or not levels[entry[0]] == levels.max() == entry[1] + 1:
        return "there is no way into the graph"
    for level in range(1, int(levels.max())):
        there = np.flatnonzero(levels > level)
        places = offsets[there].astype(np.int64)[:, None] + np.arange(ends[level], ends[level + 1])
        linked = neighbors[places]
        if (levels[linked[linked >= 0]] <= level).any():
            return f"a link of level {level} leads below it"
    return None
