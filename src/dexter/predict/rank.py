"""Rank labels: the one path from encoded texts to the best labels, for predictions, evaluation, tuning and the service.

Shapes: N texts, D dimensions, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.errors import UsageError
from dexter.index import Index, search
from dexter.model.model import Model
from dexter.predict.neighbours import VoteSettings, add_votes, count_votes, kept_queries
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
    """How the nearest training queries vote; None: they do not."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dial <= 1.0:
            raise UsageError(f"the dial is {self.dial}: expected a number from 0 (no label prior) to 1 (all of it)")

    @property
    def uses_neighbours(self) -> bool:
        """Whether the nearest training queries vote."""
        return self.votes is not None


def rank(
    model: Model,
    index: Index,
    representations_ND: NDArray[np.float32],
    choice: RankingChoice,
    k: int,
    *,
    exclude: csr_matrix | None = None,
    allowed: NDArray[np.int64] | None = None,
    nearest: TopK | None = None,
) -> TopK:
    """Return the k best labels of each text, all labels where there are fewer.

    Args:
        model: the encoder's heads and the labels.
        index: the label vectors of the chosen head and dial.
        representations_ND: the texts, as `Model.encode_queries` gives them.
        choice: head, dial and votes.
        k: labels per text.
        exclude: texts x labels; a stored entry marks a pair that is never returned.
        allowed: rows of the labels that may be returned, ascending; None: all. If few labels are left out, the index
            searches past them, otherwise the allowed labels are scored exactly.
        nearest: the nearest training queries of each text, where they are known already.
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
    if choice.votes is None:
        return found
    votes = _count_votes(model, representations_ND, choice.votes, nearest)
    if allowed is not None:
        votes.data[~np.isin(votes.indices, allowed)] = 0.0
        votes.eliminate_zeros()
    return add_votes(
        found,
        votes,
        queries_ND,
        index.vectors_LD,
        scale=_scale(model, choice.votes),
        exclude=exclude,
        exact=index.recall == 1.0,
    )


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
    model: Model, index: Index, representations_ND: NDArray[np.float32], choice: RankingChoice, labels: list[int]
) -> Mapping[str, NDArray[np.float32]]:
    """Split the scores of some labels into named parts, each texts x labels, that add up to what `rank` gives."""
    labels_KD = index.vectors_LD[labels]
    queries_ND = model.search_vectors(representations_ND, head=choice.head, dial=choice.dial)
    parts = {
        name: queries_ND[:, elements] @ labels_KD[:, elements].T
        for name, elements in model.score_slices(head=choice.head, dial=choice.dial).items()
    }
    if choice.votes is not None:
        votes = _count_votes(model, representations_ND, choice.votes)
        parts["neighbours"] = votes[:, labels].toarray() * _scale(model, choice.votes)
    return parts


def _count_votes(
    model: Model, representations_ND: NDArray[np.float32], votes: VoteSettings, nearest: TopK | None = None
) -> csr_matrix:
    kept = kept_queries(model)
    if nearest is None:
        nearest = kept.nearest(representations_ND, votes.neighbours)
    voters = TopK(nearest.ids[:, : votes.neighbours], nearest.scores[:, : votes.neighbours])
    return count_votes(kept, voters, votes.temperature)


def _scale(model: Model, votes: VoteSettings) -> float:
    """What a unanimous vote adds to a score."""
    return votes.weight * model.head.temperature
