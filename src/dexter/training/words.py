"""Learn what words say for labels (`dexter.model.word_weights`) from the training queries, once the encoder is trained.

1. Training queries near each other make groups: each goes to the nearest of some random ones.
2. Of each query, its own labels and the best others that the model finds among the labels of its group are told apart.
3. Logistic regression of whether a label is right on the words of the query, by Adagrad, for some epochs.

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
from dexter.model.word_weights import BIAS, MAX_WEIGHTS, WordWeights

_MIN_WEIGHTS = 2**16
"""Weights at least; else one for two words of pairs, rounded up to a power of two, up to `MAX_WEIGHTS`."""
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
_STEP_QUERIES, _STEP_WORDS = 512, 2**19
"""Queries of a step at most, and words of their pairs, about."""


class Pairs(NamedTuple):
    """Pairs of a training query and a label, in order of query."""

    starts_M: NDArray[np.int64]
    """Where the pairs of each query begin, and the end of the last."""
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
    num_queries, num_labels = relevance.shape
    right = np.repeat(np.arange(num_queries), np.diff(relevance.indptr)) * num_labels + relevance.indices
    wrong = [np.empty(0, np.int64)]
    for rows in _groups(directions_MD, seed):
        unwanted = relevance[rows] if exclude is None else relevance[rows] + exclude[rows]
        labels = np.unique(relevance[rows].indices)
        scores_BL = to_search(directions_MD[rows]) @ labels_LD[labels].T
        scores_BL[unwanted[:, labels].nonzero()] = -np.inf
        best_BK = np.argpartition(-scores_BL, min(_WRONG, len(labels)) - 1, axis=1)[:, :_WRONG] if len(labels) else None
        if best_BK is not None:
            is_wrong = np.take_along_axis(scores_BL, best_BK, axis=1) > -np.inf
            wrong.append((rows[:, None] * num_labels + labels[best_BK])[is_wrong])
    keys = np.concatenate([right, *wrong])
    order = np.argsort(keys, kind="stable")
    starts_M = np.searchsorted(keys[order], np.arange(num_queries + 1) * num_labels)
    return Pairs(starts_M, keys[order] % num_labels, order < len(right))


def _groups(directions_MD: NDArray[np.float32], seed: int) -> Iterator[NDArray[np.int64]]:
    num_groups = max(1, len(directions_MD) // _GROUP)
    chosen = np.random.default_rng(seed).choice(len(directions_MD), num_groups, replace=False)
    centres_DG = directions_MD[chosen].T
    nearest = [np.argmax(directions_MD[part] @ centres_DG, axis=1) for part in slices(len(directions_MD), _BLOCK)]
    order = np.argsort(np.concatenate(nearest), kind="stable")
    for part in slices(len(order), _GROUP):
        yield order[part]


def learn_word_weights(words_MV: csr_matrix, codes_V: NDArray[np.uint64], pairs: Pairs, num_labels: int) -> WordWeights:
    """Fit the weights to pairs of training queries and labels.

    Args:
        words_MV: the TF-IDF of the training queries' words.
        codes_V: the CRC-32 of each word.
        pairs: what is to be told apart.
        num_labels: labels of the model.
    """
    lengths_M, num_pairs_M = np.diff(words_MV.indptr).astype(np.int64), np.diff(pairs.starts_M)
    num_words_M = lengths_M * num_pairs_M
    num_weights = min(MAX_WEIGHTS, max(_MIN_WEIGHTS, 1 << int(num_words_M.sum() // 2).bit_length()))
    # A weight stands beside the sum of its squared gradients: one is read and written with the other.
    table, squares = np.tile(np.array([0, _EPSILON], np.float32), (num_weights, 1)).T
    fitted = WordWeights(table, np.arange(num_labels))
    for rows in _steps(num_words_M):
        pairs_P = _spread(pairs.starts_M[rows], num_pairs_M[rows])
        queries_P, labels_P = np.repeat(rows, num_pairs_M[rows]), pairs.labels_P[pairs_P]
        lengths_P = lengths_M[queries_P]
        words_W = _spread(words_MV.indptr[queries_P], lengths_P)
        places_W = fitted.places(codes_V[words_MV.indices[words_W]], np.repeat(labels_P, lengths_P))
        weights_W = words_MV.data[words_W]
        logits_P = _sum_runs(table[places_W] * weights_W, lengths_P) + BIAS
        errors_P = (1 / (1 + np.exp(-logits_P)) - pairs.right_P[pairs_P]).astype(np.float32)
        gradients_W = np.repeat(errors_P, lengths_P) * weights_W
        np.add.at(squares, places_W, gradients_W * gradients_W)
        np.subtract.at(table, places_W, np.float32(_LEARNING_RATE) * gradients_W / np.sqrt(squares[places_W]))
    # As they are stored, so that validation sees what predictions will.
    return WordWeights(table.astype(np.float16), fitted.numbers_L)


def _steps(num_words_M: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the queries of each step of all epochs, in random order, given how many words the pairs of each have."""
    generator = np.random.default_rng(0)
    size = int(max(1, min(_STEP_QUERIES, _STEP_WORDS / max(1.0, float(num_words_M.mean())))))
    for _ in range(_EPOCHS):
        order = generator.permutation(len(num_words_M))
        for part in slices(len(order), size):
            yield order[part]


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
