"""Query orders: which queries make up each step of an epoch.

An order is a function of the seed and the epoch (and of the clusters, where there are any), so that a run resumes
without saved state. Every query occurs once in an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dexter.errors import UsageError


def shuffled(num_queries: int, num_batches: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Split a random order of the queries into `num_batches` batches whose sizes differ by at most one."""
    _check_num_batches(num_batches, num_queries, "queries")
    return np.array_split(np.random.default_rng([seed, epoch]).permutation(num_queries), num_batches)


def clustered(leaves: Sequence[np.ndarray], num_batches: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Put clusters of similar queries in random order and split them into `num_batches` batches.

    Where there are as many clusters as batches each cluster is a batch. Where there are more, a batch holds several;
    clusters stay whole, and the numbers of clusters per batch differ by at most one.

    Args:
        leaves: query numbers of each cluster (see `balanced_clusters`).
        num_batches: batches of an epoch; at most the number of clusters.
        seed: with `epoch`, decides the order of the clusters.
        epoch: the number of the epoch.
    """
    _check_num_batches(num_batches, len(leaves), "clusters")
    order = np.random.default_rng([seed, epoch]).permutation(len(leaves))
    return [np.concatenate([leaves[leaf] for leaf in group]) for group in np.array_split(order, num_batches)]


def curriculum_cluster_size(epoch: int, *, double_every: int, maximum: int, start: int = 1) -> int:
    """Cluster size of an epoch under a doubling curriculum: from random batches (size 1) to one cluster per batch.

    The size starts at `start` and doubles every `double_every` epochs until it reaches `maximum` (the batch size), so
    negatives become harder as the encoder becomes better.
    """
    if start < 1 or double_every < 1 or maximum < start:
        raise UsageError(
            f"a cluster curriculum needs 1 <= start <= maximum and double_every >= 1: got start {start}, "
            f"maximum {maximum}, double_every {double_every}"
        )
    # The shift is bounded so that a late epoch does not build a huge number first.
    doublings = min(epoch // double_every, maximum.bit_length())
    return min(start << doublings, maximum)


def steps_per_epoch(num_queries: int, batch_size: int, *, is_clustered: bool) -> int:
    """Number of batches of an epoch; a power of two where batches are clusters, which come from repeated halving."""
    batches = -(-num_queries // batch_size)
    if not is_clustered:
        return batches
    # Halving stops at single queries: where their number is no power of two, batches of one are joined to pairs.
    return 1 << min(math.ceil(math.log2(batches)), math.floor(math.log2(num_queries)))


def _check_num_batches(num_batches: int, available: int, what: str) -> None:
    """Raise a UsageError unless every batch gets a query or a cluster."""
    if not 1 <= num_batches <= available:
        raise UsageError(f"{available:,} {what} cannot make {num_batches:,} batches: expected 1 to {available:,}")
