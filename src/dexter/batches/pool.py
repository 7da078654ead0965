"""Label pools: the labels of a step, and which of its (query, label) pairs are positive.

A pool is a function of the batch's queries, the relevance matrix and a random generator. Whatever brought a label into
the pool, it is a positive of every query it is relevant to: a hard negative of one query may be a positive of another.
Queries that are left without a positive are no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from scipy.sparse import csr_matrix

from dexter.errors import UsageError
from dexter.positives import Positives
from dexter.processes import LabelShard

_SMALLEST_WEIGHT = 1e-12
"""Pairs of weight 0 are drawn last."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The labels of a step and the pairs of its queries and these labels."""

    labels: np.ndarray | None
    """int64 label ids, ascending, each once; None stands for every label, in order."""
    num_labels: int
    """Number of labels in the pool, of all processes."""
    positives: Positives
    """Pairs that are positive: rows are positions in the batch, columns positions in the pool."""
    ignore: Positives | None = None
    """Pairs that are neither positive nor negative: positives that were not drawn, and filtered pairs."""
    log_inclusion: np.ndarray | None = None
    """float32, log of the probability that a label is in the pool; subtracted from the scores of negatives."""


def all_labels(relevance: csr_matrix, rows: np.ndarray) -> Pool:
    """Every label.

    Args:
        relevance: queries x labels; values are weights.
        rows: the queries of the batch.
    """
    return Pool(None, int(relevance.shape[1]), _relevant_pairs(relevance, rows))


def in_batch(
    relevance: csr_matrix,
    rows: np.ndarray,
    *,
    rng: np.random.Generator,
    sample_positives: int = 0,
    num_random: int = 0,
    log_inclusion: np.ndarray | None = None,
) -> Pool:
    """The positives of the batch's queries, and `num_random` labels drawn at random.

    A positive that its query did not draw is still its positive where another query brought it into the pool.

    Args:
        relevance: queries x labels; values are weights.
        rows: the queries of the batch.
        rng: decides the draws.
        sample_positives: positives that each query brings, drawn in proportion to their weights without replacement;
            0: all.
        num_random: labels drawn uniformly from all labels.
        log_inclusion: one number per label of the data set, passed on for the labels of the pool (see
            `log_inclusion_probability`).
    """
    pairs = _relevant_pairs(relevance, rows)
    drawn = _draw(pairs, sample_positives or len(pairs), rng)
    labels = _union([pairs.columns.numpy()[drawn], _draw_labels(relevance, num_random, rng)])
    inclusion = None if log_inclusion is None else log_inclusion[labels]
    return Pool(labels, len(labels), _intersect(pairs, labels), log_inclusion=inclusion)


def sampled(
    relevance: csr_matrix,
    rows: np.ndarray,
    hard_negatives: np.ndarray | None = None,
    *,
    rng: np.random.Generator,
    max_positives: int,
    num_random: int = 0,
    cap: int | None = None,
) -> Pool:
    """At most `max_positives` positives and the drawn hard negatives of each query, shared by the whole batch.

    A pool above the cap keeps drawn positives before hard negatives before random labels. Among the positives those
    come first that are relevant to the most queries of the batch, among the hard negatives those that the most queries
    drew; ties are broken at random.

    Args:
        relevance: queries x labels; values are weights.
        rows: the queries of the batch.
        hard_negatives: one row of label ids per query of the batch, -1 where there is none (see
            `draw_hard_negatives`).
        rng: decides the draws.
        max_positives: positives that each query brings, beta, drawn in proportion to their weights without replacement.
        num_random: labels drawn uniformly from all labels.
        cap: most labels in the pool; None: no limit.
    """
    if max_positives < 1 or (cap is not None and cap < 1):
        raise UsageError(f"a pool needs max_positives and cap of 1 or more: got {max_positives} and {cap}")
    pairs = _relevant_pairs(relevance, rows)
    relevant_labels = pairs.columns.numpy()
    positive_labels = relevant_labels[_draw(pairs, max_positives, rng)]
    negative_labels = np.empty(0, dtype=np.int64) if hard_negatives is None else _present(hard_negatives)
    random_labels = _draw_labels(relevance, num_random, rng)
    labels = _union([positive_labels, negative_labels, random_labels])
    if cap is not None and len(labels) > cap:
        priorities = _priorities(labels, positive_labels, negative_labels, relevant_labels)
        # Priorities are whole numbers: a random fraction breaks ties.
        labels = np.sort(labels[np.argsort(rng.random(len(labels)) - priorities)[:cap]])
    return Pool(labels, len(labels), _intersect(pairs, labels))


def with_extra_positives(
    pool: Pool, relevance: csr_matrix, rows: np.ndarray, *, rng: np.random.Generator, num_extra: int
) -> Pool:
    """The pool with up to `num_extra` more positives of each query, drawn like the others.

    The classifier can afford them: its labels are looked up, not encoded. `np.searchsorted(larger.labels, pool.labels)`
    gives the positions of the pool's labels in the larger pool.
    """
    if pool.labels is None:
        return pool
    pairs = _relevant_pairs(relevance, rows)
    outside = pairs.select(torch.from_numpy(_positions(pairs.columns.numpy(), pool.labels) < 0))
    extra = outside.columns.numpy()[_draw(outside, num_extra, rng)]
    labels = _union([pool.labels, extra])
    return Pool(labels, len(labels), _intersect(pairs, labels))


def draw_positives(
    pool: Pool, num_positives: int, *, rng: np.random.Generator, undrawn: Literal["ignore", "negative"] = "ignore"
) -> Pool:
    """The pool with at most `num_positives` positives of each query, drawn by weight without replacement.

    Args:
        pool: with all positives of the queries.
        num_positives: positives per query; each has weight 1 afterwards, since the draw was by weight.
        rng: decides the draw.
        undrawn: whether the other positives are ignored (DEXML's decoupled softmax and soft top-k) or become negatives
            of their query (its softmax and binary cross-entropy).
    """
    drawn = torch.from_numpy(_draw(pool.positives, num_positives, rng))
    kept, others = pool.positives.select(drawn), pool.positives.select(~drawn)
    ignore = pool.ignore if undrawn == "negative" else _joined(pool.ignore, others)
    return replace(pool, positives=Positives(kept.rows, kept.columns), ignore=ignore)


def without_pairs(pool: Pool, unwanted: csr_matrix, rows: np.ndarray) -> Pool:
    """The pool with more pairs to ignore: the stored entries of `unwanted` (queries x labels) of the batch's queries.

    An item that must never be recommended for itself is no evidence against its label either.
    """
    pairs = _relevant_pairs(unwanted, rows, weighted=False)
    if not len(pairs):
        return pool
    more = pairs if pool.labels is None else _intersect(pairs, pool.labels)
    keys, unwanted_keys = (each.rows * pool.num_labels + each.columns for each in (pool.positives, more))
    wanted = pool.positives.select(~torch.isin(keys, unwanted_keys))
    return replace(pool, positives=wanted, ignore=_joined(pool.ignore, more))


def _joined(first: Positives | None, second: Positives) -> Positives:
    """The pairs of both, without weights."""
    if first is None:
        return Positives(second.rows, second.columns)
    return Positives(torch.cat([first.rows, second.rows]), torch.cat([first.columns, second.columns]))


def count_relevant_pairs(pool: Pool, relevance: csr_matrix, rows: np.ndarray) -> int:
    """Count the pairs of the batch's queries and the pool's labels that are relevant, in the loss or not.

    Divided by the number of queries this is Avg |P_i^B| of the UniDEC paper (tables 6 and 7). The pool must be that of
    all processes.
    """
    if pool.labels is None:
        return int((relevance.indptr[rows + 1] - relevance.indptr[rows]).sum())
    pairs = _relevant_pairs(relevance, rows, weighted=False)
    return int((_positions(pairs.columns.numpy(), pool.labels) >= 0).sum())


def restrict(pool: Pool, shard: LabelShard) -> Pool:
    """The part of a pool that one process holds: labels as numbers within its shard; `num_labels` stays that of all."""
    if shard.is_all:
        return pool
    if pool.labels is None:
        columns, labels = shard.numbers, None
    else:
        found = shard.numbers[pool.labels]
        columns = np.where(found >= 0, np.cumsum(found >= 0) - 1, -1)
        labels = found[found >= 0]
    held = torch.from_numpy(columns)
    return replace(
        pool,
        labels=labels,
        positives=pool.positives.renumber(columns=held),
        ignore=None if pool.ignore is None else pool.ignore.renumber(columns=held),
        log_inclusion=None if pool.log_inclusion is None else pool.log_inclusion[columns >= 0],
    )


def log_inclusion_probability(
    label_counts: np.ndarray, *, num_queries: int, batch_size: int, num_random: int = 0
) -> np.ndarray:
    """Log of the probability that a label which is not a positive of a query is in the pool of that query's batch.

    A pool of in-batch positives over-represents frequent labels. With p_l the probability of label l, the sum over the
    pool's negatives of exp(s_l - log p_l) is an unbiased estimate of the sum over all negatives. A query's own
    positives are always in the pool: their scores stay as they are.

    The batch of a query holds batch_size - 1 of the other num_queries - 1, all equally likely (a shuffled order, that
    is; clusters are not random batches). It misses all c queries of a label with probability
    prod_{j<c} (1 - (batch_size - 1) / (num_queries - 1 - j)), and the labels drawn at random miss it with probability
    1 - num_random / num_labels. This is exact when queries bring all their positives. When they bring a sample, give
    `expected_label_counts`: right to first order in batch_size / num_queries.

    Args:
        label_counts: for every label, the number of queries that bring it into a pool.
        num_queries: queries in the training set.
        batch_size: queries in a batch.
        num_random: labels of a pool that are drawn uniformly from all labels.

    Returns:
        float32, one per label; minus infinity for a label that can never be in a pool.
    """
    if not 1 <= batch_size <= num_queries:
        raise UsageError(f"a batch of {batch_size} queries cannot be drawn from {num_queries}: expected 1 to all")
    most = int(np.ceil(label_counts.max(initial=0)))
    others = num_queries - 1 - np.arange(min(most, num_queries - 1), dtype=np.float64)
    with np.errstate(divide="ignore"):
        log_misses = np.concatenate([[0.0], np.cumsum(np.log1p(-np.minimum((batch_size - 1) / others, 1.0)))])
        log_random = np.log1p(-min(num_random / max(len(label_counts), 1), 1.0))
        log_missed = np.interp(label_counts, np.arange(len(log_misses)), np.maximum(log_misses, -1e3)) + log_random
        return np.asarray(np.log(-np.expm1(log_missed)), dtype=np.float32)


def expected_label_counts(relevance: csr_matrix, *, sample_positives: int) -> np.ndarray:
    """Expected number of queries that bring each label when each draws at most `sample_positives` of its positives.

    A query with m positives brings each with probability min(1, sample_positives / m): exact for equal weights.
    """
    per_query = np.diff(relevance.indptr)
    chances = np.minimum(1.0, sample_positives / np.maximum(per_query, 1))
    return np.bincount(relevance.indices, weights=np.repeat(chances, per_query), minlength=relevance.shape[1])


def _relevant_pairs(relevance: csr_matrix, rows: np.ndarray, *, weighted: bool = True) -> Positives:
    """All relevant pairs of the batch's queries, columns being label ids, with weights unless all are 1."""
    # Indexing the matrix does the same in several times the time.
    starts = relevance.indptr[rows].astype(np.int64)
    counts = relevance.indptr[rows + 1] - starts
    pair_rows = np.repeat(np.arange(len(rows)), counts)
    first_of_row = np.cumsum(counts) - counts
    entries = np.arange(len(pair_rows)) + (starts - first_of_row)[pair_rows]
    labels = relevance.indices[entries].astype(np.int64)
    weights = relevance.data[entries] if weighted else None
    return Positives(pair_rows, labels, None if weights is None or bool((weights == 1).all()) else weights)


def _draw(pairs: Positives, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Mask of at most `num_draws` pairs of each query, drawn in proportion to their weights without replacement."""
    rows = pairs.rows.numpy()
    counts = np.bincount(rows)
    if not len(counts) or counts.max() <= num_draws:
        return np.ones(len(rows), dtype=bool)
    # The pairs with the smallest exponential times of rate `weight` are such a draw (Efraimidis and Spirakis).
    times = rng.exponential(size=len(rows))
    if pairs.weights is not None:
        times /= np.maximum(pairs.weights.numpy(), _SMALLEST_WEIGHT)
    # Times are mapped into [0, 1), so that one sort orders them within rows.
    order = np.argsort(rows + times / (1 + times) * (1 - 2.0**-20))
    starts = np.cumsum(counts) - counts
    drawn = np.zeros(len(rows), dtype=bool)
    drawn[order] = np.arange(len(order)) - starts[rows[order]] < num_draws
    return drawn


def _draw_labels(relevance: csr_matrix, num_random: int, rng: np.random.Generator) -> np.ndarray:
    """Labels drawn uniformly from all, without replacement."""
    num_labels = int(relevance.shape[1])
    if not num_random:
        return np.empty(0, dtype=np.int64)
    return rng.choice(num_labels, min(num_random, num_labels), replace=False, shuffle=False)


def _present(hard_negatives: np.ndarray) -> np.ndarray:
    """Label ids without the -1 of empty places."""
    return hard_negatives[hard_negatives >= 0].astype(np.int64)


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Label ids of all parts, ascending, each once."""
    # np.unique takes ten times as long: it hashes.
    labels = np.sort(np.concatenate(parts))
    return labels[np.concatenate([[True], labels[1:] != labels[:-1]])] if len(labels) else labels


def _positions(labels: np.ndarray, pool_labels: np.ndarray) -> np.ndarray:
    """The position of each label in the pool; -1 where it is not in it."""
    if not len(pool_labels):
        return np.full(len(labels), -1)
    # Looking labels up in ascending order is several times faster than in any order.
    order = np.argsort(labels)
    ascending = labels[order]
    found = np.minimum(np.searchsorted(pool_labels, ascending), len(pool_labels) - 1)
    positions = np.empty(len(labels), dtype=np.int64)
    positions[order] = np.where(pool_labels[found] == ascending, found, -1)
    return positions


def _intersect(pairs: Positives, pool_labels: np.ndarray) -> Positives:
    """The pairs whose label is in the pool, columns being positions in the pool."""
    positions = torch.from_numpy(_positions(pairs.columns.numpy(), pool_labels))
    inside = pairs.select(positions >= 0)
    return Positives(inside.rows, positions[positions >= 0], inside.weights)


def _priorities(
    labels: np.ndarray, positive_labels: np.ndarray, negative_labels: np.ndarray, relevant_labels: np.ndarray
) -> np.ndarray:
    """Which labels a cap keeps first: drawn positives by number of queries in the batch, then negatives by number."""
    relevant_counts, positive_counts, negative_counts = (
        _count(part, labels) for part in (relevant_labels, positive_labels, negative_labels)
    )
    above_negatives = negative_counts.max(initial=0)
    return np.where(positive_counts > 0, above_negatives + relevant_counts, negative_counts)


def _count(labels: np.ndarray, pool_labels: np.ndarray) -> np.ndarray:
    """How often each pool label occurs among the labels."""
    positions = _positions(labels, pool_labels)
    return np.bincount(positions[positions >= 0], minlength=len(pool_labels))
