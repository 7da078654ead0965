"""How long a run takes: a few real steps of a `Trainer` in a temporary folder, extrapolated to the whole run.

The trainer has the run's own settings and trains on the data itself, or on a sample where there is too much of it to
prepare in some seconds. The sample keeps the run's batch size. The time of each part is scaled by the amount of its
work: tokens encoded, scores computed, weights updated, bytes written. Without a sample every factor is 1.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dexter.config import Config
from dexter.data import Dataset, Split
from dexter.planning.memory import checkpoint_bytes
from dexter.planning.sizes import (
    Sizes,
    batch_size,
    needs_refresh,
    pool_size,
    score_width,
    sizes_from_data,
    spread_rows,
    steps_per_epoch,
    texts_per_step,
)
from dexter.training.log import Stopwatch
from dexter.training.trainer import Trainer

Clock = Callable[[], float]
_SAMPLED_CHARACTERS = {"static": 8_000_000, "transformer": 100_000}
"""Characters of the queries, and of the labels, above which a sample is timed."""
_FEWEST_QUERIES = 500
_FEWEST_STEPS, _MOST_STEPS, _SECONDS_OF_STEPS = 4, 12, 4.0
_REFRESH = "clusters and hard negatives"
_REFRESH_PHASES = ("embed", "cluster", "mine")
_STEP_PHASES = {
    "batch": ("drawing batches", "batch.size"),
    "encode": ("encoding", "encoder.max_length_query, batch.pool"),
    "loss": ("loss", "batch.size, batch.pool"),
    "backward": ("backward pass of the encoder", "encoder.max_length_query, batch.pool"),
    "update": ("updating weights", "encoder.words, encoder.dimension"),
}
"""Phases of the trainer's stopwatch: what the plan calls them, and the settings that make them shorter."""


@dataclass(frozen=True)
class TimeTerm:
    """One part of an epoch."""

    name: str
    seconds: float
    """In one epoch."""
    setting: str = ""
    """The settings that make it shorter."""


@dataclass(frozen=True)
class Duration:
    """Seconds before the first step, in an epoch, and after the last step."""

    prepare: float
    tune: float
    steps: tuple[TimeTerm, ...]
    """The parts of the steps of an epoch."""
    between: tuple[TimeTerm, ...]
    """An epoch's share of what happens between steps: refresh, validation, checkpoints."""
    num_steps: int
    """Steps of an epoch."""
    epochs: int

    @property
    def terms(self) -> tuple[TimeTerm, ...]:
        """Every part of an epoch."""
        return self.steps + self.between

    @property
    def epoch(self) -> float:
        """Seconds of an epoch."""
        return sum(term.seconds for term in self.terms)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(term.seconds for term in self.steps) / self.num_steps

    @property
    def total(self) -> float:
        """Seconds of the run."""
        return self.prepare + self.epochs * self.epoch + self.tune

    @property
    def largest(self) -> TimeTerm:
        """The longest part of an epoch that a setting shortens."""
        return max((term for term in self.terms if term.setting), key=lambda term: term.seconds)


def time_run(dataset: Dataset, config: Config, sizes: Sizes, *, clock: Clock = time.perf_counter) -> Duration:
    """Train a few steps on the data or a sample of it, validate, save and tune; extrapolate to the run."""
    sample = draw_sample(dataset, config, sizes)
    # Clusters and hard negatives from the first step on; batches as large as those of the run.
    start = 0 if needs_refresh(config) else config.batch.start
    timed = replace(config, batch=replace(config.batch, start=start, size=batch_size(sizes, config)))
    sampled = sizes if sample is dataset else sizes_from_data(sample, timed)
    with tempfile.TemporaryDirectory() as folder, _global_state_restored():
        measured = _measure(sample, timed, Path(folder), clock)
    seconds = {
        phase: spent * _work(phase, sizes, config) / max(1.0, _work(phase, sampled, timed))
        for phase, spent in measured.items()
    }
    steps, epochs = steps_per_epoch(sizes, config), config.train.epochs
    terms = [TimeTerm(name, steps * seconds[phase], setting) for phase, (name, setting) in _STEP_PHASES.items()]
    terms.append(TimeTerm("everything else", steps * seconds["other"]))
    between = []
    if needs_refresh(config):
        times = math.ceil((epochs - config.batch.start) / config.batch.refresh)
        spent = sum(seconds[phase] for phase in _REFRESH_PHASES)
        between.append(TimeTerm(_REFRESH, spent * times / epochs, "batch.refresh"))
    validations = max(1 / epochs, 1 / config.validation.every_epochs)
    if sizes.num_validation:
        between.append(TimeTerm("validation", validations * seconds["validation"], "validation.every_epochs"))
    between.append(TimeTerm("checkpoints", validations * seconds["checkpoint"], "validation.every_epochs"))
    return Duration(seconds["prepare"], seconds["tuning"], tuple(terms), tuple(between), steps, epochs)


def draw_sample(dataset: Dataset, config: Config, sizes: Sizes) -> Dataset:
    """The data set, or where its texts are many, whole batches of its queries with some of its labels.

    Queries and labels stand at equal distances through the data; one label of each sampled query is always kept.
    """
    limit = _SAMPLED_CHARACTERS[sizes.encoder.kind]
    num_queries, num_labels = len(dataset.train), dataset.num_labels
    per_label = sum(map(len, dataset.label_texts)) / num_labels
    affordable = max(_FEWEST_QUERIES, int(limit / max(1.0, sizes.characters_per_query)))
    if affordable < num_queries:
        size = batch_size(sizes, config)
        batches = max(2, affordable // size)
        if config.batch.order == "clustered":
            batches = 1 << (batches.bit_length() - 1)
        # A little below a whole number of batches, since the share held out for validation varies.
        num_queries = min(num_queries, math.ceil(0.97 * batches * size / (1 - config.validation.fraction)))
    if num_queries == len(dataset.train) and per_label * num_labels <= limit:
        return dataset
    split = dataset.train.select(spread_rows(len(dataset.train), num_queries))
    starts = split.relevance.indptr[:-1][np.diff(split.relevance.indptr) > 0]
    spread_labels = spread_rows(num_labels, max(1, int(limit / max(1.0, per_label))))
    labels = np.union1d(spread_labels, split.relevance.indices[starts])
    filtered = None if split.filtered is None else split.filtered[:, labels]
    return Dataset(
        dataset.name,
        [dataset.label_texts[label] for label in labels],
        [dataset.label_ids[label] for label in labels],
        Split(split.texts, split.uids, split.relevance[:, labels], filtered),
    )


def _measure(dataset: Dataset, config: Config, folder: Path, clock: Clock) -> dict[str, float]:
    """Seconds by phase: preparing, a refresh, a step by its parts, a checkpoint, a validation, the tuning."""
    started = clock()
    trainer = Trainer(config, dataset, folder)
    seconds = {"prepare": clock() - started}
    trainer.watch = watch = Stopwatch(clock)
    trainer.take_step()
    seconds |= {phase: watch.seconds[phase] for phase in _REFRESH_PHASES}
    trainer.watch = watch = Stopwatch(clock)
    started, num_steps = clock(), 0
    while num_steps < _FEWEST_STEPS or (num_steps < _MOST_STEPS and clock() - started < _SECONDS_OF_STEPS):
        trainer.take_step()
        num_steps += 1
    elapsed = clock() - started - sum(watch.seconds[phase] for phase in _REFRESH_PHASES)
    seconds |= {phase: watch.seconds[phase] / num_steps for phase in _STEP_PHASES}
    seconds["other"] = elapsed / num_steps - sum(seconds[phase] for phase in _STEP_PHASES)
    started = clock()
    trainer.save()
    seconds["checkpoint"] = clock() - started
    trainer.num_steps = trainer.step + 1
    trainer.run()
    return seconds | {phase: watch.seconds[phase] for phase in ("validation", "tuning")}


def _work(phase: str, sizes: Sizes, config: Config) -> float:
    """How much of its work a phase has: what its time is proportional to."""
    queries, pool, encoder = batch_size(sizes, config), pool_size(sizes, config), sizes.encoder
    match phase:
        case "encode" | "backward":
            return queries * sizes.tokens_per_query + texts_per_step(sizes, config) * sizes.tokens_per_label
        case "batch" | "loss":
            return queries * pool
        case "update":
            rows = sizes.touched_rows * encoder.dimension if sizes.sparse else encoder.table_elements
            return encoder.weights + rows + (pool * score_width(sizes, config) if config.head.classifier else 0)
        case "prepare" | "embed":
            return sizes.query_tokens + sizes.label_tokens
        case "cluster":
            return sizes.num_queries * max(1.0, math.log2(steps_per_epoch(sizes, config)))
        case "mine":
            return sizes.num_queries * sizes.num_labels
        case "validation":  # the search takes longest with a static encoder, else the encoding
            if encoder.kind == "static":
                return sizes.num_validation * sizes.num_labels
            return sizes.label_tokens + sizes.num_validation * sizes.tokens_per_query
        case "checkpoint":
            return checkpoint_bytes(sizes, config)
        case "tuning":
            return sizes.num_queries
    return 1.0


@contextmanager
def _global_state_restored() -> Iterator[None]:
    """Restore random states, threads and the level of the log afterwards."""
    threads, log = torch.get_num_threads(), logging.getLogger("dexter")
    level = log.level
    with torch.random.fork_rng(devices=[]):
        try:
            log.setLevel(logging.WARNING)
            yield
        finally:
            log.setLevel(level)
            torch.set_num_threads(threads)
