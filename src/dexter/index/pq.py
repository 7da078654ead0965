"""Product quantisation: every label as half a byte per two dimensions, all of them scanned with SIMD instructions.

faiss trains the quantiser and scans; the files are plain arrays, so that no reader of a foreign format has to be
trusted. A scan of codes takes a fraction of the time of exact search and loses little, because the candidates are
scored exactly afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dexter.errors import require
from dexter.index.base import Place
from dexter.index.folder import damaged, read_tensors

_FILE = "pq.safetensors"
_DIMENSIONS_PER_CODE, _BITS, _CENTROIDS = 2, 4, 16
_MOST_CANDIDATES = 2**20


class PQEngine:
    """Codes and the scanner over them."""

    def __init__(self, centroids_MCD: NDArray[np.float32], codes_LB: NDArray[np.uint8]) -> None:
        self.centroids_MCD, self.codes_LB = centroids_MCD, codes_LB
        self._scanner = _make_scanner(centroids_MCD, codes_LB)

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, place: Place | None = None) -> Self:
        """Train the quantiser on a sample and encode every vector."""
        faiss = require_faiss()
        padded = pad_columns(vectors_LD, _DIMENSIONS_PER_CODE)
        num_codes = padded.shape[1] // _DIMENSIONS_PER_CODE
        quantizer = faiss.ProductQuantizer(padded.shape[1], num_codes, _BITS)
        # faiss warns on stderr where there are fewer training points than this per centroid.
        quantizer.cp.min_points_per_centroid = 1
        quantizer.train(_at_least(padded, _CENTROIDS))
        centroids = faiss.vector_to_array(quantizer.centroids).reshape(num_codes, _CENTROIDS, _DIMENSIONS_PER_CODE)
        return cls(centroids, quantizer.compute_codes(padded))

    @classmethod
    def read(cls, folder: Path, described: dict[str, Any], *, dimension: int, place: Place | None = None) -> Self:
        """Read codes and centroids."""
        tensors = read_tensors(folder / _FILE, {"centroids": np.float32, "codes": np.uint8})
        centroids, codes = tensors["centroids"], tensors["codes"]
        num_codes = -(-dimension // _DIMENSIONS_PER_CODE)
        fits = centroids.shape == (num_codes, _CENTROIDS, _DIMENSIONS_PER_CODE)
        if not fits or codes.ndim != 2 or codes.shape[1] != -(-num_codes // 2) or not len(codes):
            raise damaged(folder / _FILE, f"shapes {centroids.shape} and {codes.shape} are not those of an index")
        return cls(centroids, codes)

    @property
    def rows_end(self) -> int:
        """Every row is below this number."""
        return len(self.codes_LB)

    @property
    def most_candidates(self) -> int:
        """As many as one likes, within reason."""
        return _MOST_CANDIDATES

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """The rows whose codes score best."""
        padded = pad_columns(queries_ND, _DIMENSIONS_PER_CODE)
        rows: NDArray[np.int64] = self._scanner.search(padded, num_candidates)[1]
        return rows

    def write(self, folder: Path) -> dict[str, Any]:
        """Write codes and centroids."""
        from safetensors.numpy import save_file

        save_file({"centroids": self.centroids_MCD, "codes": self.codes_LB}, folder / _FILE)
        return {}


def require_faiss() -> Any:
    """The library, or an error that names its extra."""
    return require("faiss", extra="ann", purpose="an approximate index")


def pad_columns(vectors_ND: NDArray[np.float32], multiple: int) -> NDArray[np.float32]:
    """Zeros behind every vector, up to a multiple of a width: inner products stay as they are."""
    missing = -vectors_ND.shape[1] % multiple
    padded = np.pad(vectors_ND, ((0, 0), (0, missing))) if missing else vectors_ND
    return np.ascontiguousarray(padded, dtype=np.float32)


def _at_least(vectors_ND: NDArray[np.float32], num: int) -> NDArray[np.float32]:
    """The vectors, repeated where there are fewer than there are centroids."""
    return np.concatenate([vectors_ND] * -(-num // len(vectors_ND))) if len(vectors_ND) < num else vectors_ND


def _make_scanner(centroids_MCD: NDArray[np.float32], codes_LB: NDArray[np.uint8]) -> Any:
    """The fast-scan index of faiss over codes in their plain layout."""
    faiss = require_faiss()
    num_codes = len(centroids_MCD)
    plain = faiss.IndexPQ(num_codes * _DIMENSIONS_PER_CODE, num_codes, _BITS, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.ascontiguousarray(centroids_MCD).ravel(), plain.pq.centroids)
    faiss.copy_array_to_vector(np.ascontiguousarray(codes_LB).ravel(), plain.codes)
    plain.ntotal, plain.is_trained = len(codes_LB), True
    return faiss.IndexPQFastScan(plain)
