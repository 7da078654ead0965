"""Rank labels: the one path from encoded texts to the best labels, for predictions, evaluation, tuning and the service.

Shapes: N texts, D dimensions, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.errors import UsageError
from dexter.index import Index, search
from dexter.model.model import Model
from dexter.predict.neighbours import VoteSettings, add_votes, count_votes, kept_queries, lexical_index
from dexter.types import HeadName, TopK

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
    kinds = {
        "neighbours": (voters.by_vectors, choice.votes),
        "neighbours by words": (voters.by_words, choice.lexical_votes),
    }
    parts = {}
    for name, (nearest, settings) in kinds.items():
        if nearest is not None and settings is not None:
            first = TopK(nearest.ids[:, : settings.neighbours], nearest.scores[:, : settings.neighbours])
            votes = count_votes(kept_queries(model), first, settings.temperature)
            parts[name] = csr_matrix(votes * np.float32(settings.weight * model.head.temperature))
    return parts


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
    parts = [] if voters is None else list(vote_parts(model, voters, choice).values())
    if not parts:
        return found
    votes = parts[0] if len(parts) == 1 else csr_matrix(parts[0] + parts[1])
    if allowed is not None:
        votes.data[~np.isin(votes.indices, allowed)] = 0.0
        votes.eliminate_zeros()
    exact = index.recall == 1.0
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
    num_rows = shape[0]
    indices, starts = np.tile(columns, num_rows), np.arange(num_rows + 1) * len(columns)
    more = csr_matrix((np.ones(len(indices), dtype=np.float32), indices, starts), shape=shape)
    return more if pairs is None else csr_matrix(more + pairs)


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
