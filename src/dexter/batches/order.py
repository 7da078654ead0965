"""Query orders: which queries make up each step of an epoch.

An order is a function of the seed and the epoch alone (and of the clusters, where there are any), so a run resumes from
(epoch, position) without saved state. Every query comes once in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dexter.errors import UsageError


def shuffled(num_queries: int, batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Random batches of at most `batch_size` queries, equal in size within one, so that no step is a small rest."""
    _check_batch_size(batch_size)
    order = np.random.default_rng([seed, epoch]).permutation(num_queries)
    return _equal_parts(order, -(-num_queries // batch_size))


def clustered(leaves: Sequence[np.ndarray], batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Batches of similar queries: clusters in random order, each a batch of its own where two would not fit in one.

    Smaller clusters are joined, as many as fit, in that random order: a batch then holds several groups of similar
    queries. Clusters stay whole, and the number of them per batch is equal within one.

    Args:
        leaves: query numbers of each cluster (see `balanced_clusters`).
        batch_size: most queries in a batch; no cluster may be larger.
        seed: of the order of the clusters.
        epoch: of which the order is asked for.
    """
    _check_batch_size(batch_size)
    largest = max((len(leaf) for leaf in leaves), default=1)
    if largest > batch_size:
        raise UsageError(f"a cluster of {largest} queries exceeds the batch size {batch_size}: make smaller clusters")
    order = np.random.default_rng([seed, epoch]).permutation(len(leaves))
    groups = _equal_parts(order, -(-len(leaves) // (batch_size // largest)))
    return [np.concatenate([leaves[leaf] for leaf in group]) for group in groups]


def curriculum_cluster_size(epoch: int, *, double_every: int, maximum: int, start: int = 1) -> int:
    """Cluster size of an epoch under a doubling curriculum: from random batches (size 1) to batches of one cluster.

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


def _check_batch_size(batch_size: int) -> None:
    """Raise a UsageError unless a batch can hold a query."""
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} queries was asked for: expected 1 or more")


def _equal_parts(order: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Consecutive parts, equal in size within one."""
    return np.array_split(order, num_parts) if num_parts else []
