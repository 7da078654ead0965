"""Two engines of faiss: product quantisation (`pq`) and a graph of near neighbours (`hnsw`).

`pq` keeps every label as half a byte per two dimensions and scans all of them with SIMD instructions. It loses little,
because the candidates are scored exactly afterwards. `hnsw` keeps one byte per dimension and walks a graph: fast for
single queries, slow to build.

Both are saved as plain arrays, so that no reader of a foreign format has to be trusted. A graph that is read is checked
link by link, because faiss follows links without checking them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, require
from dexter.index.base import DatabaseAddress, Engine, SavedEngine

_DIMENSIONS_PER_CODE, _BITS, _CENTROIDS = 2, 4, 16
_LINKS = 32
"""Links per vector and level; twice as many at the lowest."""
_BREADTH = 100
"""Candidates for links while building."""


class PQEngine(Engine):
    """Codes, and the scanner over them."""

    ARRAYS: ClassVar[Mapping[str, type[np.generic]]] = {"centroids": np.float32, "codes": np.uint8}
    MAX_CANDIDATES = 2**20

    def __init__(self, centroids_MCD: NDArray[np.float32], codes_LB: NDArray[np.uint8]) -> None:
        self._centroids_MCD, self._codes_LB = centroids_MCD, codes_LB
        self._scanner = _make_scanner(centroids_MCD, codes_LB)
        self.num_rows = len(codes_LB)

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, address: DatabaseAddress | None = None) -> Self:
        """Train the quantiser on a sample and encode every vector."""
        faiss = _require_faiss()
        padded = _pad_columns(vectors_LD, _DIMENSIONS_PER_CODE)
        num_codes = padded.shape[1] // _DIMENSIONS_PER_CODE
        quantizer = faiss.ProductQuantizer(padded.shape[1], num_codes, _BITS)
        # faiss warns on stderr where there are fewer training points than this per centroid.
        quantizer.cp.min_points_per_centroid = 1
        quantizer.train(_repeat_up_to(padded, _CENTROIDS))
        centroids = faiss.vector_to_array(quantizer.centroids).reshape(num_codes, _CENTROIDS, _DIMENSIONS_PER_CODE)
        return cls(centroids, quantizer.compute_codes(padded))

    @classmethod
    def restore(cls, saved: SavedEngine) -> Self:
        """Check the shapes and start the scanner."""
        centroids, codes = saved.arrays["centroids"], saved.arrays["codes"]
        num_codes = -(-saved.dimension // _DIMENSIONS_PER_CODE)
        fits = centroids.shape == (num_codes, _CENTROIDS, _DIMENSIONS_PER_CODE)
        if not fits or codes.ndim != 2 or codes.shape[1] != -(-num_codes // 2) or not len(codes):
            raise ModelError(f"shapes {centroids.shape} and {codes.shape} are not those of an index")
        return cls(centroids, codes)

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Return the rows whose codes score best."""
        padded = _pad_columns(queries_ND, _DIMENSIONS_PER_CODE)
        rows: NDArray[np.int64] = self._scanner.search(padded, num_candidates)[1]
        return rows

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return codes and centroids."""
        return {"centroids": self._centroids_MCD, "codes": self._codes_LB}


class HNSWEngine(Engine):
    """The graph of faiss."""

    ARRAYS: ClassVar[Mapping[str, type[np.generic]]] = {
        "neighbors": np.int32,
        "offsets": np.uint64,
        "levels": np.int32,
        "trained": np.float32,
        "codes": np.uint8,
        "entry": np.int32,
    }
    MAX_CANDIDATES = 2**16
    """With more candidates the walk through the graph would take longer than exact search."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.num_rows = int(graph.ntotal)

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, address: DatabaseAddress | None = None) -> Self:
        """Build the graph by inserting every vector."""
        graph = _empty_graph(vectors_LD.shape[1])
        graph.hnsw.efConstruction = _BREADTH
        graph.train(vectors_LD)
        graph.add(vectors_LD)
        return cls(graph)

    @classmethod
    def restore(cls, saved: SavedEngine) -> Self:
        """Check every link and fill an empty graph."""
        arrays, graph = saved.arrays, _empty_graph(saved.dimension)
        check_graph(arrays, saved.dimension, links_up_to_level(graph))
        faiss = _require_faiss()
        hnsw, storage = graph.hnsw, faiss.downcast_index(graph.storage)
        for name in ("neighbors", "offsets", "levels"):
            faiss.copy_array_to_vector(arrays[name], getattr(hnsw, name))
        hnsw.entry_point, hnsw.max_level = (int(value) for value in arrays["entry"])
        faiss.copy_array_to_vector(arrays["trained"], storage.sq.trained)
        faiss.copy_array_to_vector(arrays["codes"].ravel(), storage.codes)
        storage.ntotal = graph.ntotal = len(arrays["codes"])
        storage.is_trained = graph.is_trained = True
        return cls(graph)

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Return the rows that a walk of this breadth finds."""
        parameters = _require_faiss().SearchParametersHNSW(efSearch=num_candidates)
        rows: NDArray[np.int64] = self._graph.search(queries_ND, num_candidates, params=parameters)[1]
        return rows

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return links and codes."""
        faiss = _require_faiss()
        hnsw, storage = self._graph.hnsw, faiss.downcast_index(self._graph.storage)
        return {
            "neighbors": faiss.vector_to_array(hnsw.neighbors),
            "offsets": faiss.vector_to_array(hnsw.offsets),
            "levels": faiss.vector_to_array(hnsw.levels),
            "trained": faiss.vector_to_array(storage.sq.trained),
            "codes": faiss.vector_to_array(storage.codes).reshape(self.num_rows, self._graph.d),
            "entry": np.array([hnsw.entry_point, hnsw.max_level], dtype=np.int32),
        }


def check_graph(arrays: Mapping[str, NDArray[Any]], dimension: int, ends: NDArray[np.int64]) -> None:
    """Raise unless every array has its size and every link leads to a vector of its level.

    `ends` comes from `links_up_to_level`.
    """
    codes, levels, neighbors = arrays["codes"], arrays["levels"], arrays["neighbors"]
    size = len(levels)
    is_flat = all(arrays[name].ndim == 1 for name in ("neighbors", "offsets", "levels", "trained", "entry"))
    if not is_flat or size == 0 or codes.shape != (size, dimension) or arrays["trained"].size != 2 * dimension:
        raise ModelError("the arrays are not those of one graph")
    if levels.min() < 1 or levels.max() >= len(ends):
        raise ModelError("a vector is on a level that does not exist")
    offsets = np.concatenate([[0], np.cumsum(ends[levels])]).astype(np.uint64)
    if not np.array_equal(arrays["offsets"], offsets) or len(neighbors) != offsets[-1]:
        raise ModelError("the links of a vector are not where they should be")
    if neighbors.min() < -1 or neighbors.max() >= size:
        raise ModelError("a link leads to no vector")
    entry = arrays["entry"]
    if entry.shape != (2,) or not 0 <= entry[0] < size or not levels[entry[0]] == levels.max() == entry[1] + 1:
        raise ModelError("the graph has no valid entry point")
    for level in range(1, int(levels.max())):
        members = np.flatnonzero(levels > level)
        places = offsets[members].astype(np.int64)[:, None] + np.arange(ends[level], ends[level + 1])
        linked = neighbors[places]
        if (levels[linked[linked >= 0]] <= level).any():
            raise ModelError(f"a link of level {level} leads below it")


def links_up_to_level(graph: Any) -> NDArray[np.int64]:
    """Return how many links a vector has on its lowest 0, 1, 2, ... levels together."""
    ends: NDArray[np.int32] = _require_faiss().vector_to_array(graph.hnsw.cum_nneighbor_per_level)
    return ends.astype(np.int64)


def _require_faiss() -> Any:
    return require("faiss", extra="ann", purpose="an approximate index")


def _empty_graph(dimension: int) -> Any:
    faiss = _require_faiss()
    return faiss.IndexHNSWSQ(dimension, faiss.ScalarQuantizer.QT_8bit, _LINKS, faiss.METRIC_INNER_PRODUCT)


def _make_scanner(centroids_MCD: NDArray[np.float32], codes_LB: NDArray[np.uint8]) -> Any:
    """Build faiss's fast-scan index over codes in their plain layout."""
    faiss = _require_faiss()
    num_codes = len(centroids_MCD)
    plain = faiss.IndexPQ(num_codes * _DIMENSIONS_PER_CODE, num_codes, _BITS, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.ascontiguousarray(centroids_MCD).ravel(), plain.pq.centroids)
    faiss.copy_array_to_vector(np.ascontiguousarray(codes_LB).ravel(), plain.codes)
    plain.ntotal, plain.is_trained = len(codes_LB), True
    return faiss.IndexPQFastScan(plain)


def _pad_columns(vectors_ND: NDArray[np.float32], multiple: int) -> NDArray[np.float32]:
    """Append zeros to every vector, up to a multiple of a width; inner products stay as they are."""
    missing = -vectors_ND.shape[1] % multiple
    padded = np.pad(vectors_ND, ((0, 0), (0, missing))) if missing else vectors_ND
    return np.ascontiguousarray(padded, dtype=np.float32)


def _repeat_up_to(vectors_ND: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Repeat the vectors until there are at least `count` of them."""
    return np.concatenate([vectors_ND] * -(-count // len(vectors_ND))) if len(vectors_ND) < count else vectors_ND
