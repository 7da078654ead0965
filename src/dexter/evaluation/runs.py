"""Trained runs on a data set's test queries: predictions, scored, recorded, and held against those of other runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dexter.data import Dataset, Split
from dexter.errors import DataError, ModelError, UsageError
from dexter.evaluation.misses import MISSED_PLACES, MISSED_TEXTS, Miss, find_misses, write_misses
from dexter.evaluation.records import json_values, make_record, write_record
from dexter.evaluation.reports import Comparison, Report, compare, score_report
from dexter.evaluation.tables import render_comparison, render_table
from dexter.metrics import member_mask, overfetch, remove_filtered
from dexter.predict.calibration import FITTED_PLACES, REPORTED_PLACES, calibration_error, softmax
from dexter.predict.predictor import Predictor, Runtime
from dexter.training.distributed import ProcessGroup, joined
from dexter.types import HeadName, TopK

log = logging.getLogger("dexter")
DEFAULT_KS = (1, 3, 5, 10, 100)
"""The cut-offs, as far as the data set has labels enough."""
TABLE_COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@5", "R@10", "R@100")
"""The metrics of the tables that are printed, where they were computed."""


@dataclass(frozen=True)
class Evaluation:
    """A report and the record that says all about how it came about."""

    report: Report
    record: dict[str, Any]


@dataclass(frozen=True)
class RunComparison:
    """Several runs on the same queries; each but the first is held against the first."""

    reports: Mapping[str, Report]
    differences: Mapping[str, Comparison]

    def render(self) -> str:
        """A table of all runs, then one of differences with intervals for each run but the first."""
        first = next(iter(self.reports))
        parts = [render_table(self.reports)]
        parts += [render_comparison(found, (first, name)) for name, found in self.differences.items()]
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        runs = {name: {"metrics": r.metrics, "by_frequency": r.by_frequency} for name, r in self.reports.items()}
        differences = {
            name: {metric: asdict(interval) for metric, interval in found.differences.items()}
            for name, found in self.differences.items()
        }
        settings = next((found.settings for found in self.differences.values()), {})
        against = next(iter(self.reports))
        return dict(json_values({"runs": runs, "against": against, "differences": differences, "settings": settings}))


def evaluate(
    run: str | Path | Predictor,
    data: Dataset | str | Path,
    *,
    ks: Sequence[int] | None = None,
    propensity: tuple[float, float] = (0.55, 1.5),
    num_resamples: int = 1000,
    seed: int = 0,
    processes: ProcessGroup | None = None,
) -> Report:
    """Score a run on a data set's test split; labels are matched by id, so their order may differ.

    Args:
        run: a run folder, or a predictor.
        data: a data set, or the path or name of one.
        ks: the cut-offs; `DEFAULT_KS` as far as there are labels enough when not given.
        propensity: the constants (a, b) of PSP.
        num_resamples: bootstrap resamples for the intervals; 0 leaves them out.
        seed: of the resampling.
        processes: each ranks the labels of its part of the queries, and all return the whole report.
    """
    from dexter.data.formats import load_dataset

    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    predictor = run if isinstance(run, Predictor) else Predictor.load(run)
    split = test_split(dataset)
    ks = _cut_offs(ks, dataset)
    found = predict_split(predictor, split, max(*ks, FITTED_PLACES), processes=processes)
    columns_NK = as_columns(predictor, dataset, found.ids)
    report = score_report(
        columns_NK, split, dataset.train.relevance, ks=ks, propensity=propensity, num_resamples=num_resamples, seed=seed
    )
    return replace(report, calibration=calibration_errors(predictor, split, found, columns_NK))


def evaluate_run(
    run: Path,
    dataset: Dataset,
    *,
    head: HeadName | None = None,
    neighbours: bool | None = None,
    dial: float | None = None,
    ks: Sequence[int] | None = None,
    propensity: tuple[float, float] = (0.55, 1.5),
    record: Path | None = None,
    index: Literal["exact"] | None = None,
    runtime: Runtime = "torch",
) -> Evaluation:
    """Evaluate, and write the result record (below the run folder unless another path is given)."""
    started = time.monotonic()
    predictor = Predictor.load(run, head=head, neighbours=neighbours, dial=dial, index=index, runtime=runtime)
    exported = predictor.model.query_encoder
    with joined() as processes:
        report = evaluate(predictor, dataset, ks=ks, propensity=propensity, processes=processes)
    described = make_record(
        report,
        dataset,
        model_hash=predictor.fingerprint,
        encoder=type(predictor.model.encoder).__name__,
        head=predictor.head,
        k=max(report.settings["ks"]),
        index=predictor.index.backend,
        index_recall=predictor.index.recall,
        scoring=predictor.scoring,
        seed=predictor.model.facts.get("seed"),
        dtype="float32" if exported is None else exported.precision,
        runtime=runtime,
        device=str(predictor.model.representations_LD.device),
        wall_seconds=time.monotonic() - started,
    )
    path = record or run / "results" / f"{dataset.name}-test-{predictor.head}.json"
    if processes.is_first:
        write_record(path, described)
        write_misses(path.with_suffix(".misses.jsonl"), _misses(predictor, dataset))
        log.info("result record: %s", path)
    return Evaluation(report, described)


def _misses(predictor: Predictor, dataset: Dataset) -> Iterator[Miss]:
    split = test_split(dataset)
    split = split.select(np.arange(min(len(split), MISSED_TEXTS)))
    columns_NK = predict_columns(predictor, dataset, split, MISSED_PLACES)
    kept_NK = remove_filtered(columns_NK, np.zeros(columns_NK.shape), split.filtered, MISSED_PLACES).ids
    return find_misses(kept_NK, split.texts, split.relevance, dataset.label_ids)


def compare_runs(
    runs: Sequence[Path],
    dataset: Dataset,
    *,
    ks: Sequence[int] | None = None,
    propensity: tuple[float, float] = (0.55, 1.5),
    num_resamples: int = 1000,
    seed: int = 0,
) -> RunComparison:
    """Score every run on the same queries, with the differences of each run from the first and their intervals."""
    names = [str(run) for run in runs]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise UsageError(f"compare needs two different runs or more, got {', '.join(names) or 'none'}")
    split, ks = test_split(dataset), _cut_offs(ks or (1, 3, 5), dataset)
    relevance = dataset.train.relevance
    tops = {str(run): predict_columns(Predictor.load(run), dataset, split, max(ks)) for run in runs}
    reports = {
        name: score_report(top_ids, split, relevance, ks=ks, propensity=propensity, num_resamples=0)
        for name, top_ids in tops.items()
    }
    first_ids = tops[names[0]]
    differences = {
        name: compare(
            first_ids,
            tops[name],
            split,
            relevance,
            ks=ks,
            propensity=propensity,
            num_resamples=num_resamples,
            seed=seed,
        )
        for name in names[1:]
    }
    return RunComparison(reports, differences)


def predict_columns(predictor: Predictor, dataset: Dataset, split: Split, k: int) -> NDArray[np.int64]:
    """The best labels of a split's queries, as the data set's columns; -1 for a label the data set does not have."""
    return as_columns(predictor, dataset, predict_split(predictor, split, k).ids)


def predict_split(predictor: Predictor, split: Split, k: int, *, processes: ProcessGroup | None = None) -> TopK:
    """The best labels of a split's queries, as the predictor's positions; each process of several ranks its part.

    Where the split has filter pairs there are so many places more than k that k are left when they are removed.
    """
    processes = processes or ProcessGroup()
    found = predictor.top(split.texts[processes.part(len(split))], k + overfetch(split.filtered))
    if processes.size == 1:
        return found
    ids, scores = (processes.concatenate(torch.from_numpy(values)).numpy() for values in (found.ids, found.scores))
    return TopK(ids, scores)


def as_columns(predictor: Predictor, dataset: Dataset, ids_NK: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions among the predictor's labels as the data set's columns; -1 for a label the data set does not have."""
    columns = {label_id: column for column, label_id in enumerate(dataset.label_ids)}
    places = np.array([columns.get(label_id, -1) for label_id in predictor.labels.ids], dtype=np.int64)
    num_strange = int((places < 0).sum())
    if num_strange == len(places):
        raise ModelError(
            f"none of the model's {len(places):,} label ids is in {dataset.name} (the model has "
            f"{predictor.labels.ids[0]!r}, the data set {dataset.label_ids[0]!r}): evaluate on data that shares labels"
        )
    if num_strange:
        log.warning("%d of the model's labels are not in %s: predicting one is a miss", num_strange, dataset.name)
    columns_NK: NDArray[np.int64] = np.append(places, -1)[ids_NK]
    return columns_NK


def calibration_errors(
    predictor: Predictor, split: Split, found: TopK, columns_NK: NDArray[np.int64]
) -> dict[str, float]:
    """Of the first places of each query: how far probabilities are from what is right, before and after calibration.

    Before is the softmax over the places found, at the temperature of training.
    """
    calibration = predictor.calibration
    if calibration is None:
        return {}
    model = predictor.model
    chances = {
        "softmax": softmax(found.scores, model.head.temperature),
        "calibrated": calibration.probabilities(found, model.labels.counts),
    }
    errors = {}
    for name, chances_NK in chances.items():
        shown = remove_filtered(columns_NK, chances_NK, split.filtered, REPORTED_PLACES)
        there = np.isfinite(shown.scores)
        errors[name] = calibration_error(shown.scores[there], member_mask(shown.ids, split.relevance)[there])
    return errors


def test_split(dataset: Dataset) -> Split:
    """The test split, or an error that says how to get one."""
    if dataset.test is None:
        raise DataError(f"{dataset.name} has no test split: add one, or read the validation figures of the run")
    return dataset.test


def _cut_offs(ks: Sequence[int] | None, dataset: Dataset) -> list[int]:
    """What was asked for; by default the usual ones that the data set has labels enough for."""
    return list(ks) if ks is not None else [k for k in DEFAULT_KS if k <= dataset.num_labels] or [1]
