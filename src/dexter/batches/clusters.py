"""Balanced clusters: vectors are halved recursively until each cluster is at most as large as a batch.

A node is split by spherical 2-means: points are ordered by the difference of their products with the two centroids and
cut in the middle, so that the sizes of all clusters of a level differ by at most one. All nodes of a level are split
together, as matrix products.

Shapes: N points, D dimensions, M nodes of a level, S points of a node, P points of a node that its centroids are
learned from.
"""

from __future__ import annotations

import math
from itertools import islice, product

import numpy as np

from dexter.errors import UsageError
from dexter.processes import Processes, SingleProcess, sum_arrays

CENTROID_POINTS = 1024
"""Centroids of larger nodes are learned from this many of their points; the split itself uses all."""
BLOCK_BYTES = 4 * 2**20
"""Vectors gathered at a time: they stay in cache over the iterations."""


def balanced_clusters(
    vectors_ND: np.ndarray, leaf_size: int, *, seed: int, iterations: int = 10, processes: Processes | None = None
) -> list[np.ndarray]:
    """Split points into clusters of at most `leaf_size`, sizes differing by at most one, by recursive balanced 2-means.

    There are 2 ** ceil(log2(N / leaf_size)) clusters (fewer where that exceeds the number of points: none is empty).
    Neighbours in the list are neighbours in space: clusters 2i and 2i + 1 were one until the last split. The result
    depends on the vectors and the seed alone.

    Args:
        vectors_ND: one vector per point, of unit length for cosine similarity.
        leaf_size: largest number of points in a cluster.
        seed: decides the points that the centroids start from.
        iterations: largest number of refinements of a node's centroids; stops when no point changes sides.
        processes: processes that have the same vectors and share the work; the result is that of one, bit for bit.

    Returns:
        Row numbers of each cluster, ascending.
    """
    vectors_ND = np.asarray(vectors_ND, dtype=np.float32)
    if vectors_ND.ndim != 2:
        raise UsageError(f"clusters need one vector per point: got an array of shape {vectors_ND.shape}")
    if leaf_size < 1:
        raise UsageError(f"leaf_size is {leaf_size}: expected 1 or more points in a cluster")
    rng = np.random.default_rng(seed)
    processes = processes or SingleProcess()
    members_MS = np.arange(len(vectors_ND)).reshape(1, -1)
    for _ in range(_depth(len(vectors_ND), leaf_size)):
        directions_MD = _learn_directions(vectors_ND, members_MS, iterations, rng, processes)
        members_MS = _halve(members_MS, _project(vectors_ND, members_MS, directions_MD, processes))
    return [members[members >= 0] for members in members_MS if members.size and members[-1] >= 0]


def _depth(num_points: int, leaf_size: int) -> int:
    """Number of halvings after which no cluster has more than `leaf_size` points."""
    return max(0, math.ceil(math.log2(num_points / leaf_size))) if num_points else 0


def _learn_directions(
    vectors_ND: np.ndarray, members_MS: np.ndarray, iterations: int, rng: np.random.Generator, processes: Processes
) -> np.ndarray:
    """For each node, the difference of its two centroids. Processes take turns with the blocks."""
    num_nodes, size = members_MS.shape
    num_points = min(size, CENTROID_POINTS)
    directions_MD = np.zeros((num_nodes, vectors_ND.shape[1]), dtype=np.float32)
    block = max(1, BLOCK_BYTES // (num_points * vectors_ND.shape[1] * vectors_ND.itemsize))
    for number, start in enumerate(range(0, num_nodes, block)):
        nodes_MS = members_MS[start : start + block]
        chosen_MP = _choose_points(nodes_MS, num_points, rng)
        if number % processes.size == processes.rank:
            directions_MD[start : start + block] = _two_means(vectors_ND[chosen_MP], iterations)
    return sum_arrays(processes, directions_MD)


def _choose_points(members_MS: np.ndarray, num_points: int, rng: np.random.Generator) -> np.ndarray:
    """Points of each node in random order: all of them, or a sample with replacement where there are more."""
    num_nodes, size = members_MS.shape
    if size > num_points:
        places = rng.integers(0, size, (num_nodes, num_points))
    else:
        places = rng.permuted(np.broadcast_to(np.arange(size), members_MS.shape), axis=1)
    chosen = np.take_along_axis(members_MS, places, axis=1)
    # A gap becomes the last member: a point that occurs twice hardly changes a mean.
    return np.where(chosen < 0, members_MS[:, -1:], chosen)


def _two_means(points_MPD: np.ndarray, iterations: int) -> np.ndarray:
    """Balanced spherical 2-means of each node: the difference of the two unit centroids."""
    num_points = points_MPD.shape[1]
    totals_MD = points_MPD.sum(axis=1)
    # The points come in random order: the first and the last are a random pair.
    directions_MD: np.ndarray = points_MPD[:, 0] - points_MPD[:, -1]
    sides_MP = None
    for _ in range(iterations):
        products_MP = np.matmul(points_MPD, directions_MD[:, :, None])[:, :, 0]
        medians_M1 = np.partition(products_MP, num_points // 2, axis=1)[:, num_points // 2, None]
        before, sides_MP = sides_MP, products_MP >= medians_M1
        if before is not None and np.array_equal(before, sides_MP):
            break
        above_MD = np.matmul(sides_MP[:, None, :].astype(np.float32), points_MPD)[:, 0]
        directions_MD = _unit(above_MD) - _unit(totals_MD - above_MD)
    return directions_MD


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors scaled to length 1; zero stays zero."""
    lengths: np.ndarray = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny))


def _project(
    vectors_ND: np.ndarray, members_MS: np.ndarray, directions_MD: np.ndarray, processes: Processes
) -> np.ndarray:
    """The product of each point with its node's direction, minus infinity in gaps; processes take turns."""
    num_nodes, size = members_MS.shape
    products_MS = np.zeros(members_MS.shape, dtype=np.float32)
    # Blocks of whole nodes, or of a part of one node where a node is large.
    nodes = max(1, BLOCK_BYTES // (size * vectors_ND.shape[1] * vectors_ND.itemsize))
    points = max(1, BLOCK_BYTES // (vectors_ND.shape[1] * vectors_ND.itemsize))
    starts = product(range(0, num_nodes, nodes), range(0, size, points))
    for node, point in islice(starts, processes.rank, None, processes.size):
        block = np.s_[node : node + nodes, point : point + points]
        gathered = vectors_ND[members_MS[block]]
        products_MS[block] = np.matmul(gathered, directions_MD[node : node + nodes, :, None])[:, :, 0]
    # Each block is zero on all processes but one, so that the sum is exact.
    products_MS = sum_arrays(processes, products_MS)
    products_MS[members_MS < 0] = -np.inf
    return products_MS


def _halve(members_MS: np.ndarray, products_MS: np.ndarray) -> np.ndarray:
    """Split each node at its median; a gap (-1) fills the smaller half where the number of points is odd.

    A gap has the smallest product, so it falls in the lower half: sizes that are equal within one stay so.
    """
    num_nodes, size = members_MS.shape
    order = np.argsort(products_MS, axis=1, kind="stable")
    ordered = np.take_along_axis(members_MS, order, axis=1)
    if size % 2:
        ordered = np.concatenate([ordered, np.full((num_nodes, 1), -1)], axis=1)
    # In order of row number: reads are sequential, and what comes next does not depend on the order of ties.
    return np.sort(ordered.reshape(num_nodes * 2, -1), axis=1)
