"""Choose on validation how a trained model ranks: its head, its dial, the votes of neighbours and what words add to
them; and fit probabilities.

One setting is searched after another, from good starting values. A choice replaces the model as trained only if it is
better by more than half a standard error of the difference, and windows of long texts, which cost time in every
prediction, by more than 1.5: on few queries the best of many settings is partly luck.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.config import KEPT_BY_WORDS, Config
from dexter.data import Dataset, Split
from dexter.data.own_labels import find_own_labels
from dexter.data.tokens import Tokens
from dexter.errors import UsageError
from dexter.index import ExactIndex
from dexter.metrics import PROPENSITY, Ratio, inverse_propensity, per_query
from dexter.model.lexical import LexicalIndex, TextWords
from dexter.model.model import Model
from dexter.model.published import fingerprint
from dexter.model.training_queries import TrainingQueries
from dexter.model.word_weights import WordWeights
from dexter.predict.calibration import FITTED_PLACES, calibrate
from dexter.predict.neighbours import DEFAULT_LEXICAL_VOTES, DEFAULT_VOTES, score_again
from dexter.predict.rank import RankingChoice, WindowPooling, find_voters, rank
from dexter.predict.scoring import Scoring, write_tuned
from dexter.predict.windows import Windows, encode_texts, encode_windows, rank_texts
from dexter.progress import track
from dexter.training.run import check_data, make_splits, read_run
from dexter.training.words import choose_pairs, learn_word_weights
from dexter.types import HeadName, TopK

log = logging.getLogger("dexter")
WEIGHTS = (1.0, 2.0, 4.0, 6.0, 10.0, 15.0, 30.0)
NEIGHBOURS = (10, 20, 50, 100, 200)
_VOTE_GRID: Sequence[tuple[str, Sequence[Any]]] = (
    ("weight", WEIGHTS),
    ("neighbours", NEIGHBOURS),
    ("temperature", (0.03, 0.06, 0.08, 0.1)),
    ("weight", WEIGHTS),
)
"""Settings of the votes in the order in which they are searched; the weight again, once the others are found."""
_LEXICAL_WEIGHTS = WEIGHTS[:-1]
_LEXICAL_VOTERS = ((10, 0.05), (20, 0.1), (50, 0.2))
"""Neighbours by words and their temperatures: the flatter the votes, the more of them."""
_WORD_WEIGHTS = WEIGHTS
_POOLINGS: tuple[WindowPooling, ...] = ("mean", "max")
_TRIED_LONG_TEXTS = 200
"""Long texts by which a pooling is chosen, at most."""
DIALS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_SEARCHED_PLACES = 10
"""Places of the model's ranking that votes are added to."""
STANDARD_ERRORS, WINDOW_STANDARD_ERRORS = 0.5, 1.5
"""By how many standard errors votes, and windows of long texts, must be better."""
_KEPT_BYTES = 2**29
"""Most label vectors of other heads and dials that stay in memory while those of the next are made."""
_RECORDED_KS = (1, 3, 5)
"""Cut-offs of the metrics that are recorded beside the one that decides."""


def keep_training_queries(model: Model, train: Split, tokens: Tokens, config: Config) -> TrainingQueries | None:
    """Index the training queries, given their tokens, to keep with the model: by vectors and words, or by words alone.

    Vectors are made of at most `scoring.neighbours` queries. None where there are ten times as many.
    """
    if config.batch.label_queries:  # label texts that were trained as queries stand last; they are no examples
        train = train.select(np.arange(len(train) - train.num_labels))
        tokens = tokens.part(slice(len(train)))
    maximum = config.scoring.neighbours
    if not maximum:
        return None
    if len(train) > KEPT_BY_WORDS * maximum:
        log.info("no training queries are kept: %d are more than ten times scoring.neighbours", len(train))
        return None
    vectors_ND = model.encode_tokens(tokens, side="query") if len(train) <= maximum else None
    kept = TrainingQueries.of(vectors_ND, train.relevance, train.uids, train.texts, device=model.device)
    return replace(kept, lexical=LexicalIndex.of(train.texts))


def drop_unused(kept: TrainingQueries | None, choice: RankingChoice | None) -> TrainingQueries | None:
    """Return the training queries without what does not vote: words, and their weights; None where nothing is left."""
    if kept is None:
        return None
    if choice is None or choice.lexical_votes is None:
        return None if kept.index is None else replace(kept, lexical=None, word_weights=None)
    return kept if choice.word_weight or kept.word_weights is None else replace(kept, word_weights=None)


def choose_scoring(trial: Trial, *, dials: Sequence[float] = (), learn: bool = False) -> Scoring:
    """Choose the ranking of a model on validation queries, and fit its probabilities.

    Args:
        trial: ranks the validation queries by the model, with its training queries where it keeps them.
        dials: values of the dial to try besides the model's own.
        learn: whether to learn what words say for labels; the trial's model has these weights then.
    """
    model, validation = trial.model, trial.split
    as_trained = RankingChoice(head=model.default_head, dial=model.default_dial)
    best = trial.improve(as_trained, dials)
    if not trial.is_likely_better(as_trained, best):
        best = as_trained
    by_words = trial.add_lexical_votes(best)
    if trial.is_likely_better(best, by_words):
        best = by_words
    if learn:
        trial.learn_words(best)
    by_words = trial.add_word_weights(best)
    if trial.is_likely_better(best, by_words):
        best = by_words
    best = trial.choose_windows(best)
    scoring = Scoring(
        metric=trial.metric,
        choice=best,
        calibration=calibrate(trial.rank(best, FITTED_PLACES), validation.relevance, model.labels.counts),
        validation={"model": trial.metrics(as_trained), "tuned": trial.metrics(best)},
    )
    log.info("%d queries: %s", len(validation), scoring.describe())
    if scoring.calibration is None:
        log.warning(
            "no probabilities: too few labels are right on the %s validation queries to learn them from "
            "(10 are needed): add data, or raise validation.fraction",
            f"{len(validation):,}",
        )
    return scoring


class Trial:
    """Ranks the validation queries by different choices; what choices share is computed once.

    Args:
        model: the trained model, with its training queries where it keeps them.
        train: the queries it was trained on, for the label frequencies of PSP.
        validation: queries held out of training.
        metric: what to maximise, such as P@1 or PSP@3.
        propensity: the constants (a, b) of PSP.
        tokens: those of the validation queries, where they are known.
        found: what the model as trained finds for them, at least `FITTED_PLACES` or all labels, where that is known.
    """

    def __init__(
        self,
        model: Model,
        train: Split,
        validation: Split,
        *,
        metric: str,
        propensity: tuple[float, float] = PROPENSITY["default"],
        tokens: Tokens | None = None,
        found: TopK | None = None,
    ) -> None:
        kept = model.training_queries and model.training_queries.searched_exactly()
        self.model, self.split, self.metric = replace(model, training_queries=kept), validation, metric
        self.train = train
        self.cut_off = int(metric.partition("@")[2])
        self.tokens = model.encoder.tokenize(validation.texts, side="query") if tokens is None else tokens
        self.representations_ND = model.encode_tokens(self.tokens, side="query")
        self.propensity = inverse_propensity(train.relevance, *propensity)
        most_by_words = max(neighbours for neighbours, _ in _LEXICAL_VOTERS)
        most = RankingChoice(
            head=model.default_head,
            dial=model.default_dial,
            votes=replace(DEFAULT_VOTES, neighbours=max(NEIGHBOURS)) if kept and kept.index else None,
            lexical_votes=replace(DEFAULT_LEXICAL_VOTES, neighbours=most_by_words) if kept and kept.lexical else None,
            word_weight=1.0,
        )
        self.voters = find_voters(self.model, validation.texts, self.representations_ND, most)._replace(counted={})
        self._ratios: dict[RankingChoice, dict[str, Ratio]] = {}
        self._last: tuple[RankingChoice, TopK] | None = None
        """What was ranked last: the first of many places are those of few."""
        self._indexes: dict[tuple[HeadName, float], _RepeatedSearch] = {}
        self._found: defaultdict[tuple[HeadName, float], list[TopK]] = defaultdict(list)
        if found is not None:
            self._found[model.default_head, model.default_dial].append(found)

    def improve(self, start: RankingChoice, dials: Sequence[float]) -> RankingChoice:
        """Change one setting after another, and return the best choice that is found."""
        best = self._best_of_heads_and_dials(start, dials)
        if self.voters.by_vectors is None:
            return best
        voting = replace(best, votes=DEFAULT_VOTES)
        for name, values in track(_VOTE_GRID, what="tune votes", total=len(_VOTE_GRID), unit="setting"):
            votes = voting.votes or DEFAULT_VOTES
            voting = self._climb(voting, [replace(voting, votes=replace(votes, **{name: value})) for value in values])
        return self._better(best, self._best_of_heads_and_dials(voting, dials))

    def add_lexical_votes(self, start: RankingChoice) -> RankingChoice:
        """Let the training queries nearest by words vote too, and weigh both kinds of votes anew."""
        if self.voters.by_words is None:
            return start
        best = replace(start, lexical_votes=DEFAULT_LEXICAL_VOTES)
        for neighbours, temperature in _LEXICAL_VOTERS:
            votes = replace(best.lexical_votes or DEFAULT_LEXICAL_VOTES, neighbours=neighbours, temperature=temperature)
            best = self._better(best, self._weigh_lexical(replace(best, lexical_votes=votes)))
        if self.voters.by_vectors is not None:
            votes = start.votes or DEFAULT_VOTES
            weighed = [replace(best, votes=replace(votes, weight=weight)) for weight in WEIGHTS]
            voting = self._climb(replace(best, votes=votes), weighed)
            best = self._better(self._better(best, voting), replace(best, votes=None))
        return self._weigh_lexical(best)

    def _weigh_lexical(self, start: RankingChoice) -> RankingChoice:
        votes = start.lexical_votes or DEFAULT_LEXICAL_VOTES
        weighed = (replace(votes, weight=weight) for weight in _LEXICAL_WEIGHTS)
        return self._climb(start, [replace(start, lexical_votes=votes) for votes in weighed])

    def learn_words(self, choice: RankingChoice) -> None:
        """Learn from the training queries what words say for labels, where the nearest by vectors and by words vote."""
        kept = self.model.training_queries
        if kept is None or kept.lexical is None or kept.index is None or choice.lexical_votes is None:
            return
        filtered, by_encoder = self.train.filtered, replace(choice, head="encoder")
        pairs = choose_pairs(
            kept.index.vectors_LD,
            partial(self.model.search_vectors, head="encoder", dial=choice.dial),
            self._labels_of(by_encoder).vectors_LD,
            kept.relevance,
            None if filtered is None else filtered[: len(kept)],
        )
        weights = learn_word_weights(kept.lexical.weights_by_query(), kept.lexical.words, pairs, kept.num_labels)
        self.model = replace(self.model, training_queries=replace(kept, word_weights=weights))

    def add_word_weights(self, start: RankingChoice) -> RankingChoice:
        """Let the words of a text count for the labels of its neighbours too, if that was learned; weigh votes anew."""
        kept = self.model.training_queries
        if kept is None or kept.lexical is None or kept.word_weights is None or start.lexical_votes is None:
            return start
        spoken = kept.word_weights
        repeated = _RepeatedGains(spoken.table, spoken.starts_L, spoken.sizes_L)
        self.model = replace(self.model, training_queries=replace(kept, word_weights=repeated))
        best = self._weigh_words(replace(start, word_weight=_WORD_WEIGHTS[3]))
        if best.votes is not None:
            votes = best.votes
            best = self._climb(best, [replace(best, votes=replace(votes, weight=weight)) for weight in WEIGHTS])
        return self._weigh_words(self._weigh_lexical(best))

    def _weigh_words(self, start: RankingChoice) -> RankingChoice:
        return self._climb(start, [replace(start, word_weight=weight) for weight in _WORD_WEIGHTS])

    def _climb(self, best: RankingChoice, choices: Sequence[RankingChoice]) -> RankingChoice:
        """Return the best of choices that differ in one setting, in its order: from `best` on until they get worse."""
        place = choices.index(best)
        for one_way in (choices[place + 1 :], choices[:place][::-1]):
            for choice in one_way:
                if self._better(choice, best) is best:
                    break
                best = self._better(best, choice)
        return best

    def choose_windows(self, start: RankingChoice) -> RankingChoice:
        """Choose what is read of texts beyond the encoder's length, if there are any, and say so."""
        num_long = len(self._long_texts)
        if not num_long:
            return start
        rows = self._long_texts[:: -(-num_long // _TRIED_LONG_TEXTS)]
        before = self._score(start)[self.metric].numerator[rows]
        windows = encode_windows(self.model, [self.split.texts[row] for row in rows])
        best, most = start, 0.0
        for pooling in _POOLINGS:
            choice = replace(start, windows=pooling)
            top_ids = self._rank_windows(choice, self.cut_off, rows, windows).ids
            after = per_query(top_ids, self.split.relevance[rows], self.propensity, [self.cut_off])[self.metric]
            gains = after.numerator - before
            if _is_gain(gains, WINDOW_STANDARD_ERRORS) and gains.sum() > most:
                best, most = choice, float(gains.sum())
        read = "of each its beginning" if best.windows == "first" else f"the {best.windows} of their windows"
        log.info(
            "%s of %s validation texts are beyond the encoder's length: %s is read",
            f"{num_long:,}",
            f"{len(self.split):,}",
            read,
        )
        return best

    def is_likely_better(self, before: RankingChoice, after: RankingChoice) -> bool:
        """Whether `after` is better than `before` by more than half a standard error of the difference."""
        first, second = (self._score(choice)[self.metric] for choice in (before, after))
        return _is_gain(second.numerator - first.numerator, STANDARD_ERRORS)

    def metrics(self, choice: RankingChoice) -> dict[str, float]:
        """Return the metrics of a choice: the one that decides, P and PSP."""
        names = [f"{name}@{k}" for name in ("P", "PSP") for k in _RECORDED_KS if k <= self.split.num_labels]
        return {name: self._score(choice)[name].value for name in dict.fromkeys([self.metric, *names])}

    def rank(self, choice: RankingChoice, k: int) -> TopK:
        """Rank the labels of the validation queries, without filter pairs."""
        if self._last is not None:
            last_choice, last = self._last
            if last_choice == choice and last.ids.shape[1] >= k:
                return TopK(last.ids[:, :k], last.scores[:, :k])
        index = self._labels_of(choice)
        exclude = self.split.filtered
        found = rank(self.model, index, self.representations_ND, choice, k, voters=self.voters, exclude=exclude)
        found = TopK(found.ids[:, :k], found.scores[:, :k])  # the index may give more
        if choice.windows != "first" and len(self._long_texts):
            rows = self._long_texts
            of_long = self._rank_windows(choice, k, rows)
            found = TopK(found.ids.copy(), found.scores.copy())  # what is found is kept for other choices
            found.ids[rows], found.scores[rows] = of_long
        self._last = choice, found
        return found

    def _rank_windows(
        self, choice: RankingChoice, k: int, rows: NDArray[np.int64], windows: Windows | None = None
    ) -> TopK:
        """Rank the labels of some validation queries by their windows."""
        encoded = encode_texts(self.model, [self.split.texts[row] for row in rows], choice, windows=windows)
        exact = ExactIndex(self._labels_of(choice).vectors_LD, self.model.device)
        exclude = None if self.split.filtered is None else self.split.filtered[rows]
        return rank_texts(self.model, exact, encoded, choice, k, exclude=exclude)

    @cached_property
    def _long_texts(self) -> NDArray[np.int64]:
        """The validation queries that have more than one window: the others are ranked alike by every pooling."""
        split, lengths = self.model.encoder.split_query, self.tokens.lengths
        # Cutting a text takes a while. One that is beyond the encoder's length fills it, but for unknown tokens.
        full = np.flatnonzero(lengths >= 0.9 * lengths.max(initial=0))
        return full[[len(split(self.split.texts[row])) > 1 for row in full.tolist()]]

    def _best_of_heads_and_dials(self, best: RankingChoice, dials: Sequence[float]) -> RankingChoice:
        for head in self.model.heads:
            best = self._better(best, replace(best, head=head))
        for dial in dials:
            best = self._better(best, replace(best, dial=dial))
        return best

    def _labels_of(self, choice: RankingChoice) -> _RepeatedSearch:
        """Return the labels of a head and dial, which are kept for the next choices while they fit in memory."""
        key = (choice.head, choice.dial)
        if key not in self._indexes:
            if sum(index.vectors_LD.nbytes for index in self._indexes.values()) > _KEPT_BYTES:
                self._indexes.clear()
            vectors_LD = self.model.label_vectors(head=choice.head, dial=choice.dial)
            if not self._found[key]:
                self._found[key] += self._ranked_again(vectors_LD, choice)
            self._indexes[key] = _RepeatedSearch(vectors_LD, self.model.device, found=self._found[key])
        return self._indexes[key]

    def _ranked_again(self, labels_LD: NDArray[np.float32], choice: RankingChoice) -> list[TopK]:
        """Return the best labels by another head among those that the model as trained found, where it has."""
        as_trained = self._found.get((self.model.default_head, self.model.default_dial))
        if choice.head == self.model.default_head or not as_trained:
            return []
        queries_ND = self.model.search_vectors(self.representations_ND, head=choice.head, dial=choice.dial)
        return [score_again(as_trained[0], queries_ND, labels_LD, k=_SEARCHED_PLACES)]

    def _better(self, first: RankingChoice, second: RankingChoice) -> RankingChoice:
        values = [self._score(choice)[self.metric].value for choice in (first, second)]
        return second if values[1] > values[0] else first

    def _score(self, choice: RankingChoice) -> dict[str, Ratio]:
        if choice not in self._ratios:
            ks = sorted({k for k in (*_RECORDED_KS, self.cut_off) if k <= self.split.num_labels})
            top_ids = self.rank(choice, max(ks)).ids
            self._ratios[choice] = per_query(top_ids, self.split.relevance, self.propensity, ks)
        return self._ratios[choice]


@dataclass(frozen=True)
class _RepeatedSearch(ExactIndex):
    """Exact search for queries that are always the same: once for few places, again only if more are asked for."""

    found: list[TopK] = field(default_factory=list)
    """What was found before, also by an earlier index of the same labels; empty before the first search."""

    def search(
        self,
        queries_ND: NDArray[np.float32],
        k: int,
        *,
        exclude: csr_matrix | None = None,
        ceiling: NDArray[np.float32] | None = None,
    ) -> TopK:
        """Return the first k of the labels found before or a few more, with which votes are added faster; or search."""
        wanted = min(max(k, _SEARCHED_PLACES), len(self.vectors_LD))
        if not self.found or self.found[0].ids.shape[1] < wanted:
            # Few places choose a head; more than these are asked for once it is chosen.
            most = wanted if k <= _SEARCHED_PLACES else min(max(k, FITTED_PLACES), len(self.vectors_LD))
            self.found[:] = [super().search(queries_ND, most, exclude=exclude, ceiling=ceiling)]
        places = slice(wanted)
        return TopK(self.found[0].ids[:, places], self.found[0].scores[:, places])


def _is_gain(gains: NDArray[np.float64], standard_errors: float) -> bool:
    """Whether the sum of the gains of queries is more than so many of its standard errors."""
    return bool(gains.sum() > standard_errors * math.sqrt(len(gains)) * gains.std())


class _RepeatedGains(WordWeights):
    """What words say for labels of texts that are always the same: computed once for the labels that are voted for."""

    _last: tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.float32]] | None = None

    def gains(
        self, words: Sequence[TextWords], starts: NDArray[np.integer], labels: NDArray[np.integer]
    ) -> NDArray[np.float32]:
        """Return the gains computed last if they were for the same labels."""
        last = self._last
        if last is None or not (np.array_equal(last[0], starts) and np.array_equal(last[1], labels)):
            last = starts.copy(), labels.copy(), super().gains(words, starts, labels)
            object.__setattr__(self, "_last", last)
        return last[2]


def tune(run: str | Path, data: Dataset | str | Path, *, metric: str | None = None) -> Scoring:
    """Choose the ranking and the probabilities of a finished run again, for the metric named, and store them.

    Args:
        run: the run folder.
        data: the data it was trained on; its validation queries are held out again as they were then.
        metric: what to maximise, such as PSP@3; the run's validation metric if left out.
    """
    from dexter.data.formats import load_dataset

    folder = Path(run)
    config = read_run(folder).config
    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    check_data(folder, dataset)
    # Made anew so that its own checks refuse what is not a metric.
    validating = replace(config.validation, metric=metric or "auto")
    metric = config.validation.metric if validating.metric == "auto" else validating.metric
    own_labels = find_own_labels(dataset, config.data.own_labels)
    train, validation = make_splits(own_labels.filter_train(dataset), config)
    if validation is None:
        raise UsageError(f"{folder} was trained with validation.fraction = 0: there are no queries to tune on")
    published = folder / "model"
    trial = Trial(Model.load(published), train, validation, metric=metric, propensity=dataset.propensity)
    scoring = choose_scoring(trial, dials=DIALS)
    write_tuned(published, scoring, fingerprint=fingerprint(published))
    return scoring
