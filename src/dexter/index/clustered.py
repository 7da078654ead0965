"""Search among clusters, an inverted file: a query is compared with the vectors of the clusters nearest to it only.

Vectors of length one are put into clusters by spherical k-means, about four times the square root of their number, and
stored cluster by cluster. A query is compared with the centroids, then with whole clusters, the nearest first, until a
number of vectors was read. That number is chosen when the clusters are made: enough that `TARGET_RECALL` of the nearest
of a sample are found. Many queries read the same clusters as each of them alone, so that a text has the same neighbours
alone and among others.

Vectors may be stored in half precision. Those of a cluster are widened when it is first read, so that the first query
of a process waits for few of them.

Shapes: M vectors, C clusters, D dimensions, B queries, W vectors that are read, K places, S sampled vectors, P pairs
of a query and a cluster that is read for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError
from dexter.index.exact import (
    FEW,
    NOT_A_NUMBER,
    best_of_one,
    check_arguments,
    join_rows,
    largest,
    make_keys,
    nothing_found,
    search,
    slices,
    write_found,
)
from dexter.index.prefix import largest_scores
from dexter.types import TopK

TARGET_RECALL = 0.97
"""Share of the nearest vectors that are found, in the sample that decides how many are read."""
RECALL_AT = 20
"""Nearest vectors that this is measured over."""
FEWEST = 4_096
"""Fewer vectors than this are not worth clusters."""
_MOST_READ = 0.25
"""Clusters of which a query reads more than this share are slower than comparing it with every vector."""
_READ_PER_PLACE = 32
"""Vectors that are read at least for each one wanted."""
_SAMPLED_PER_CLUSTER, _ITERATIONS, _SAMPLED = 32, 4, 256
"""Vectors from which the centroids are learned, and how often; vectors by which recall is measured."""
_BLOCK, _BLOCK_QUERIES = 4_096, 256
"""Vectors that are put into clusters at a time, and queries that are searched together."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusteredIndex:
    """Vectors in clusters."""

    centroids_CD: NDArray[np.float32]
    starts: NDArray[np.int64]
    """Where each cluster begins, and the end of the last."""
    rows_M: NDArray[np.integer]
    """The row of each stored vector among those that the clusters were made from."""
    stored_MD: NDArray[Any]
    """The vectors, cluster by cluster, in half or single precision."""
    num_read: int
    """Vectors that a query is compared with at least, unless more are wanted."""
    recall: float
    """Share of the 20 nearest that are found, by a sample of the vectors themselves."""

    @classmethod
    def of(cls, vectors_MD: NDArray[np.float32], *, seed: int = 0) -> ClusteredIndex:
        """Make clusters of vectors of length one; takes about as long as searching a thousand of them."""
        generator, num_vectors = np.random.default_rng(seed), len(vectors_MD)
        centroids_CD = _learn_centroids(vectors_MD, 4 * math.isqrt(num_vectors), generator)
        owners_M = _nearest_centroids(vectors_MD, centroids_CD)
        used, owners_M = np.unique(owners_M, return_inverse=True)
        rows_M = np.argsort(owners_M, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(owners_M))])
        sample_SD = vectors_MD[np.sort(generator.choice(num_vectors, min(_SAMPLED, num_vectors), replace=False))]
        # The nearest of a sampled vector is that itself.
        nearest = search(sample_SD, vectors_MD, min(RECALL_AT + 1, num_vectors)).ids[:, 1:]
        order_SC = np.argsort(sample_SD @ -centroids_CD[used].T, axis=1, kind="stable")
        # A cluster is read if the nearer ones have fewer vectors than are to be read.
        sizes_SC, needed_SC = np.diff(starts)[order_SC], np.empty(order_SC.shape, dtype=np.int64)
        np.put_along_axis(needed_SC, order_SC, np.cumsum(sizes_SC, axis=1) - sizes_SC + 1, axis=1)
        needed_SK = np.take_along_axis(needed_SC, owners_M[nearest], axis=1)
        num_read = int(np.quantile(needed_SK, TARGET_RECALL, method="higher"))
        return cls(
            centroids_CD=centroids_CD[used],
            starts=starts,
            rows_M=rows_M.astype(np.int32),
            stored_MD=vectors_MD[rows_M],
            num_read=num_read,
            recall=float((needed_SK <= num_read).mean()),
        )

    @classmethod
    def are_worthwhile(cls, vectors_MD: NDArray[np.float32], *, seed: int = 0) -> bool:
        """Whether a query would read few enough of the vectors, judged by a sample of them."""
        if len(vectors_MD) < FEWEST:
            return False
        rows = np.random.default_rng(seed).choice(len(vectors_MD), FEWEST, replace=False)
        return cls.of(vectors_MD[np.sort(rows)], seed=seed).num_read <= _MOST_READ * FEWEST

    def vectors(self, rows: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return the vectors of some rows."""
        return np.asarray(self.stored_MD[self._places_M[rows]], dtype=np.float32)

    @property
    def vectors_LD(self) -> NDArray[np.float32]:
        """All vectors, in the order that they were given in."""
        return self.vectors(np.arange(len(self.rows_M)))

    def search(self, queries_ND: NDArray[np.float32], k: int) -> TopK:
        """Return the k nearest of the vectors that are read for each query; all of them where there are fewer."""
        check_arguments(queries_ND, self.stored_MD, k, None, None)
        wanted = max(self.num_read, _READ_PER_PLACE * k)
        if len(queries_ND) <= FEW:
            return join_rows([self._search_one(query_D, k, wanted) for query_D in queries_ND], k)
        found = nothing_found(len(queries_ND), k)
        for part in slices(len(queries_ND), _BLOCK_QUERIES):
            scores_BW, rows_BW = self._read(queries_ND[part], wanted)
            if np.isnan(scores_BW.max()):
                raise ModelError(NOT_A_NUMBER)
            write_found(found, part, np.sort(largest(make_keys(scores_BW, rows_BW), k), axis=1)[:, ::-1])
        return found

    def _search_one(self, query_D: NDArray[np.float32], k: int, num_wanted: int) -> TopK:
        """Return the k nearest of at least so many vectors, or all, of the clusters nearest to one query."""
        near_C = np.argsort(-(self.centroids_CD @ query_D))
        ends_C = self._sizes[near_C].cumsum()
        read = near_C[: int(ends_C.searchsorted(num_wanted)) + 1].tolist()
        scores = np.concatenate([self._widened(cluster) @ query_D for cluster in read])
        best = largest_scores(scores, k)
        clusters = ends_C.searchsorted(best, side="right")
        rows = self.rows_M[self.starts[near_C[clusters] + 1] - ends_C[clusters] + best]
        return best_of_one(rows, scores[best], k)

    def _read(self, queries_BD: NDArray[np.float32], num_wanted: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return products of queries with vectors read as for one, a cluster at a time, and the rows of these.

        Unused places score minus infinity.
        """
        near_BC = np.argsort(-(queries_BD @ self.centroids_CD.T), axis=1)
        sizes_BC = self._sizes[near_BC]
        before_BC = np.cumsum(sizes_BC, axis=1) - sizes_BC
        queries_P, places_P = np.nonzero(before_BC < num_wanted)
        clusters_P, before_P = near_BC[queries_P, places_P], before_BC[queries_P, places_P]
        width = int((before_P + self._sizes[clusters_P]).max())
        scores_BW = np.full((len(queries_BD), width), -np.inf, dtype=np.float32)
        rows_BW = np.zeros((len(queries_BD), width), dtype=np.int64)
        order = np.argsort(clusters_P, kind="stable")
        ends = np.flatnonzero(np.diff(clusters_P[order], append=-1)) + 1
        for pairs in np.split(order, ends[:-1]):
            cluster, readers = int(clusters_P[pairs[0]]), queries_P[pairs]
            rows = self.rows_M[self.starts[cluster] : self.starts[cluster + 1]]
            places = before_P[pairs, None] + np.arange(len(rows))
            scores_BW[readers[:, None], places] = queries_BD[readers] @ self._widened(cluster).T
            rows_BW[readers[:, None], places] = rows
        return scores_BW, rows_BW

    def _widened(self, cluster: int) -> NDArray[np.float32]:
        """Return the vectors of a cluster in single precision."""
        found = self._wide_C[cluster]
        if found is None:
            part = slice(self.starts[cluster], self.starts[cluster + 1])
            found = self._wide_C[cluster] = self.stored_MD[part].astype(np.float32, copy=False)
        return found

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are stored; vectors are kept in half precision."""
        return {
            "cluster_centroids": self.centroids_CD,
            "cluster_ends": self.starts[1:],
            "cluster_rows": self.rows_M,
            "cluster_vectors": self.stored_MD.astype(np.float16),
            "cluster_read": np.array([self.num_read]),
            "cluster_recall": np.array([self.recall]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> ClusteredIndex:
        """Make them from stored arrays; raises KeyError or ValueError where they do not fit together."""
        starts, rows_M = np.concatenate([[0], arrays["cluster_ends"]]), arrays["cluster_rows"]
        centroids_CD, stored_MD = arrays["cluster_centroids"], arrays["cluster_vectors"]
        expected = (len(starts) - 1, *stored_MD.shape[1:]), np.dtype(np.float32), len(rows_M), "i", "i"
        found = centroids_CD.shape, centroids_CD.dtype, len(stored_MD), rows_M.dtype.kind, starts.dtype.kind
        if found != expected or starts[-1] != len(rows_M) or (np.diff(starts) <= 0).any():
            raise ValueError("clusters that do not fit their vectors")
        if not np.array_equal(np.sort(rows_M), np.arange(len(rows_M))):
            raise ValueError("clusters that do not have each vector once")
        [num_read], [recall] = arrays["cluster_read"].tolist(), arrays["cluster_recall"].tolist()
        return cls(
            centroids_CD=centroids_CD,
            starts=starts,
            rows_M=rows_M,
            stored_MD=stored_MD,
            num_read=int(num_read),
            recall=float(recall),
        )

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @cached_property
    def _wide_C(self) -> list[NDArray[np.float32] | None]:
        """The vectors of each cluster that was read."""
        return [None] * len(self.centroids_CD)

    @cached_property
    def _places_M(self) -> NDArray[np.int64]:
        """Where the vector of each row is stored."""
        return np.argsort(self.rows_M)


def _learn_centroids(
    vectors_MD: NDArray[np.float32], num_clusters: int, generator: np.random.Generator
) -> NDArray[np.float32]:
    """Learn centroids of length one by spherical k-means on a sample; clusters that become empty stay as they are."""
    # Imported here because searching does not need it, and it takes a while.
    from scipy.sparse import csr_matrix

    size = min(_SAMPLED_PER_CLUSTER * num_clusters, len(vectors_MD))
    sample_SD = vectors_MD[generator.choice(len(vectors_MD), size, replace=False)]
    centroids_CD: NDArray[np.float32] = sample_SD[:num_clusters].copy()
    for _ in range(_ITERATIONS):
        owners_S = _nearest_centroids(sample_SD, centroids_CD)
        chosen = csr_matrix((np.ones(size, np.float32), (owners_S, np.arange(size))), shape=(num_clusters, size))
        sums_CD = chosen @ sample_SD
        lengths_C = np.sqrt(np.einsum("cd,cd->c", sums_CD, sums_CD))
        filled = lengths_C > 0
        centroids_CD[filled] = sums_CD[filled] / lengths_C[filled, None]
    return centroids_CD


def _nearest_centroids(vectors_MD: NDArray[np.float32], centroids_CD: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the centroid with the largest product of each vector."""
    blocks = [np.argmax(vectors_MD[part] @ centroids_CD.T, axis=1) for part in slices(len(vectors_MD), _BLOCK)]
    return np.concatenate(blocks)
