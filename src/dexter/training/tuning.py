"""What is chosen on validation once a model is trained: its head, how its memory votes, its dial, probabilities.

The settings are searched one at a time, from good starting values. A choice replaces the model as it was trained only
if it is better by more than 1.5 standard errors of the difference: on few queries the best of many is mostly luck.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dexter.config import Config
from dexter.data import Dataset, Split
from dexter.errors import UsageError
from dexter.index.exact import search
from dexter.metrics import Ratio, inverse_propensity, per_query
from dexter.model.model import Model
from dexter.model.store import fingerprint
from dexter.predict.calibration import FITTED_PLACES, calibrate
from dexter.predict.neighbours import TrainingQueries, VoteSettings, add_votes
from dexter.predict.scoring import DEFAULT_VOTES, Scoring, write_tuned
from dexter.training.parts import make_splits
from dexter.training.run import check_data, read_run
from dexter.types import HeadName, TopK

log = logging.getLogger("dexter")
WEIGHTS = (1.0, 2.0, 4.0, 6.0, 10.0, 15.0, 30.0)
NEIGHBOURS = (10, 20, 50, 100, 200)
TEMPERATURES = (0.03, 0.06, 0.08, 0.1)
DIALS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_STANDARD_ERRORS = 1.5
SHOWN = (1, 3, 5)
"""Cut-offs of the metrics that are recorded beside the one that decides."""


@dataclass(frozen=True)
class Choice:
    """One way to score."""

    head: HeadName
    dial: float
    votes: VoteSettings | None
    """None: without the memory."""


def keep_training_queries(model: Model, train: Split, config: Config) -> TrainingQueries | None:
    """The memory of the training queries, or None where there are more than are to be kept."""
    if config.batch.label_queries:  # label texts that were trained as queries stand last; they are no examples
        train = train.select(np.arange(len(train) - train.num_labels))
    maximum = config.scoring.neighbours
    if len(train) > maximum:
        if maximum:
            log.info("no training queries are kept: there are %d, scoring.neighbours is %d", len(train), maximum)
        return None
    return TrainingQueries.of(model.encode_queries(train.texts), train.relevance, train.uids, train.texts)


def tune_model(
    model: Model, train: Split, validation: Split, *, metric: str, maximum: int, dials: Sequence[float] = ()
) -> Model:
    """The model with its scoring chosen on validation queries.

    Args:
        model: the trained model, with its memory where it has one.
        train: the queries it was trained on, for the label frequencies of PSP.
        validation: queries held out of training.
        metric: what to have most of, such as P@1 or PSP@3.
        maximum: validation queries that are looked at.
        dials: values of the dial to try besides the model's own.
    """
    model = replace(model, scoring=Scoring())
    # Queries stand in the order of the data set: a share from all over it, the same every time.
    validation = validation.select(np.linspace(0, len(validation) - 1, min(maximum, len(validation))).astype(np.int64))
    trial = Trial(model, train, validation, metric=metric)
    as_trained = Choice(model.default_head, model.default_dial, None)
    best = trial.improve(as_trained, dials)
    if trial.is_luck(as_trained, best):
        best = as_trained
    scoring = Scoring(
        metric=metric,
        head=best.head,
        dial=None if best.dial == as_trained.dial else best.dial,
        votes=best.votes or DEFAULT_VOTES,
        use_neighbours=best.votes is not None,
        calibration=calibrate(trial.rank(best, FITTED_PLACES), validation.relevance, model.labels.counts),
        validation={"model": trial.metrics(as_trained), "tuned": trial.metrics(best)},
    )
    log.info("%d queries: %s", len(validation), scoring.describe())
    return replace(model, scoring=scoring)


class _Searched(NamedTuple):
    """One search of the model's labels."""

    key: tuple[HeadName, float, int]
    queries_ND: Tensor
    labels_LD: Tensor
    found: TopK


class Trial:
    """Scores validation queries in different ways, each part computed once."""

    def __init__(self, model: Model, train: Split, validation: Split, *, metric: str) -> None:
        self.model, self.split, self.metric = model, validation, metric
        self.cut_off = int(metric.partition("@")[2])
        self.representations_ND = model.encode_queries(validation.texts)
        self.propensity = inverse_propensity(train.relevance)
        self.nearest: TopK | None = None
        if model.training_queries is not None:
            self.nearest = model.training_queries.nearest(self.representations_ND, max(NEIGHBOURS))
        self._ratios: dict[Choice, dict[str, Ratio]] = {}
        self._searched: _Searched | None = None

    def improve(self, start: Choice, dials: Sequence[float]) -> Choice:
        """The best choice that is found by changing one setting after another."""
        best = start
        for head in self.model.heads:
            best = self._better(best, replace(best, head=head))
        for dial in dials:
            best = self._better(best, replace(best, dial=dial))
        if self.nearest is None:
            return best
        voting = replace(best, votes=DEFAULT_VOTES)
        for vary in (_weights, _neighbours, _temperatures, _weights):
            for blend in vary(voting.votes or DEFAULT_VOTES):
                voting = self._better(voting, replace(voting, votes=blend))
        for head in self.model.heads:
            voting = self._better(voting, replace(voting, head=head))
        for dial in dials:
            voting = self._better(voting, replace(voting, dial=dial))
        return self._better(best, voting)

    def is_luck(self, before: Choice, after: Choice) -> bool:
        """Whether the second choice is better by less than the difference may be off."""
        first, second = (self._scored(choice)[self.metric] for choice in (before, after))
        gains = second.numerator - first.numerator
        return bool(gains.sum() <= _STANDARD_ERRORS * math.sqrt(len(gains)) * gains.std())

    def metrics(self, choice: Choice) -> dict[str, float]:
        """What a choice gives."""
        names = [f"{name}@{k}" for name in ("P", "PSP") for k in SHOWN if k <= self.split.num_labels]
        return {name: self._scored(choice)[name].value for name in dict.fromkeys([self.metric, *names])}

    def rank(self, choice: Choice, k: int) -> TopK:
        """The best labels of the validation queries, without filter pairs."""
        searched, kept, blend = (
            self._search(choice, min(k, self.split.num_labels)),
            self.model.training_queries,
            choice.votes,
        )
        if blend is None:
            return searched.found
        assert kept is not None
        assert self.nearest is not None
        voters = TopK(self.nearest.ids[:, : blend.neighbours], self.nearest.scores[:, : blend.neighbours])
        return add_votes(
            searched.found,
            kept.votes(voters, blend.temperature),
            searched.queries_ND,
            searched.labels_LD,
            scale=blend.weight * self.model.head.temperature,
            exclude=self.split.filtered,
        )

    def _search(self, choice: Choice, k: int) -> _Searched:
        """What the model finds without the memory; kept for the choices to come, which mostly differ in the blend."""
        key = (choice.head, choice.dial, k)
        if self._searched is None or self._searched.key != key:
            self._searched = None
            queries_ND = self.model.search_vectors(self.representations_ND, head=choice.head, dial=choice.dial)
            labels_LD = self.model.label_vectors(head=choice.head, dial=choice.dial)
            found = search(queries_ND, labels_LD, k, exclude=self.split.filtered)
            self._searched = _Searched(key, queries_ND, labels_LD, found)
        return self._searched

    def _better(self, first: Choice, second: Choice) -> Choice:
        values = [self._scored(choice)[self.metric].value for choice in (first, second)]
        return second if values[1] > values[0] else first

    def _scored(self, choice: Choice) -> dict[str, Ratio]:
        if choice not in self._ratios:
            ks = sorted({k for k in (*SHOWN, self.cut_off) if k <= self.split.num_labels})
            top_ids: NDArray[np.int64] = self.rank(choice, max(ks)).ids
            self._ratios[choice] = per_query(top_ids, self.split.relevance, self.propensity, ks)
        return self._ratios[choice]


def _weights(blend: VoteSettings) -> list[VoteSettings]:
    return [replace(blend, weight=weight) for weight in WEIGHTS]


def _neighbours(blend: VoteSettings) -> list[VoteSettings]:
    return [replace(blend, neighbours=neighbours) for neighbours in NEIGHBOURS]


def _temperatures(blend: VoteSettings) -> list[VoteSettings]:
    return [replace(blend, temperature=temperature) for temperature in TEMPERATURES]


def tune(run: str | Path, data: Dataset | str | Path, *, metric: str | None = None) -> Scoring:
    """Choose dial, memory and probabilities of a finished run again, for the metric named, and store them.

    Args:
        run: the run folder.
        data: the data it was trained on; its validation queries are held out again as they were then.
        metric: what to have most of, such as PSP@3; the run's validation metric if left out.
    """
    from dexter.data.formats import load_dataset

    folder = Path(run)
    config = read_run(folder).config
    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    check_data(folder, dataset)
    # Made anew to be checked: what is not a metric is refused.
    validating = replace(config.validation, metric=metric or "auto")
    metric = config.validation.metric if validating.metric == "auto" else validating.metric
    train, validation = make_splits(dataset, config)
    if validation is None:
        raise UsageError(f"{folder} was trained with validation.fraction = 0: there are no queries to tune on")
    published = folder / "model"
    maximum = config.scoring.tuning_queries
    model = tune_model(Model.load(published), train, validation, metric=metric, maximum=maximum, dials=DIALS)
    write_tuned(published, model.scoring, fingerprint=fingerprint(published))
    return model.scoring
