"""Query orders: which queries make up each step of an epoch.

An order is a function of the seed and the epoch alone (and of the clusters, where there are any), so a run resumes from
(epoch, position) without saved state. Every query comes once in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dexter.errors import UsageError


def shuffled(num_queries: int, num_batches: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """So many random batches, equal in size within one, so that no step is a small rest."""
    _check_num_batches(num_batches, num_queries, "queries")
    return np.array_split(np.random.default_rng([seed, epoch]).permutation(num_queries), num_batches)


def clustered(leaves: Sequence[np.ndarray], num_batches: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """So many batches of similar queries: clusters in random order, each a batch where there are as many of both.

    Where there are more clusters they are joined in that random order: a batch then holds several groups of similar
    queries. Clusters stay whole, and the number of them per batch is equal within one.

    Args:
        leaves: query numbers of each cluster (see `balanced_clusters`).
        num_batches: batches of an epoch; no more than there are clusters.
        seed: of the order of the clusters.
        epoch: of which the order is asked for.
    """
    _check_num_batches(num_batches, len(leaves), "clusters")
    order = np.random.default_rng([seed, epoch]).permutation(len(leaves))
    return [np.concatenate([leaves[leaf] for leaf in group]) for group in np.array_split(order, num_batches)]


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


def _check_num_batches(num_batches: int, available: int, what: str) -> None:
    """Raise a UsageError unless every batch gets something."""
    if not 1 <= num_batches <= available:
        raise UsageError(f"{available:,} {what} cannot make {num_batches:,} batches: expected 1 to {available:,}")
