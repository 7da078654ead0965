"""`evaluate`: a run's predictions for the test queries of a data set, scored, recorded and held against other runs'."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.data import Dataset, Split
from dexter.errors import DataError, UsageError
from dexter.evaluation.records import make_record, write_record
from dexter.evaluation.reports import Report, compare, score_report
from dexter.evaluation.tables import render_comparison, render_table
from dexter.metrics import overfetch
from dexter.predictor import Predictor

DEFAULT_KS = (1, 3, 5, 10, 100)
TABLE_COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@5", "R@10", "R@100")
"""The metrics of the tables that are printed, where the data set has labels enough."""


@dataclass(frozen=True)
class Evaluation:
    """A report and the record that says all about how it came about."""

    report: Report
    record: dict[str, Any]


def evaluate(
    run: str | Path | Predictor,
    data: Dataset | str | Path,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    propensity: tuple[float, float] = (0.55, 1.5),
    num_resamples: int = 1000,
    seed: int = 0,
) -> Report:
    """Score a run on a data set's test split; labels are matched by id, so their order may differ."""
    from dexter.data.formats import load_dataset

    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    predictor = run if isinstance(run, Predictor) else Predictor.load(run)
    split = test_split(dataset)
    ks = _possible(ks, dataset)
    top_ids = predict_columns(predictor, dataset, split, max(ks))
    return score_report(
        top_ids, split, dataset.train.relevance, ks=ks, propensity=propensity, num_resamples=num_resamples, seed=seed
    )


def evaluate_run(
    run: Path,
    dataset: Dataset,
    *,
    ks: Sequence[int] = DEFAULT_KS,
    propensity: tuple[float, float] = (0.55, 1.5),
    record: Path | None = None,
) -> Evaluation:
    """Evaluate, and write the result record (below the run folder unless another path is given)."""
    started = time.monotonic()
    predictor = Predictor.load(run)
    report = evaluate(predictor, dataset, ks=ks, propensity=propensity)
    facts = predictor.model.facts
    described = make_record(
        report,
        dataset,
        model_hash=predictor.fingerprint,
        encoder=type(predictor.model.encoder).__name__,
        head="encoder",
        k=max(_possible(ks, dataset)),
        index="exact",
        seed=facts.get("seed"),
        dtype="float32",
        device=str(predictor.model.representations_LD.device),
        wall_seconds=time.monotonic() - started,
    )
    write_record(record or run / "results" / f"{dataset.name}-test.json", described)
    return Evaluation(report, described)


def compare_runs(
    runs: Sequence[Path],
    dataset: Dataset,
    *,
    ks: Sequence[int] = (1, 3, 5),
    propensity: tuple[float, float] = (0.55, 1.5),
) -> str:
    """A table of all runs, then the differences of each run from the first, with paired intervals."""
    if len(runs) < 2:
        raise UsageError("compare needs two runs or more")
    split = test_split(dataset)
    ks = _possible(ks, dataset)
    relevance = dataset.train.relevance
    tops = {str(run): predict_columns(Predictor.load(run), dataset, split, max(ks)) for run in runs}
    reports = {
        name: score_report(top_ids, split, relevance, ks=ks, propensity=propensity, num_resamples=0)
        for name, top_ids in tops.items()
    }
    parts = [render_table(reports)]
    (first, first_ids), *others = tops.items()
    for name, top_ids in others:
        difference = compare(first_ids, top_ids, split, relevance, ks=ks, propensity=propensity)
        parts.append(render_comparison(difference, (first, name)))
    return "\n\n".join(parts)


def predict_columns(predictor: Predictor, dataset: Dataset, split: Split, k: int) -> NDArray[np.int64]:
    """The best labels of a split's queries, as the data set's columns; -1 for a label the data set does not have."""
    extra = overfetch(split.filtered) if split.filtered is not None else 0
    found = predictor.top(split.texts, k + extra)
    columns = {label_id: column for column, label_id in enumerate(dataset.label_ids)}
    places = np.array([*(columns.get(label_id, -1) for label_id in predictor.labels.ids), -1], dtype=np.int64)
    return places[found.ids]


def test_split(dataset: Dataset) -> Split:
    """The test split, or an error that says how to get one."""
    if dataset.test is None:
        raise DataError(f"{dataset.name} has no test split: add one, or read the validation figures of the run")
    return dataset.test


def _possible(ks: Sequence[int], dataset: Dataset) -> list[int]:
    return [k for k in ks if k <= dataset.num_labels] or [1]
