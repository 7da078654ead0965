"""Rank labels: the one path from encoded texts to the best labels, for predictions, evaluation, tuning and the service.

Shapes: N texts, D dimensions, K labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError
from dexter.index import Index, search
from dexter.model.model import Model
from dexter.predict.neighbours import (
    LabelVotes,
    VoteSettings,
    add_votes,
    add_votes_to_one,
    count_votes,
    count_votes_on_one,
    kept_queries,
    lexical_index,
    vote_weights,
)
from dexter.types import HeadName, TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

MAX_SEARCHED_PAST = 64
"""If a request leaves out at most this many labels, the index searches past them."""
_LABELS_AT_A_TIME = 2**16
"""Labels of a request whose vectors are copied at a time."""


@dataclass(frozen=True, kw_only=True)
class RankingChoice:
    """What a ranking depends on besides the model: chosen on validation, stored with the run."""

    head: HeadName
    """Which head of the model scores the labels."""
    dial: float
    """Weight of the label prior, from 0 (rare labels up) to 1 (common labels up)."""
    votes: VoteSettings | None = None
    """How the training queries vote that are nearest by their vectors; None: they do not."""
    lexical_votes: VoteSettings | None = None
    """How the training queries vote that are nearest by their words; None: they do not."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dial <= 1.0:
            raise UsageError(f"the dial is {self.dial}: expected a number from 0 (no label prior) to 1 (all of it)")

    @property
    def uses_neighbours(self) -> bool:
        """Whether the nearest training queries vote."""
        return self.votes is not None or self.lexical_votes is not None


class Voters(NamedTuple):
    """The training queries that vote on texts: their rows and cosines, best first; None where a kind does not vote."""

    by_vectors: TopK | None
    by_words: TopK | None

    def with_settings(self, choice: RankingChoice) -> Iterator[tuple[str, TopK, VoteSettings]]:
        """Yield the name of each kind that votes, the queries that do, and how."""
        kinds = (
            ("neighbours", self.by_vectors, choice.votes),
            ("neighbours by words", self.by_words, choice.lexical_votes),
        )
        for name, nearest, settings in kinds:
            if nearest is not None and settings is not None:
                first = slice(settings.neighbours)
                yield name, TopK(nearest.ids[:, first], nearest.scores[:, first]), settings


def find_voters(
    model: Model, texts: Sequence[str], representations_ND: NDArray[np.float32], choice: RankingChoice
) -> Voters:
    """Find the training queries that vote on texts, whose representations `Model.encode_queries` gave."""
    votes, lexical = choice.votes, choice.lexical_votes
    return Voters(
        None if votes is None else kept_queries(model).nearest(representations_ND, votes.neighbours),
        None if lexical is None else lexical_index(model).nearest(texts, lexical.neighbours),
    )


def vote_parts(model: Model, voters: Voters, choice: RankingChoice) -> dict[str, csr_matrix]:
    """Return what each kind of votes adds to the scores, by name, texts x labels."""
    parts = {}
    for name, nearest, settings in voters.with_settings(choice):
        parts[name] = count_votes(kept_queries(model), nearest, settings.temperature)
        parts[name].data *= np.float32(settings.weight * model.head.temperature)
    return parts


def votes_on_one(model: Model, voters: Voters, choice: RankingChoice) -> LabelVotes:
    """Return what all votes add to the scores of one text."""
    rows, weights = [], []
    for _, nearest, settings in voters.with_settings(choice):
        rows.append(nearest.ids[0])
        weights.append(
            vote_weights(nearest.scores, settings.temperature)[0] * np.float32(settings.weight * model.head.temperature)
        )
    return count_votes_on_one(kept_queries(model), np.concatenate(rows), np.concatenate(weights))


def rank(
    model: Model,
    index: Index,
    representations_ND: NDArray[np.float32],
    choice: RankingChoice,
    k: int,
    *,
    voters: Voters | None,
    exclude: csr_matrix | None = None,
    allowed: NDArray[np.int64] | None = None,
) -> TopK:
    """Return the k best labels of each text, all labels where there are fewer.

    Args:
        model: the encoder's heads and the labels.
        index: the label vectors of the chosen head and dial.
        representations_ND: the texts, as `Model.encode_queries` gives them.
        choice: head, dial and votes.
        k: labels per text.
        voters: the training queries that vote, as `find_voters` gives them; None where none do.
        exclude: texts x labels; a stored entry marks a pair that is never returned.
        allowed: rows of the labels that may be returned, ascending; None: all. If few labels are left out, the index
            searches past them, otherwise the allowed labels are scored exactly.
    """
    queries_ND = model.search_vectors(representations_ND, head=choice.head, dial=choice.dial)
    num_labels = len(model.labels.ids)
    if allowed is None:
        found = index.search(queries_ND, min(k, num_labels), exclude=exclude)
    elif num_labels - len(allowed) <= MAX_SEARCHED_PAST:
        unwanted = np.setdiff1d(np.arange(num_labels), allowed, assume_unique=True)
        both = _add_to_all_rows(exclude, unwanted, (len(queries_ND), num_labels))
        found = index.search(queries_ND, min(k, len(allowed)), exclude=both)
    else:
        found = search_among(queries_ND, index.vectors_LD, allowed, k, exclude=exclude)
    if voters is None or not choice.uses_neighbours:
        return found
    exact = index.recall == 1.0
    if len(queries_ND) == 1:
        labels, gains = votes_on_one(model, voters, choice)
        may_return = np.full(len(labels), True) if allowed is None else np.isin(labels, allowed)
        if exclude is not None:
            may_return &= ~np.isin(labels, exclude.indices)
        kept = LabelVotes(labels[may_return], gains[may_return])
        return add_votes_to_one(found, kept, queries_ND[0], index.vectors_LD, exact=exact)
    parts = list(vote_parts(model, voters, choice).values())
    votes = parts[0] if len(parts) == 1 else (parts[0] + parts[1]).tocsr()
    if allowed is not None:
        votes.data[~np.isin(votes.indices, allowed)] = 0.0
        votes.eliminate_zeros()
    return add_votes(found, votes, queries_ND, index.vectors_LD, exclude=exclude, exact=exact)


def search_among(
    queries_ND: NDArray[np.float32],
    labels_LD: NDArray[np.float32],
    rows: NDArray[np.int64],
    k: int,
    *,
    exclude: csr_matrix | None = None,
) -> TopK:
    """Return the k best of the labels in some rows (ascending), by scoring each of them, a bounded number at a time."""
    parts = []
    for start in range(0, len(rows), _LABELS_AT_A_TIME):
        part = rows[start : start + _LABELS_AT_A_TIME]
        found = search(
            queries_ND,
            labels_LD[part],
            min(k, len(part)),
            exclude=None if exclude is None else exclude[:, part],
        )
        parts.append(TopK(np.append(part, -1)[found.ids], found.scores))
    ids, scores = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    order = np.lexsort((ids, -scores), axis=1)[:, :k]
    return TopK(*(np.take_along_axis(values, order, axis=1) for values in (ids, scores)))


def _add_to_all_rows(pairs: csr_matrix | None, columns: NDArray[np.int64], shape: tuple[int, int]) -> csr_matrix:
    """Return the pairs, and every pair of a row with one of the columns."""
    from scipy.sparse import csr_matrix

    num_rows = shape[0]
    indices, starts = np.tile(columns, num_rows), np.arange(num_rows + 1) * len(columns)
    more = csr_matrix((np.ones(len(indices), dtype=np.float32), indices, starts), shape=shape)
    return more if pairs is None else (more + pairs).tocsr()


def score_parts(
    model: Model, index: Index, texts: Sequence[str], choice: RankingChoice, labels: list[int]
) -> Mapping[str, NDArray[np.float32]]:
    """Split the scores of some labels into named parts, each texts x labels, that add up to what `rank` gives."""
    labels_KD, representations_ND = index.vectors_LD[labels], model.encode_queries(texts)
    queries_ND = model.search_vectors(representations_ND, head=choice.head, dial=choice.dial)
    parts = {
        name: queries_ND[:, elements] @ labels_KD[:, elements].T
        for name, elements in model.score_slices(head=choice.head, dial=choice.dial).items()
    }
    voters = find_voters(model, texts, representations_ND, choice)
    return parts | {name: votes[:, labels].toarray() for name, votes in vote_parts(model, voters, choice).items()}
