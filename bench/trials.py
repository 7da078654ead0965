"""One training run in a temporary folder, scored head by head on the test split: what the recipe benchmarks share."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import shared_data
from dexter.data import Dataset
from dexter.data.formats import load_dataset
from dexter.data.sources import build
from dexter.evaluation.runs import DEFAULT_KS, evaluate
from dexter.predict.predictor import Predictor
from dexter.predict.rank import RankingChoice
from dexter.training import train
from dexter.types import HeadName

COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")
HEAD_TITLES: dict[HeadName, str] = {"encoder": "DE", "classifier": "CLF", "unified": "unified"}


@dataclass(frozen=True)
class Trial:
    """What a run gave on the test split."""

    metrics: dict[HeadName, dict[str, float]]
    """Percent, by head."""
    cpu_seconds: float
    """Processor time of training alone: tokens, steps, refreshes and validations."""


def load(data: str, *, num_queries: int = 0, seed: int = 0) -> Dataset:
    """`pydocs`, built on this machine, or the path or shared name of a data set; so many training queries, or all."""
    dataset = build("pydocs") if data == "pydocs" else _read(data)
    if not 0 < num_queries < len(dataset.train):
        return dataset
    rows = np.random.default_rng(seed).permutation(len(dataset.train))[:num_queries]
    return replace(dataset, train=dataset.train.select(np.sort(rows)))


def _read(data: str) -> Dataset:
    return load_dataset(data) if Path(data).exists() else shared_data.load(data)


def run(dataset: Dataset, recipe: str, overrides: Mapping[str, Any], *, heads: Iterable[HeadName] = ()) -> Trial:
    """Train, and score the named heads (all that the model has, if none is named).

    Heads are scored as they were trained: without the neighbours and the dial that are chosen on validation afterwards.
    """
    ks = [k for k in DEFAULT_KS if k <= dataset.num_labels]
    settings = {"scoring.neighbours": 0} | dict(overrides)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        finished = train(dataset, recipe=recipe, out=Path(folder) / "run", overrides=settings)
        cpu_seconds = time.process_time() - started
        model = Predictor.load(finished.path).model
        metrics = {}
        for head in heads or model.heads:
            predictor = Predictor(model, RankingChoice(head=head, dial=model.default_dial))
            metrics[head] = evaluate(predictor, dataset, ks=ks, num_resamples=0).metrics
    return Trial(metrics, cpu_seconds)


def mean(trials: Sequence[Trial]) -> Trial:
    """The mean of the same run under several seeds."""
    metrics = {
        head: {name: float(np.mean([trial.metrics[head][name] for trial in trials])) for name in first}
        for head, first in trials[0].metrics.items()
    }
    return Trial(metrics, float(np.mean([trial.cpu_seconds for trial in trials])))


def header(title: str, *, width: int) -> str:
    """The first line of a table whose rows `lines` makes."""
    return f"{title:{width}s} {'head':8s}" + "".join(f"{column:>7s}" for column in COLUMNS) + f"{'CPU s':>8s}"


def lines(title: str, trial: Trial, *, width: int) -> str:
    """A run as one line per head."""
    rows = []
    for place, (head, metrics) in enumerate(trial.metrics.items()):
        values = "".join(f"{metrics[column]:7.2f}" for column in COLUMNS)
        cost = f"{trial.cpu_seconds:8.0f}" if place == 0 else ""
        rows.append(f"{title if place == 0 else '':{width}s} {HEAD_TITLES[head]:8s}{values}{cost}")
    return "\n".join(rows)
