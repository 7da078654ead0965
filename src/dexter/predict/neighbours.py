"""Neighbours: the training queries nearest to a text, which are shown as examples and vote for their labels.

    vote_l  = sum of the weights of the nearest queries that have label l;  weights = softmax(cosine / temperature)
    score_l = the model's score + weight * (the model's temperature) * vote_l

Queries are near by the encoder's vectors or by the words they share (`dexter.model.lexical`); each kind votes with its
own settings, and both votes are added.

Examples, which people labelled after training, vote too, also where tuning let no training query vote. They are few:
a softmax would give even a far one the whole vote. Their weights are therefore absolute,

    weight = exp((cosine - 1) / temperature), divided by their sum where that is above 1

so that a text which is nearly an example gets its labels, and other texts keep theirs (docs/annotation.md has figures).

A label without votes keeps its score, and votes are never negative. The k best labels are therefore among the k best
of the model and the labels with votes; a label found only by votes gets its exact model score, so the result equals
scoring every label. The idea is that of RAE-XMC and PEFA. Adding votes to probabilities or logarithms instead of
scores, and letting label texts vote beside the queries, did worse.

Shapes: N texts, L labels, D dimensions, K places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError
from dexter.index.exact import NO_KEY, as_rows, largest, make_keys, nothing_found, scores_of, write_found
from dexter.model.lexical import LexicalIndex
from dexter.model.model import Model
from dexter.model.training_queries import TrainingQueries
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_PAIRS = 2**9
"""Query-label pairs that are scored at a time: their vectors fit in a cache."""
_STRONG = 0.2
"""Votes of at least this share of a text's strongest are added first; with them most others are out of reach."""
_TINY = np.finfo(np.float32).tiny
_ROUNDING = 1e-3
"""More than two computations of a score differ by."""


@dataclass(frozen=True, kw_only=True)
class VoteSettings:
    """How training queries vote."""

    neighbours: int
    """Training queries that vote on each text."""
    temperature: float
    """Cosines are divided by this before the softmax that makes them weights of votes."""
    weight: float
    """What a unanimous vote adds to a score, in units of the model's temperature."""


@dataclass(frozen=True)
class Neighbour:
    """A training query near a text."""

    id: str
    text: str
    """Its first 300 characters."""
    similarity: float
    """The cosine of the two."""
    labels: tuple[str, ...]
    """The ids of its labels."""
    by: Literal["vectors", "words"] = "vectors"
    """What the cosine is of: the encoder's vectors, or the TF-IDF weights of words."""


DEFAULT_VOTES = VoteSettings(neighbours=20, temperature=0.06, weight=4.0)
"""The settings where none were tuned, and the start of tuning."""
DEFAULT_LEXICAL_VOTES = VoteSettings(neighbours=20, temperature=0.1, weight=4.0)
"""The same for the queries that are nearest by words; they vote only if that was tuned."""


EXAMPLE_VOTES = VoteSettings(neighbours=20, temperature=0.06, weight=20.0)
"""How examples vote: an exact copy adds `weight` temperatures of the model to the score of each of its labels."""
_FAINT = 1e-3
"""Examples with less weight than this do not vote."""


def find_neighbours(
    model: Model, representations_ND: NDArray[np.float32], k: int, *, label: int | None = None
) -> list[list[Neighbour]]:
    """Find the k training queries most similar to each text, best first; with `label` (a row) only those that have it.

    Raises `UsageError` where the model keeps no training queries.
    """
    return _describe(model, kept_queries(model).nearest(representations_ND, k, label=label), "vectors")


def find_lexical_neighbours(
    model: Model, texts: Sequence[str], k: int, *, label: int | None = None
) -> list[list[Neighbour]]:
    """The same by the words that they share with each text; at most k, without those that share none."""
    among = None if label is None else kept_queries(model).queries_of(label)
    found = _describe(model, lexical_index(model).nearest(texts, k, among=among), "words")
    return [[neighbour for neighbour in near if neighbour.similarity > 0] for near in found]


def _describe(model: Model, found: TopK, by: Literal["vectors", "words"]) -> list[list[Neighbour]]:
    kept, ids = kept_queries(model), model.labels.ids
    return [
        [
            Neighbour(
                kept.uids[row], kept.texts[row], float(cosine), tuple(ids[column] for column in kept.labels_of(row)), by
            )
            for row, cosine in zip(rows, cosines, strict=True)
        ]
        for rows, cosines in zip(found.ids, found.scores, strict=True)
    ]


def kept_queries(model: Model) -> TrainingQueries:
    """Return the training queries that the model keeps, or raise where it keeps none."""
    if model.training_queries is None:
        raise UsageError(
            "this model was trained without keeping its training queries: train with scoring.neighbours at least "
            "their number"
        )
    return model.training_queries


def lexical_index(model: Model) -> LexicalIndex:
    """Return the words of the training queries that the model keeps, or raise where it keeps none."""
    lexical = kept_queries(model).lexical
    if lexical is None:
        raise UsageError("this model was trained without keeping the words of its training queries: train it again")
    return lexical


def count_votes(
    training_queries: TrainingQueries, rows_NK: NDArray[np.int64], weights_NK: NDArray[np.float32]
) -> csr_matrix:
    """Count the votes of some training queries (their rows, for each text) with some weights: texts x labels."""
    # Imported here because one text does not need it, and it takes a while.
    from scipy.sparse import csr_matrix

    num_texts, num_neighbours = rows_NK.shape
    row_starts = np.arange(num_texts + 1) * num_neighbours
    chosen = csr_matrix((weights_NK.ravel(), rows_NK.ravel(), row_starts), shape=(num_texts, len(training_queries)))
    votes: csr_matrix = chosen @ training_queries.relevance
    return votes


def vote_weights(cosines_NK: NDArray[np.float32], temperature: float) -> NDArray[np.float32]:
    """Return the weights of votes: the softmax over the cosines of each text, of which the first is the largest.

    Queries without a positive cosine do not vote: a text without a known token, or without a word in common with any
    of them, gets no votes.
    """
    weights_NK: NDArray[np.float32] = np.exp((cosines_NK - cosines_NK[:, :1]) / temperature, dtype=np.float32)
    weights_NK *= cosines_NK > 0
    weights_NK /= np.maximum(weights_NK.sum(axis=1, keepdims=True), _TINY)
    return weights_NK


def example_weights(cosines_NK: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the weights of the votes of examples by their cosines, at most 1 in sum for each text."""
    weights_NK: NDArray[np.float32] = np.exp((cosines_NK - 1) / EXAMPLE_VOTES.temperature, dtype=np.float32)
    weights_NK[weights_NK < _FAINT] = 0
    weights_NK /= np.maximum(weights_NK.sum(axis=1, keepdims=True), 1)
    return weights_NK


class LabelVotes(NamedTuple):
    """The votes on one text."""

    labels: NDArray[np.integer]
    """Labels with votes, ascending."""
    gains: NDArray[np.float32]
    """What the votes add to the score of each, more than 0."""

    def select(self, kept: NDArray[np.bool_]) -> LabelVotes:
        """Return the votes for some of the labels."""
        return LabelVotes(self.labels[kept], self.gains[kept])


def count_votes_on_one(
    training_queries: TrainingQueries, voters: NDArray[np.int64], weights: NDArray[np.float32]
) -> LabelVotes:
    """Count the votes of some training queries with some weights, as `count_votes` does for many texts."""
    starts = training_queries.label_starts[voters]
    lengths = training_queries.label_starts[voters + 1] - starts
    ends = lengths.cumsum()
    places = np.arange(ends[-1]) + (starts - ends + lengths).repeat(lengths)
    return _sum_by_label(training_queries.label_rows[places], weights.repeat(lengths))


def add_label_votes(parts: Sequence[LabelVotes]) -> LabelVotes:
    """Add up the votes of several kinds."""
    return _sum_by_label(
        np.concatenate([part.labels for part in parts]), np.concatenate([part.gains for part in parts])
    )


def _sum_by_label(labels: NDArray[np.integer], gains: NDArray[np.float32]) -> LabelVotes:
    """Add up the gains of equal labels, and leave out those without any."""
    is_positive = gains > 0
    if not is_positive.all():
        labels, gains = labels[is_positive], gains[is_positive]
    if not len(labels):
        return LabelVotes(labels, gains)
    order = labels.argsort(kind="stable")
    labels = labels[order]
    is_first = np.empty(len(labels), dtype=np.bool_)
    is_first[0] = True
    np.not_equal(labels[1:], labels[:-1], out=is_first[1:])
    firsts = is_first.nonzero()[0]
    return LabelVotes(labels[firsts], np.add.reduceat(gains[order], firsts))


def add_votes_to_one(
    found: TopK, votes: LabelVotes, query_D: NDArray[np.float32], labels_LD: NDArray[np.float32], *, exact: bool
) -> TopK:
    """Do for one text what `add_votes` does for many; `votes` are of labels that may be returned."""
    labels, gains = votes
    if not len(labels):
        return found
    ids, scores = found.ids[0], found.scores[0].copy()
    places = np.minimum(np.searchsorted(labels, ids), len(labels) - 1)
    is_listed = labels[places] == ids
    scores[is_listed] += gains[places[is_listed]]
    is_new = np.ones(len(labels), dtype=np.bool_)
    is_new[places[is_listed]] = False
    if exact:
        is_new &= found.scores[0, -1] + gains + _ROUNDING >= scores.min()
    new = labels[is_new]
    ids = np.concatenate([ids, new])
    scores = np.concatenate([scores, labels_LD[new] @ query_D + gains[is_new]])
    order = np.lexsort((ids, -scores))[None, : found.ids.shape[1]]
    return TopK(ids[order], scores[order])


def add_votes(
    found: TopK,
    votes: csr_matrix,
    queries_ND: NDArray[np.float32],
    labels_LD: NDArray[np.float32],
    *,
    k: int | None = None,
    exclude: csr_matrix | None = None,
    exact: bool = True,
) -> TopK:
    """Return the k best labels once the votes are added to the scores, given the k best or more of the model alone.

    Args:
        found: the model's best labels of each text and their scores. The more, the fewer others need a score.
        votes: texts x labels, never negative, scaled as the scores are.
        queries_ND: the texts' vectors, to score labels that only votes found.
        labels_LD: the labels' vectors.
        k: labels per text; as many as were found if left out.
        exclude: texts x labels; a stored entry marks a pair that is never returned.
        exact: whether `found` has the best indeed: then labels whose votes cannot lift them from below the last of
            these into the result need no score.
    """
    shape = num_texts, num_places = len(found.ids), k or found.ids.shape[1]
    if not num_texts:
        return nothing_found(*shape)
    text_ids, num_labels = np.arange(num_texts), len(labels_LD)
    known = np.sort((text_ids[:, None] * num_labels + found.ids)[found.ids >= 0])
    if exclude is not None:
        known = np.sort(np.concatenate([known, _pair_keys(exclude)]))
    best_NK = _keys(found.ids, found.scores + _values_at(votes, found.ids))
    voted = np.repeat(text_ids, np.diff(votes.indptr))
    strongest_N = np.zeros(num_texts, dtype=votes.dtype)
    np.maximum.at(strongest_N, voted, votes.data)
    is_strong = votes.data >= _STRONG * strongest_N[voted]
    last_N = np.maximum(found.scores[:, -1], np.finfo(np.float32).min)
    for part in (is_strong, ~is_strong):
        best_NK = largest(best_NK, num_places)
        lowest_N = best_NK.min(axis=1) if best_NK.shape[1] == num_places else np.full(num_texts, NO_KEY)
        if exact:
            part &= votes.data >= (scores_of(lowest_N) - last_N - _ROUNDING)[voted]
        entries = np.flatnonzero(part)
        pairs = voted[entries] * num_labels + votes.indices[entries]
        is_new = ~_are_among(pairs, known)
        entries = entries[is_new]
        rows, labels = np.divmod(pairs[is_new], num_labels)
        keys = make_keys(_score_pairs(rows, labels, queries_ND, labels_LD) + votes.data[entries], labels)
        is_better = keys > lowest_N[rows]
        new_NK = as_rows(keys[is_better], np.bincount(rows[is_better], minlength=num_texts), num_places)
        best_NK = np.concatenate([best_NK, new_NK], axis=1)
    return _best(best_NK, shape)


def _values_at(values: csr_matrix, ids_NK: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the values of some columns of each row; that of a column below 0 means nothing."""
    rows = np.repeat(np.arange(len(ids_NK)), ids_NK.shape[1])
    return np.asarray(values[rows, np.maximum(ids_NK, 0).ravel()]).reshape(ids_NK.shape)


def _are_among(keys: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each key is among the known ones, which are ascending."""
    if not len(known):
        return np.zeros(len(keys), dtype=np.bool_)
    return np.asarray(known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys)


def _pair_keys(pairs: csr_matrix) -> NDArray[np.int64]:
    """Number each stored pair: row x number of columns + column."""
    rows = np.repeat(np.arange(pairs.shape[0], dtype=np.int64), np.diff(pairs.indptr))
    return rows * pairs.shape[1] + pairs.indices


def _score_pairs(
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    queries_ND: NDArray[np.float32],
    labels_LD: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Compute the inner products of some pairs of text and label, a bounded number at a time."""
    scores = np.empty(len(rows), dtype=np.float32)
    for start in range(0, len(rows), _PAIRS):
        part = slice(start, start + _PAIRS)
        scores[part] = np.einsum("pd,pd->p", queries_ND[rows[part]], labels_LD[labels[part]])
    return scores


def score_again(found: TopK, queries_ND: NDArray[np.float32], labels_LD: NDArray[np.float32], *, k: int) -> TopK:
    """Return the k best of the labels that were found for each text by the scores of other vectors."""
    num_texts, num_places = found.ids.shape
    rows, labels = np.repeat(np.arange(num_texts), num_places), np.maximum(found.ids, 0).ravel()
    scores_NK = _score_pairs(rows, labels, queries_ND, labels_LD).reshape(found.ids.shape)
    return _best(_keys(found.ids, scores_NK), (num_texts, min(k, num_places)))


def _keys(ids_NK: NDArray[np.int64], scores_NK: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return what orders labels by score and then by id; an id below 0 is that of an empty place."""
    return np.where(ids_NK >= 0, make_keys(scores_NK, ids_NK), NO_KEY)


def _best(keys_NK: NDArray[np.int64], shape: tuple[int, int]) -> TopK:
    """Return the best labels of each text, in a result of the given shape."""
    best = nothing_found(*shape)
    write_found(best, slice(None), np.sort(largest(keys_NK, shape[1]), axis=1)[:, ::-1])
    return best
