"""Label pools: the labels of a step, and which of its (query, label) pairs are positive.

A pool is made from the batch's queries and the relevance matrix by arrays alone; randomness comes from the generator
that is passed in. Whatever brought a label into the pool, it is a positive of every query it is relevant to: a hard
negative of one query may be a positive of another. Queries that are left without a positive are no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix

from dexter.errors import UsageError
from dexter.positives import Positives
from dexter.processes import LabelShard


@dataclass(frozen=True, eq=False)
class Pool:
    """The labels of a step and the pairs of its queries and these labels."""

    labels: np.ndarray | None
    """int64 label ids, ascending, each once; None stands for every label, in order."""
    num_labels: int
    """Number of labels in the pool, on all ranks."""
    positives: Positives
    """Pairs that are positive: rows count in the batch, columns in the pool."""
    ignore: Positives | None = None
    """Relevant pairs that were not drawn: neither positive nor negative."""
    log_inclusion: np.ndarray | None = None
    """float32, log of the chance that a label is in the pool; subtracted from negatives' scores it corrects them."""


def all_labels(relevance: csr_matrix, rows: np.ndarray, *, rng: np.random.Generator, sample_positives: int = 0) -> Pool:
    """Every label. With `sample_positives`, that many positives count per query and its others are ignored.

    Args:
        relevance: queries x labels; values are weights.
        rows: the queries of the batch.
        rng: decides the draw.
        sample_positives: positives per query, drawn in proportion to their weights without replacement; 0: all.
    """
    pairs = _relevant_pairs(relevance, rows)
    num_labels = int(relevance.shape[1])
    if not sample_positives:
        return Pool(None, num_labels, pairs.with_columns(pairs.labels))
    drawn = _draw(pairs, sample_positives, rng)
    positives, ignore = (pairs.select(chosen) for chosen in (drawn, ~drawn))
    return Pool(None, num_labels, positives.with_columns(positives.labels), ignore.with_columns(ignore.labels))


def in_batch(
    relevance: csr_matrix,
    rows: np.ndarray,
    *,
    rng: np.random.Generator,
    sample_positives: int = 0,
    unsampled: Literal["positive", "ignore"] = "positive",
    num_random: int = 0,
    log_inclusion: np.ndarray | None = None,
) -> Pool:
    """The positives of the batch's queries, and labels drawn at random if asked for.

    Args:
        relevance: queries x labels; values are weights.
        rows: the queries of the batch.
        rng: decides the draws.
        sample_positives: positives that each query brings, drawn in proportion to their weights without replacement;
            0: all.
        unsampled: what a positive that its query did not draw is when another query brought it into the pool.
        num_random: labels drawn uniformly from all labels.
        log_inclusion: one number per label of the data set, passed on for the labels of the pool (see
            `log_inclusion_probability`).
    """
    if unsampled not in ("positive", "ignore"):
        raise UsageError(f"unsampled positives can be 'positive' or 'ignore', got {unsampled!r}")
    pairs = _relevant_pairs(relevance, rows)
    drawn = _draw(pairs, sample_positives or len(pairs.labels), rng)
    labels = _union([pairs.labels[drawn], _draw_labels(relevance, num_random, rng)])
    inclusion = None if log_inclusion is None else log_inclusion[labels]
    if unsampled == "positive":
        return Pool(labels, len(labels), _intersect(pairs, labels), log_inclusion=inclusion)
    positives, ignore = (_intersect(pairs.select(chosen), labels) for chosen in (drawn, ~drawn))
    return Pool(labels, len(labels), positives, ignore, inclusion)


def sampled(
    relevance: csr_matrix,
    rows: np.ndarray,
    hard_negatives: np.ndarray | None = None,
    *,
    rng: np.random.Generator,
    max_positives: int,
    num_random: int = 0,
    cap: int | None = None,
    fill: bool = False,
) -> Pool:
    """At most `max_positives` positives and the drawn hard negatives of each query, shared by the whole batch.

    A pool above the cap keeps drawn positives before hard negatives before random labels. Among the positives those
    come first that are relevant to the most queries of the batch, among the hard negatives those that the most queries
    drew; chance decides between equals. A pool below the cap may be filled with positives that nobody drew, in the
    order of the drawn ones.

    Args:
        relevance: queries x labels; values are weights.
        rows: the queries of the batch.
        hard_negatives: one row of label ids per query of the batch, -1 where there is none (see
            `draw_hard_negatives`).
        rng: decides the draws.
        max_positives: positives that each query brings, beta, drawn in proportion to their weights without replacement.
        num_random: labels drawn uniformly from all labels.
        cap: most labels in the pool; None: no limit.
        fill: whether positives that were not drawn take the places that are left below the cap.
    """
    if max_positives < 1 or (cap is not None and cap < 1):
        raise UsageError(f"a pool needs max_positives and cap of 1 or more: got {max_positives} and {cap}")
    if fill and cap is None:
        raise UsageError("a pool without a cap cannot be filled: give the number of labels that it should have")
    pairs = _relevant_pairs(relevance, rows)
    positive_labels = pairs.labels[_draw(pairs, max_positives, rng)]
    negative_labels = np.empty(0, dtype=np.int64) if hard_negatives is None else _present(hard_negatives)
    random_labels = _draw_labels(relevance, num_random, rng)
    labels = _union([positive_labels, negative_labels, random_labels])
    if cap is not None and len(labels) > cap:
        ranking = _priorities(labels, positive_labels, negative_labels, pairs.labels)
        labels = np.sort(labels[_first(ranking, cap, rng)])
    elif cap is not None and fill:
        labels = _union([labels, _further_positives(pairs.labels, labels, cap - len(labels), rng)])
    return Pool(labels, len(labels), _intersect(pairs, labels))


def with_extra_positives(
    pool: Pool, relevance: csr_matrix, rows: np.ndarray, *, rng: np.random.Generator, num_extra: int
) -> Pool:
    """A larger pool: the same labels and up to `num_extra` more positives of each query, drawn like the others.

    The classifier can afford them: its labels are looked up, not encoded. `np.searchsorted(larger.labels, pool.labels)`
    says where the labels of the pool are in the larger one.
    """
    if pool.labels is None:
        return pool
    pairs = _relevant_pairs(relevance, rows)
    outside = pairs.select(_positions(pairs.labels, pool.labels) < 0)
    extra = outside.labels[_draw(outside, num_extra, rng)]
    labels = _union([pool.labels, extra])
    return Pool(labels, len(labels), _intersect(pairs, labels))


def without_pairs(pool: Pool, unwanted: csr_matrix, rows: np.ndarray) -> Pool:
    """The pool with more pairs to ignore: those of `unwanted` (queries x labels) that are pairs of the batch.

    An item that must never be recommended for itself is no evidence against its label either.
    """
    pairs = _relevant_pairs(unwanted, rows)
    if not len(pairs.rows):
        return pool
    pairs = pairs._replace(weights=None)
    more = pairs.with_columns(pairs.labels) if pool.labels is None else _intersect(pairs, pool.labels)
    if pool.ignore is not None:
        both = [(more.rows, pool.ignore.rows), (more.columns, pool.ignore.columns)]
        more = Positives(*(np.concatenate([part.numpy() for part in parts]) for parts in both))
    return replace(pool, ignore=more)


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
    kept = torch.from_numpy(columns)
    return replace(
        pool,
        labels=labels,
        positives=pool.positives.renumber(columns=kept),
        ignore=None if pool.ignore is None else pool.ignore.renumber(columns=kept),
        log_inclusion=None if pool.log_inclusion is None else pool.log_inclusion[columns >= 0],
    )


def log_inclusion_probability(
    label_counts: np.ndarray, *, num_queries: int, batch_size: int, num_random: int = 0
) -> np.ndarray:
    """Log of the chance that a label which is not a positive of a query is in the pool of that query's batch.

    A pool of in-batch positives over-represents frequent labels. With p_l the chance of label l, the sum over the
    pool's negatives of exp(s_l - log p_l) is an unbiased estimate of the sum over all negatives. A query's own
    positives are always in the pool: their scores stay as they are.

    The batch of a query holds batch_size - 1 of the other num_queries - 1, all equally likely (a shuffled order, that
    is; clusters are not random batches). It misses all c queries of a label with chance
    prod_{j<c} (1 - (batch_size - 1) / (num_queries - 1 - j)), and the labels drawn at random miss it with chance
    1 - num_random / num_labels. This is exact when queries bring all their positives. When they bring a sample, give
    `expected_label_counts`: right to first order in batch_size / num_queries.

    Args:
        label_counts: for every label, the number of queries that would bring it.
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
    """How many queries bring each label on average when each brings at most `sample_positives` of its positives.

    A query with m positives brings each with chance min(1, sample_positives / m): exact for equal weights.
    """
    per_query = np.diff(relevance.indptr)
    chances = np.minimum(1.0, sample_positives / np.maximum(per_query, 1))
    return np.bincount(relevance.indices, weights=np.repeat(chances, per_query), minlength=relevance.shape[1])


class _Pairs(NamedTuple):
    """Relevant pairs of a batch: rows count in the batch, labels are ids."""

    rows: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None

    def select(self, chosen: np.ndarray) -> _Pairs:
        weights = None if self.weights is None else self.weights[chosen]
        return _Pairs(self.rows[chosen], self.labels[chosen], weights)

    def with_columns(self, columns: np.ndarray) -> Positives:
        return Positives(self.rows, columns, self.weights)


def _relevant_pairs(relevance: csr_matrix, rows: np.ndarray) -> _Pairs:
    """All relevant pairs of the batch's queries, with weights unless all are 1."""
    # Indexing the matrix does the same in several times the time.
    starts = relevance.indptr[rows].astype(np.int64)
    counts = relevance.indptr[rows + 1] - starts
    pair_rows = np.repeat(np.arange(len(rows)), counts)
    first_of_row = np.cumsum(counts) - counts
    places = np.arange(len(pair_rows)) + (starts - first_of_row)[pair_rows]
    weights = relevance.data[places]
    labels = relevance.indices[places].astype(np.int64)
    return _Pairs(pair_rows, labels, None if bool((weights == 1).all()) else weights)


def _draw(pairs: _Pairs, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Mask of at most `num_draws` pairs of each query, drawn in proportion to their weights without replacement."""
    counts = np.bincount(pairs.rows)
    if not len(counts) or counts.max() <= num_draws:
        return np.ones(len(pairs.rows), dtype=bool)
    # The pairs whose exponential clock of rate `weight` rings first are such a draw (Efraimidis and Spirakis).
    times = rng.exponential(size=len(pairs.rows))
    if pairs.weights is not None:
        times /= pairs.weights
    # Times are mapped into [0, 1), so that one sort orders them within rows.
    order = np.argsort(pairs.rows + times / (1 + times) * (1 - 2.0**-20))
    starts = np.cumsum(counts) - counts
    drawn = np.zeros(len(pairs.rows), dtype=bool)
    drawn[order] = np.arange(len(order)) - starts[pairs.rows[order]] < num_draws
    return drawn


def _draw_labels(relevance: csr_matrix, num_random: int, rng: np.random.Generator) -> np.ndarray:
    """Labels drawn uniformly from all, without replacement."""
    num_labels = int(relevance.shape[1])
    if not num_random:
        return np.empty(0, dtype=np.int64)
    return rng.choice(num_labels, min(num_random, num_labels), replace=False, shuffle=False)


def _present(hard_negatives: np.ndarray) -> np.ndarray:
    """Label ids without the gaps."""
    return hard_negatives[hard_negatives >= 0].astype(np.int64)


def _union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Label ids of all parts, ascending, each once."""
    # np.unique takes ten times as long: it hashes.
    labels = np.sort(np.concatenate(parts))
    return labels[np.concatenate([[True], labels[1:] != labels[:-1]])] if len(labels) else labels


def _positions(labels: np.ndarray, pool_labels: np.ndarray) -> np.ndarray:
    """Where each label is in the pool; -1 where it is not."""
    if not len(pool_labels):
        return np.full(len(labels), -1)
    # Looking labels up in ascending order is several times faster than in any order.
    order = np.argsort(labels)
    ascending = labels[order]
    found = np.minimum(np.searchsorted(pool_labels, ascending), len(pool_labels) - 1)
    positions = np.empty(len(labels), dtype=np.int64)
    positions[order] = np.where(pool_labels[found] == ascending, found, -1)
    return positions


def _intersect(pairs: _Pairs, pool_labels: np.ndarray) -> Positives:
    """The pairs whose label is in the pool."""
    positions = _positions(pairs.labels, pool_labels)
    inside = positions >= 0
    return pairs.select(inside).with_columns(positions[inside])


def _priorities(
    labels: np.ndarray, positive_labels: np.ndarray, negative_labels: np.ndarray, relevant_labels: np.ndarray
) -> np.ndarray:
    """How much each pool label counts under a cap: drawn positives by in-batch count, then negatives by count."""
    relevant_counts, positive_counts, negative_counts = (
        _count(part, labels) for part in (relevant_labels, positive_labels, negative_labels)
    )
    above_negatives = negative_counts.max(initial=0)
    return np.where(positive_counts > 0, above_negatives + relevant_counts, negative_counts)


def _further_positives(
    relevant_labels: np.ndarray, pool_labels: np.ndarray, room: int, rng: np.random.Generator
) -> np.ndarray:
    """Labels that are relevant in the batch and not in the pool, at most `room`: by in-batch count, then by chance."""
    outside = relevant_labels[_positions(relevant_labels, pool_labels) < 0]
    labels = _union([outside])
    return np.asarray(labels[_first(_count(outside, labels), room, rng)])


def _first(ranking: np.ndarray, num_places: int, rng: np.random.Generator) -> np.ndarray:
    """Where the highest whole numbers of a ranking are, so many of them; chance decides between equals."""
    return np.asarray(np.argsort(rng.random(len(ranking)) - ranking)[:num_places])


def _count(labels: np.ndarray, pool_labels: np.ndarray) -> np.ndarray:
    """How often each pool label occurs among the labels."""
    positions = _positions(labels, pool_labels)
    return np.bincount(positions[positions >= 0], minlength=len(pool_labels))
