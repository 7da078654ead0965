"""Rank labels: the one path from encoded texts to the best labels, for predictions, evaluation, tuning and the service.

Shapes: N texts, D dimensions, K labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError
from dexter.index import Index, search
from dexter.model.lexical import LabelWords, LexicalIndex, TextWords, split_words
from dexter.model.model import Model
from dexter.model.training_queries import TrainingQueries
from dexter.predict.neighbours import (
    EXAMPLE_VOTES,
    LabelVotes,
    VoteSettings,
    add_label_votes,
    add_votes,
    add_votes_to_one,
    count_votes,
    count_votes_on_one,
    example_weights,
    kept_queries,
    lexical_index,
    vote_weights,
)
from dexter.types import HeadName, TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

WindowPooling = Literal["first", "mean", "max"]
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
    word_weight: float = 0.0
    """What the words of a text add at most to the score of a label that a neighbour votes for, in units of the model's
    temperature (`dexter.model.word_weights`)."""
    examples: bool = True
    """Whether texts that were labelled after training vote, where there are any."""
    windows: WindowPooling = "first"
    """What is read of texts beyond the encoder's length (`dexter.predict.windows`)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.dial <= 1.0:
            raise UsageError(f"the dial is {self.dial}: expected a number from 0 (no label prior) to 1 (all of it)")

    @property
    def uses_neighbours(self) -> bool:
        """Whether the nearest training queries vote."""
        return self.votes is not None or self.lexical_votes is not None


class WeighedVotes(NamedTuple):
    """The votes of one kind on texts."""

    kind: str
    settings: VoteSettings
    voters: TrainingQueries
    rows_NK: NDArray[np.int64]
    """The rows of those that vote on each text."""
    weights_NK: NDArray[np.float32]
    """The weight of each of these votes, before that of the settings."""

    def scale(self, model: Model) -> np.float32:
        """Return what a unanimous vote adds to the score of a label."""
        return np.float32(self.settings.weight * model.head.temperature)


class Voters(NamedTuple):
    """The training queries that vote on texts: their rows and cosines, best first; None where a kind does not vote."""

    by_vectors: TopK | None
    by_words: TopK | None
    examples: TopK | None = None
    """The same of the examples."""
    words: Sequence[Sequence[str]] | None = None
    """The words of each text, which speak for new labels that have them; None where there are no new labels."""
    weighed_words: Sequence[TextWords] | None = None
    """The words of each text with their weights, which count for the labels of the neighbours; None: they do not."""
    counted: dict[tuple[str, int, float], csr_matrix] | None = None
    """Votes that were counted before, where the same texts are ranked again with other weights; None: they are not."""

    def weigh(self, model: Model, choice: RankingChoice) -> Iterator[WeighedVotes]:
        """Yield the votes of each kind."""
        kinds = (
            ("neighbours", self.by_vectors, choice.votes),
            ("neighbours by words", self.by_words, choice.lexical_votes),
        )
        for name, nearest, settings in kinds:
            if nearest is not None and settings is not None:
                first = slice(settings.neighbours)
                weights_NK = vote_weights(nearest.scores[:, first], settings.temperature)
                yield WeighedVotes(name, settings, kept_queries(model), nearest.ids[:, first], weights_NK)
        if self.examples is not None and model.examples is not None:
            weights_NK = example_weights(self.examples.scores)
            yield WeighedVotes("examples", EXAMPLE_VOTES, model.examples, self.examples.ids, weights_NK)

    def count_votes(self, votes: WeighedVotes) -> csr_matrix:
        """Return the votes of one kind, before the weight of the settings: texts x labels."""
        key = votes.kind, votes.settings.neighbours, votes.settings.temperature
        if self.counted is None or key not in self.counted:
            found = count_votes(votes.voters, votes.rows_NK, votes.weights_NK)
            if self.counted is None:
                return found
            self.counted[key] = found
        return self.counted[key]


def find_voters(
    model: Model, texts: Sequence[str], representations_ND: NDArray[np.float32], choice: RankingChoice
) -> Voters:
    """Find the training queries and words that vote on texts, whose representations `Model.encode_queries` gave."""
    votes, lexical = choice.votes, choice.lexical_votes
    examples, new_words = model.examples if choice.examples else None, _new_words(model)
    words = [] if lexical is None and new_words is None else [split_words(text) for text in texts]
    known = [] if lexical is None else [lexical_index(model).look_up(each) for each in words]
    return Voters(
        None if votes is None else kept_queries(model).nearest(representations_ND, votes.neighbours),
        None if lexical is None else lexical_index(model).nearest(texts, lexical.neighbours, known=known),
        None if examples is None else examples.nearest(representations_ND, EXAMPLE_VOTES.neighbours),
        None if new_words is None else words,
        [LexicalIndex.weigh(each) for each in known] if choice.word_weight and lexical is not None else None,
    )


def _new_words(model: Model) -> LabelWords | None:
    """Return the words of new labels, if the model has learned that they count."""
    return model.labels.new_words if model.generator is not None and model.generator.word_weight else None


def _word_weight(model: Model, choice: RankingChoice) -> float:
    assert model.generator is not None
    return model.generator.word_weight * model.head.temperature * (2 if choice.head == "unified" else 1)


def word_gains(words: Iterable[str], labels: LabelWords, weight: float) -> LabelVotes:
    """Return what the words of a text add to the scores of new labels: the square of the share that each has, weighed.

    A trained label has learned which words speak for it; a new one has only its own.
    """
    rows, shares = labels.shares(words)
    return LabelVotes(rows, np.float32(weight) * shares**2)


def vote_parts(model: Model, voters: Voters, choice: RankingChoice) -> dict[str, csr_matrix]:
    """Return what each kind of votes adds to the scores, by name, texts x labels."""
    parts = {votes.kind: voters.count_votes(votes) * votes.scale(model) for votes in voters.weigh(model, choice)}
    if _words_speak(model, voters, choice):
        of_neighbours = [votes for kind, votes in parts.items() if kind != "examples"]
        parts["words of the text"] = _weigh_words(
            model, voters, choice, sum(of_neighbours[1:], of_neighbours[0].copy())
        )
    labels = _new_words(model)
    if labels is not None and voters.words is not None:
        parts["words of the label"] = _word_votes(model, voters.words, labels, choice)
    return parts


def _words_speak(model: Model, voters: Voters, choice: RankingChoice) -> bool:
    """Whether the words of texts speak for the labels of their neighbours."""
    kept = model.training_queries
    return bool(choice.word_weight and voters.weighed_words is not None and kept and kept.word_weights is not None)


def _weigh_words(model: Model, voters: Voters, choice: RankingChoice, votes: csr_matrix) -> csr_matrix:
    """Return what the words of texts add to the scores of the labels that their neighbours vote for, texts x labels."""
    from scipy.sparse import csr_matrix

    votes.eliminate_zeros()
    gains = _word_gains(model, voters, choice, votes.indptr, votes.indices)
    return csr_matrix((gains, votes.indices, votes.indptr), shape=votes.shape)


def _word_gains(
    model: Model, voters: Voters, choice: RankingChoice, starts: NDArray[np.integer], labels: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Return what the words of texts add to the scores of some labels of each (see `WordWeights.gains`)."""
    weights = kept_queries(model).word_weights
    assert weights is not None
    assert voters.weighed_words is not None
    scale = np.float32(choice.word_weight * model.head.temperature)
    return scale * weights.gains(voters.weighed_words, starts, labels)


def _word_votes(model: Model, words: Sequence[Sequence[str]], labels: LabelWords, choice: RankingChoice) -> csr_matrix:
    """Return what the words of texts add to the scores of new labels, texts x labels."""
    from scipy.sparse import csr_matrix

    gains = [word_gains(each, labels, _word_weight(model, choice)) for each in words]
    starts = np.cumsum([0, *(len(each.labels) for each in gains)])
    columns, values = (np.concatenate(arrays) for arrays in zip(*gains, strict=True))
    return csr_matrix((values, columns, starts), shape=(len(words), len(model.labels.ids)))


def votes_on_one(model: Model, voters: Voters, choice: RankingChoice) -> LabelVotes:
    """Return what all votes add to the scores of one text."""
    weighed = list(voters.weigh(model, choice))
    both = [votes for votes in weighed if votes.voters is not model.examples]
    parts = [
        count_votes_on_one(
            same[0].voters,
            np.concatenate([votes.rows_NK[0] for votes in same]),
            np.concatenate([votes.scale(model) * votes.weights_NK[0] for votes in same]),
        )
        for same in (both, weighed[len(both) :])
        if same
    ]
    if both and _words_speak(model, voters, choice):
        voted, gains = parts[0]
        spoken = _word_gains(model, voters, choice, np.array([0, len(voted)]), voted)
        parts[0] = LabelVotes(voted, gains + spoken)
    labels = _new_words(model)
    if labels is not None and voters.words is not None:
        parts.append(word_gains(voters.words[0], labels, _word_weight(model, choice)))
    voting = [part for part in parts if len(part.labels)] or parts
    return voting[0] if len(voting) == 1 else add_label_votes(voting)


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
        voters: what votes on the texts, as `find_voters` gives it; None where nothing does.
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
    if voters is None or not (choice.uses_neighbours or voters.examples is not None or voters.words):
        return found
    exact = index.recall == 1.0
    if len(queries_ND) == 1:
        votes = votes_on_one(model, voters, choice)
        if allowed is not None:
            votes = votes.select(np.isin(votes.labels, allowed))
        if exclude is not None:
            votes = votes.select(~np.isin(votes.labels, exclude.indices))
        return add_votes_to_one(found, votes, queries_ND[0], index.vectors_LD, exact=exact)
    parts = list(vote_parts(model, voters, choice).values())
    all_votes = parts[0] if len(parts) == 1 else sum(parts[1:], start=parts[0]).tocsr()
    if allowed is not None:
        all_votes.data[~np.isin(all_votes.indices, allowed)] = 0.0
        all_votes.eliminate_zeros()
    places = min(k, found.ids.shape[1])
    return add_votes(found, all_votes, queries_ND, index.vectors_LD, k=places, exclude=exclude, exact=exact)


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
