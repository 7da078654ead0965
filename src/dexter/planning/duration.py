"""How long a run takes: the work of a step, a refresh, a validation, times what the probe measured for each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dexter.config import Config
from dexter.losses.streaming import Streaming, plan_tiles
from dexter.planning.rates import Rates
from dexter.planning.sizes import Sizes, batch_size, needs_refresh, pool_size, steps_per_epoch, texts_per_step
from dexter.planning.storage import checkpoint_bytes, model_bytes, training_query_bytes
from dexter.planning.terms import MIB, keeps_training_queries, score_width

_STEP_OVERHEAD = 0.005
"""Seconds of a step that depend on nothing: drawing the batch, the optimisers' bookkeeping, the journal."""

_WAYS_TO_SCORE = 25
"""Searches that the tuning at the end makes, about."""
_TOKENISING_SHARE = 0.6
"""Of the time to prepare a text: the rest is the vocabulary's."""


@dataclass(frozen=True)
class TimeTerm:
    """One part of an epoch."""

    name: str
    seconds: float
    """In one epoch."""
    setting: str = ""
    """What makes it shorter."""


@dataclass(frozen=True)
class Duration:
    """Time before the first step, in an epoch, and after the last step."""

    prepare: float
    tune: float
    terms: tuple[TimeTerm, ...]
    num_steps: int
    """Steps of an epoch."""
    epochs: int

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        return sum(term.seconds for term in self.terms)

    @property
    def total(self) -> float:
        """Seconds of the run."""
        return self.prepare + self.epochs * self.epoch + self.tune

    @property
    def step(self) -> float:
        """Seconds of a step, without what happens between epochs."""
        return sum(term.seconds for term in self.terms if term.name not in _BETWEEN) / self.num_steps

    @property
    def largest(self) -> TimeTerm:
        """What takes longest."""
        return max(self.terms, key=lambda term: term.seconds)


_BETWEEN = ("clusters and hard negatives", "validation", "checkpoints and model")


def duration(sizes: Sizes, config: Config, rates: Rates) -> Duration:
    """Seconds by part, on one process of this machine."""
    steps = steps_per_epoch(sizes, config)
    terms = [TimeTerm(name, steps * seconds, setting) for name, seconds, setting in _step(sizes, config, rates)]
    terms += _between(sizes, config, rates)
    prepare = sizes.characters * rates.per_character
    return Duration(prepare, _tuning(sizes, config, rates), tuple(terms), steps, config.train.epochs)


def _step(sizes: Sizes, config: Config, rates: Rates) -> Iterator[tuple[str, float, str]]:
    """Name, seconds and setting of each part of a step."""
    queries, labels = batch_size(sizes, config), pool_size(sizes, config)
    texts, encoder = texts_per_step(sizes, config), sizes.encoder
    yield "encoding queries", queries * rates.per_query, "encoder.max_length_query"
    yield "encoding labels", texts * rates.per_label, "train.label_refresh, batch.pool"
    yield "loss", queries * labels * rates.per_score * _products(config, queries, labels), "batch.size, batch.pool"
    dense = encoder.weights + (0 if sizes.sparse else encoder.table_elements)
    rows = sizes.touched_rows * encoder.dimension if sizes.sparse else 0
    if config.head.classifier:
        rows += labels * score_width(sizes, config)
    updates = dense * rates.per_dense_weight + rows * rates.per_row_element
    yield "updating weights", updates, "encoder.words, encoder.dimension"
    yield "everything else", _STEP_OVERHEAD, "batch.size"


def _products(config: Config, queries: int, labels: int) -> float:
    """The probe keeps its scores between sweeps; where the run cannot, it makes four products instead of three."""
    layout = plan_tiles(Streaming(memory_budget=config.loss.memory_megabytes * MIB), queries, labels)
    return 1.0 if layout.keep else 4 / 3


def _tuning(sizes: Sizes, config: Config, rates: Rates) -> float:
    """Training queries encoded to be kept, and a search of the validation queries for every way to score."""
    tried = min(sizes.num_validation, config.scoring.tuning_queries)
    searched = score_width(sizes, config) * (2 if config.head.classifier else 1)
    seconds = _WAYS_TO_SCORE * tried * sizes.num_labels * searched * rates.per_search
    if keeps_training_queries(sizes, config):
        tokenised = _TOKENISING_SHARE * sizes.num_queries * sizes.characters_per_query * rates.per_character
        seconds += tokenised + sizes.num_queries * rates.per_query_forward
        seconds += tried * sizes.num_queries * sizes.encoder.dimension * rates.per_search
    return seconds + (model_bytes(sizes, config) + training_query_bytes(sizes, config)) * rates.per_byte


def _between(sizes: Sizes, config: Config, rates: Rates) -> Iterator[TimeTerm]:
    """What happens between epochs, as its share of one."""
    encode_labels = sizes.num_label_texts * rates.per_label_forward
    width = score_width(sizes, config)
    if needs_refresh(config):
        seconds = encode_labels + sizes.num_queries * rates.per_query_forward
        if config.batch.hard_negatives:
            seconds += sizes.num_queries * sizes.num_labels * width * rates.per_search
        if config.batch.order == "clustered":
            halvings = math.log2(steps_per_epoch(sizes, config))
            seconds += sizes.num_queries * halvings * sizes.encoder.dimension * rates.per_clustered
        epochs = config.train.epochs
        times = math.ceil((epochs - config.batch.start) / config.batch.refresh)
        yield TimeTerm("clusters and hard negatives", seconds * times / epochs, "batch.refresh")
    if sizes.num_validation:
        validations = max(1 / config.train.epochs, 1 / config.validation.every_epochs)
        searched = width * (2 if config.head.classifier else 1)
        seconds = encode_labels + sizes.num_validation * rates.per_query_forward
        seconds += sizes.num_validation * sizes.num_labels * searched * rates.per_search
        yield TimeTerm("validation", validations * seconds, "validation.every_epochs, validation.maximum")
        written = checkpoint_bytes(sizes, config) + model_bytes(sizes, config)
        yield TimeTerm("checkpoints and model", validations * written * rates.per_byte, "validation.every_epochs")
