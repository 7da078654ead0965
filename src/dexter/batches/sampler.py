"""The sampler of a run: the queries of each step and their label pool, as the settings say.

Batches and draws depend on the seed, the epoch and the step only. What depends on the model (clusters and shortlists)
is computed at a refresh and saved in checkpoints, so that a resumed run continues with the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.batches.clusters import balanced_clusters
from dexter.batches.mining import draw_hard_negatives, mine_hard_negatives, shortlist_length
from dexter.batches.order import clustered, curriculum_cluster_size, shuffled, steps_per_epoch
from dexter.batches.pool import (
    Pool,
    all_labels,
    draw_positives,
    expected_label_counts,
    in_batch,
    log_inclusion_probability,
    sampled,
    with_extra_positives,
    without_pairs,
)
from dexter.config import BatchConfig, LossConfig
from dexter.data import Split
from dexter.processes import LabelShard, Processes


class Sampler:
    """The batches of an epoch and the label pool of a step."""

    def __init__(self, split: Split, config: BatchConfig, loss: LossConfig, *, seed: int) -> None:
        self.loss = loss
        self.relevance, self.filtered, self.config, self.seed = split.relevance, split.filtered, config, seed
        self.num_queries, self.num_labels = split.relevance.shape
        self._leaf_of_query: NDArray[np.int64] | None = None
        self._shortlist: NDArray[np.int32] | None = None
        self._refreshed_at = -1
        self._batches: tuple[int, list[NDArray[np.int64]]] = (-1, [])
        self._log_inclusion = self._inclusion() if config.correct_pool else None

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch."""
        return steps_per_epoch(self.num_queries, self.config.size, is_clustered=self.config.order == "clustered")

    def is_due_refresh(self, step: int) -> bool:
        """Whether clusters and shortlists must be computed before this step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        since = epoch - self.config.start
        wanted = self.config.order == "clustered" or self.config.hard_negatives > 0
        return (
            wanted and position == 0 and since >= 0 and since % self.config.refresh == 0 and self._refreshed_at != epoch
        )

    def refresh(
        self,
        step: int,
        queries_ND: NDArray[np.float32],
        labels_LD: NDArray[np.float32] | Tensor,
        *,
        shard: LabelShard | None = None,
        processes: Processes | None = None,
        watch: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Cluster the queries and mine hard negatives with the current model's vectors.

        Args:
            step: the step that comes next.
            queries_ND: vectors of all queries of the split.
            labels_LD: vectors of the labels that this process holds, where they are to be searched.
            shard: which labels these are; all of them if left out.
            processes: the processes that hold the other labels.
            watch: times the phases `cluster` and `mine`.
        """
        epoch = step // self.steps_per_epoch
        if self.config.order == "clustered":
            with watch("cluster"):
                self._leaf_of_query = self._cluster(queries_ND, epoch, processes)
        if self.config.hard_negatives:
            with watch("mine"):
                self._shortlist = self._mine(queries_ND, labels_LD, shard, processes)
        self._refreshed_at = epoch
        self._batches = (-1, [])

    def rows(self, step: int) -> NDArray[np.int64]:
        """The queries of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._batches[0] != epoch:
            self._batches = (epoch, self._order(epoch))
        return self._batches[1][position]

    def pool(self, rows: NDArray[np.int64], step: int) -> Pool:
        """The label pool of a step; pairs that are filtered from predictions are neither positive nor negative."""
        return self._chosen_pairs(self._draw_pool(rows, step), rows, [self.seed, step, 2])

    def _chosen_pairs(self, pool: Pool, rows: NDArray[np.int64], seed: list[int]) -> Pool:
        """The pool without filtered pairs, and with the positives that count in the loss."""
        if self.filtered is not None:
            pool = without_pairs(pool, self.filtered, rows)
        if not self.loss.positives:
            return pool
        random = np.random.default_rng(seed)
        return draw_positives(pool, self.loss.positives, rng=random, undrawn=self.loss.undrawn)

    def _draw_pool(self, rows: NDArray[np.int64], step: int) -> Pool:
        random = np.random.default_rng([self.seed, step])
        config = self.config
        if config.pool == "all":
            return all_labels(self.relevance, rows)
        if config.pool == "in-batch" and self._shortlist is None:
            return in_batch(
                self.relevance,
                rows,
                rng=random,
                sample_positives=config.positives,
                num_random=config.random_labels,
                log_inclusion=self._log_inclusion,
            )
        return sampled(
            self.relevance,
            rows,
            self._hard_negatives(rows, step),
            rng=random,
            max_positives=config.positives or self.num_labels,
            num_random=config.random_labels,
            cap=config.cap or None,
        )

    def classifier_pool(self, pool: Pool, rows: NDArray[np.int64], step: int) -> Pool:
        """The classifier's pool of a step: the pool with `batch.classifier_positives` more positives per query."""
        if not self.config.classifier_positives:
            return pool
        random = np.random.default_rng([self.seed, step, 1])
        extra = self.config.classifier_positives
        larger = with_extra_positives(pool, self.relevance, rows, rng=random, num_extra=extra)
        return self._chosen_pairs(larger, rows, [self.seed, step, 3])

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        tensors = {"refreshed_at": torch.tensor([self._refreshed_at])}
        if self._leaf_of_query is not None:
            tensors["leaf_of_query"] = torch.from_numpy(self._leaf_of_query)
        if self._shortlist is not None:
            tensors["shortlist"] = torch.from_numpy(self._shortlist)
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._refreshed_at = int(tensors["refreshed_at"][0])
        self._leaf_of_query = tensors["leaf_of_query"].numpy() if "leaf_of_query" in tensors else None
        self._shortlist = tensors["shortlist"].numpy() if "shortlist" in tensors else None
        self._batches = (-1, [])

    def _order(self, epoch: int) -> list[NDArray[np.int64]]:
        if self._leaf_of_query is None:
            return shuffled(self.num_queries, self.steps_per_epoch, seed=self.seed, epoch=epoch)
        by_leaf = np.argsort(self._leaf_of_query, kind="stable")
        leaves = np.split(by_leaf, np.cumsum(np.bincount(self._leaf_of_query))[:-1])
        return clustered(leaves, self.steps_per_epoch, seed=self.seed, epoch=epoch)

    def _cluster(self, queries_ND: NDArray[np.float32], epoch: int, processes: Processes | None) -> NDArray[np.int64]:
        """The number of each query's cluster."""
        leaves = balanced_clusters(queries_ND, self._cluster_size(epoch), seed=self.seed, processes=processes)
        leaf_of_query = np.empty(self.num_queries, dtype=np.int64)
        for number, leaf in enumerate(leaves):
            leaf_of_query[leaf] = number
        return leaf_of_query

    def _mine(
        self,
        queries_ND: NDArray[np.float32],
        labels_LD: NDArray[np.float32] | Tensor,
        shard: LabelShard | None,
        processes: Processes | None,
    ) -> NDArray[np.int32]:
        """The shortlist of each query; filtered pairs are no negatives."""
        unwanted = self.relevance if self.filtered is None else self.relevance + self.filtered
        return mine_hard_negatives(
            queries_ND,
            labels_LD,
            unwanted if shard is None else shard.columns(unwanted),
            num_negatives=shortlist_length(self.config, self.num_labels),
            label_ids=None if shard is None else shard.labels,
            processes=processes,
        )

    def _cluster_size(self, epoch: int) -> int:
        batch_size = -(-self.num_queries // self.steps_per_epoch)
        if not self.config.cluster_doubling:
            return batch_size
        since = epoch - self.config.start
        return curriculum_cluster_size(since, double_every=self.config.cluster_doubling, maximum=batch_size)

    def _hard_negatives(self, rows: NDArray[np.int64], step: int) -> NDArray[np.int64] | None:
        if self._shortlist is None:
            return None
        return draw_hard_negatives(
            self._shortlist,
            rows,
            self.config.hard_negatives,
            epoch=step // self.steps_per_epoch,
            refreshed_at=self._refreshed_at,
            seed=self.seed,
        )

    def _inclusion(self) -> NDArray[np.float32]:
        counts = expected_label_counts(self.relevance, sample_positives=self.config.positives or self.num_labels)
        return log_inclusion_probability(
            counts,
            num_queries=self.num_queries,
            batch_size=min(self.config.size, self.num_queries),
            num_random=self.config.random_labels,
        )
