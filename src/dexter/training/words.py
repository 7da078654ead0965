"""Learn what words say for labels (`dexter.model.word_weights`) from the training queries, once the encoder is trained.

1. Training queries near each other make groups: each goes to the nearest of some random ones.
2. Of each query, its own labels and the best others that the model finds among the labels of its group are told apart.
3. Logistic regression of whether a label is right on the words of the query, by Adagrad, for some epochs: some labels
   after the others, because labels share nothing and the weights of some fit a processor's cache.

Shapes: M training queries, L labels, D dimensions, V words, B queries of a group, P pairs of a query and a label,
W words of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.index.exact import slices
from dexter.model.word_weights import BIAS, MAX_WEIGHTS, WordWeights, places

_WEIGHTS_PER_LABEL = (8.0, 0.75)
"""A label whose pairs have n words has 8 n^0.75 weights: the rarer it is, the fewer of its words come again. All have
fewer where they would have more than `MAX_WEIGHTS` together."""
_GROUP = 256
"""Queries of a group."""
_BLOCK = 4_096
"""Queries whose group is looked for at a time."""
_WRONG = 10
"""Wrong labels of a query at most."""
_EPOCHS = 3
_LEARNING_RATE = 0.3
_EPSILON = 1e-6
"""The first of the squared gradients that Adagrad adds up."""
_BLOCK_WORDS = 2**18
"""Words of the pairs that are learned from together, about."""
_STEPS = 32
"""Steps of an epoch at least."""
_STEP_PAIRS = 256
"""Pairs of a step at most: a frequent label has all of them."""


class Pairs(NamedTuple):
    """Pairs of a training query and a label, in order of label."""

    queries_P: NDArray[np.int64]
    labels_P: NDArray[np.int64]
    right_P: NDArray[np.bool_]


def choose_pairs(
    directions_MD: NDArray[np.float32],
    to_search: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    labels_LD: NDArray[np.float32],
    relevance: csr_matrix,
    exclude: csr_matrix | None = None,
    *,
    seed: int = 0,
) -> Pairs:
    """Choose for each training query its labels, and the best others among those of queries near it.

    Args:
        directions_MD: vectors by which queries are near each other.
        to_search: makes of some of them the vectors that labels are searched with.
        labels_LD: the vectors of the labels.
        relevance: queries x labels.
        exclude: queries x labels; pairs that are neither right nor wrong.
        seed: chooses the queries that groups are made around.
    """
    num_queries = relevance.shape[0]
    right = np.repeat(np.arange(num_queries), np.diff(relevance.indptr)) + relevance.indices * np.int64(num_queries)
    wrong = [np.empty(0, np.int64)]
    for rows in _groups(directions_MD, seed):
        unwanted = relevance[rows] if exclude is None else relevance[rows] + exclude[rows]
        labels = np.unique(relevance[rows].indices)
        scores_BL = to_search(directions_MD[rows]) @ labels_LD[labels].T
        scores_BL[unwanted[:, labels].nonzero()] = -np.inf
        best_BK = np.argpartition(-scores_BL, min(_WRONG, len(labels)) - 1, axis=1)[:, :_WRONG] if len(labels) else None
        if best_BK is not None:
            is_wrong = np.take_along_axis(scores_BL, best_BK, axis=1) > -np.inf
            wrong.append((rows[:, None] + labels[best_BK] * np.int64(num_queries))[is_wrong])
    keys = np.concatenate([right, *wrong])
    order = np.argsort(keys, kind="stable")
    labels_P, queries_P = np.divmod(keys[order], num_queries)
    return Pairs(queries_P, labels_P, order < len(right))


def _groups(directions_MD: NDArray[np.float32], seed: int) -> Iterator[NDArray[np.int64]]:
    num_groups = max(1, len(directions_MD) // _GROUP)
    chosen = np.random.default_rng(seed).choice(len(directions_MD), num_groups, replace=False)
    centres_DG = directions_MD[chosen].T
    nearest = [np.argmax(directions_MD[part] @ centres_DG, axis=1) for part in slices(len(directions_MD), _BLOCK)]
    order = np.argsort(np.concatenate(nearest), kind="stable")
    for part in slices(len(order), _GROUP):
        yield order[part]


def learn_word_weights(words_MV: csr_matrix, codes_V: NDArray[np.int64], pairs: Pairs, num_labels: int) -> WordWeights:
    """Fit the weights to pairs of training queries and labels.

    Args:
        words_MV: the TF-IDF of the training queries' words.
        codes_V: the CRC-32 of each word.
        pairs: what is to be told apart.
        num_labels: labels of the model.
    """
    lengths_P = np.diff(words_MV.indptr).astype(np.int64)[pairs.queries_P]
    words_L = np.bincount(pairs.labels_P, weights=lengths_P, minlength=num_labels)
    factor, power = _WEIGHTS_PER_LABEL
    wanted_L = factor * words_L**power
    sizes_L = np.maximum(1, wanted_L * min(1.0, MAX_WEIGHTS / max(1.0, wanted_L.sum()))).astype(np.int64)
    starts_L = np.cumsum(sizes_L) - sizes_L
    table, squares = np.zeros(sizes_L.sum(), np.float32), np.full(sizes_L.sum(), _EPSILON, np.float32)
    generator = np.random.default_rng(0)
    for block in np.split(np.arange(len(lengths_P)), _block_ends(lengths_P)):
        pairs_P = generator.permutation(block)
        queries_P, labels_P, runs_P = pairs.queries_P[pairs_P], pairs.labels_P[pairs_P], lengths_P[pairs_P]
        words_W = _spread(words_MV.indptr[queries_P], runs_P)
        codes_W, weights_W = codes_V[words_MV.indices[words_W]], words_MV.data[words_W]
        places_W = places(codes_W, np.repeat(starts_L[labels_P], runs_P), np.repeat(sizes_L[labels_P], runs_P))
        _fit(table, squares, places_W, weights_W, runs_P, pairs.right_P[pairs_P])
    # As they are stored, so that validation sees what predictions will.
    return WordWeights(table.astype(np.float16), starts_L, sizes_L)


def _block_ends(lengths_P: NDArray[np.int64]) -> NDArray[np.int64]:
    ends_P = np.cumsum(lengths_P)
    num_blocks = -(-int(lengths_P.sum()) // _BLOCK_WORDS)
    return np.searchsorted(ends_P, np.arange(1, num_blocks) * _BLOCK_WORDS)


def _fit(
    table: NDArray[np.float32],
    squares: NDArray[np.float32],
    places_W: NDArray[np.int64],
    weights_W: NDArray[np.float32],
    lengths_P: NDArray[np.int64],
    right_P: NDArray[np.bool_],
) -> None:
    """Change the weights by all epochs over some pairs, given the squared gradients of each weight so far.

    The places and weights of the words of all pairs stand one after the other, as many as each pair has.
    """
    ends = np.cumsum(np.append(0, lengths_P))
    size = min(_STEP_PAIRS, 1 + len(lengths_P) // _STEPS)
    for _ in range(_EPOCHS):
        for part in slices(len(lengths_P), size):
            words = slice(ends[part.start], ends[part.stop])
            places_B, weights_B, runs = places_W[words], weights_W[words], lengths_P[part]
            logits = _sum_runs(table[places_B] * weights_B, runs) + BIAS
            errors = (1 / (1 + np.exp(-logits)) - right_P[part]).astype(np.float32)
            gradients_B = np.repeat(errors, runs) * weights_B
            np.add.at(squares, places_B, gradients_B * gradients_B)
            gradients_B *= np.float32(-_LEARNING_RATE)
            gradients_B /= np.sqrt(squares[places_B])
            np.add.at(table, places_B, gradients_B)


def _spread(starts_P: NDArray[np.integer], lengths_P: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the places of runs of some lengths that begin at some places, one run after the other."""
    ends_P = np.cumsum(lengths_P)
    places: NDArray[np.int64] = np.arange(int(lengths_P.sum())) + np.repeat(starts_P - ends_P + lengths_P, lengths_P)
    return places


def _sum_runs(values_W: NDArray[np.float32], lengths_P: NDArray[np.integer]) -> NDArray[np.float32]:
    """Add up the values of each run; 0 for an empty one."""
    sums_P, filled = np.zeros(len(lengths_P), np.float32), lengths_P > 0
    if filled.any():
        sums_P[filled] = np.add.reduceat(values_W, (np.cumsum(lengths_P) - lengths_P)[filled])
    return sums_P
