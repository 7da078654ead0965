"""Evaluate trained runs on the test queries of a data set: score, record, compare, and turn the frequency dial."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split
from dexter.data.benchmarks import describe_fields
from dexter.errors import ModelError, ResourceError, UsageError
from dexter.evaluation.baselines import Baseline, baseline
from dexter.evaluation.records import (
    MISSED_PLACES,
    MISSED_TEXTS,
    Miss,
    find_misses,
    json_values,
    make_record,
    write_misses,
    write_record,
)
from dexter.evaluation.report import Comparison, Report, compare, score_report, test_split
from dexter.evaluation.tables import render_comparison, render_deciles, render_table
from dexter.metrics import hierarchy_ratios, member_mask, overfetch, remove_filtered
from dexter.predict.calibration import (
    FITTED_PLACES,
    NUM_PLACES,
    REPORTED_PLACES,
    calibration_error,
    level,
    reliability,
    softmax,
)
from dexter.predict.predictor import Predictor, Runtime
from dexter.predict.scoring import choose_ranking
from dexter.predict.windows import encode_texts, rank_texts
from dexter.processes import Processes, SingleProcess, concatenate_arrays
from dexter.progress import track
from dexter.types import HeadName, TopK

log = logging.getLogger("dexter")
DEFAULT_KS = (1, 3, 5, 10, 100)
"""The cut-offs, except those larger than the number of labels."""
TABLE_COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@5", "R@10", "R@100")
"""The metrics of the tables that are printed, where they were computed."""
DIALS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_DIAL_KS = (1, 3, 5)
_TEXTS_PER_BLOCK = 2048
"""Texts that are ranked between two steps of the progress bar."""
_HIERARCHY_K = 10
"""Largest cut-off of the metrics that count broader labels."""


@dataclass(frozen=True)
class Evaluation:
    """A report, and the result record that says how it was computed."""

    report: Report
    record: dict[str, Any]


@dataclass(frozen=True)
class RunComparison:
    """Several runs on the same queries; each but the first is compared with the first."""

    reports: Mapping[str, Report]
    differences: Mapping[str, Comparison]

    def render(self, *, deciles: bool = False) -> str:
        """Render a table of all runs, then one of differences with intervals for each run but the first.

        With `deciles`, the second table is that of label-frequency deciles.
        """
        first = next(iter(self.reports))
        parts = [render_table(self.reports)] + ([render_deciles(self.reports)] if deciles else [])
        parts += [render_comparison(found, (first, name)) for name, found in self.differences.items()]
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        runs = {
            name: {"metrics": r.metrics, "by_frequency": r.by_frequency, "by_decile": r.by_decile}
            for name, r in self.reports.items()
        }
        differences = {
            name: {metric: asdict(interval) for metric, interval in found.differences.items()}
            for name, found in self.differences.items()
        }
        settings = next((found.settings for found in self.differences.values()), {})
        against = next(iter(self.reports))
        return dict(json_values({"runs": runs, "against": against, "differences": differences, "settings": settings}))


@dataclass(frozen=True, kw_only=True)
class DialCurve:
    """The metrics of one model at several values of the frequency dial."""

    points: Mapping[float, Mapping[str, float]]
    """Metrics in percent, by value of the dial."""
    current: float
    """The value that predictions use."""

    def render(self) -> str:
        """Render a table with a row for each value; * marks the one that predictions use."""
        columns = [name for name in next(iter(self.points.values())) if name.startswith(("P@", "PSP@"))]
        lines = ["dial " + "".join(f"{name:>8s}" for name in columns)]
        for dial, metrics in self.points.items():
            mark = "*" if dial == self.current else " "
            lines.append(f"{dial:4g}{mark}" + "".join(f"{metrics[name]:8.2f}" for name in columns))
        return "\n".join(lines)


def evaluate(
    run: str | Path | Predictor,
    data: Dataset | str | Path,
    *,
    ks: Sequence[int] | None = None,
    propensity: tuple[float, float] | None = None,
    num_resamples: int = 1000,
    processes: Processes | None = None,
) -> Report:
    """Score a run on a data set's test split; labels are matched by id, so their order may differ.

    Args:
        run: a run folder, or a predictor.
        data: a data set, or the path or name of one.
        ks: the cut-offs; if left out, those of `DEFAULT_KS` that the number of labels allows.
        propensity: the constants (a, b) of PSP; the data set's own if left out.
        num_resamples: bootstrap resamples for the intervals; 0 leaves them out.
        processes: each process ranks the labels for its share of the queries, and all return the whole report.
    """
    from dexter.data.formats import load_dataset

    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    predictor = run if isinstance(run, Predictor) else Predictor.load(run)
    settings: dict[str, Any] = {"propensity": propensity or dataset.propensity, "num_resamples": num_resamples}
    return _rank_and_score(predictor, _filter_own(predictor, dataset), ks, processes, **settings)[0]


def evaluate_run(
    run: Path,
    dataset: Dataset,
    *,
    head: HeadName | None = None,
    neighbours: bool | None = None,
    dial: float | None = None,
    ks: Sequence[int] | None = None,
    propensity: tuple[float, float] | None = None,
    record: Path | None = None,
    index: Literal["exact"] | None = None,
    runtime: Runtime = "torch",
    processes: Processes | None = None,
) -> Evaluation:
    """Evaluate a run, and write the result record and the misses beside it.

    Without `record` they are written below the run folder. Of several processes the first writes.
    """
    started = time.monotonic()
    predictor = Predictor.load(run, head=head, neighbours=neighbours, dial=dial, index=index, runtime=runtime)
    exported = predictor.model.query_encoder
    scored = _filter_own(predictor, dataset)
    report, columns_NK = _rank_and_score(predictor, scored, ks, processes, propensity=propensity or dataset.propensity)
    described = make_record(
        report,
        scored.dataset,
        model={
            "sha256": predictor.fingerprint,
            "encoder": type(predictor.model.encoder).__name__,
            "head": predictor.choice.head,
            "seed": predictor.model.facts.get("seed"),
            "dtype": "float32" if exported is None else exported.precision,
            "runtime": runtime,
        },
        search={"k": max(report.settings["ks"]), "index": predictor.index.backend, "recall": predictor.index.recall},
        scoring=asdict(predictor.choice),
        device=predictor.model.device,
        seconds=time.monotonic() - started,
    )
    path = record or run / "results" / f"{dataset.name}-test-{predictor.choice.head}.json"
    if processes is None or processes.rank == 0:
        write_record(path, described)
        write_misses(path.with_suffix(".misses.jsonl"), _find_test_misses(scored.dataset, columns_NK))
        log.info("result record: %s", path)
        if record is None and predictor.choice == choose_ranking(predictor.model, predictor.scoring):
            _rewrite_card(run, predictor)
    return Evaluation(report, described)


def _rewrite_card(run: Path, predictor: Predictor) -> None:
    from dexter.evaluation.card import write_card

    try:
        log.info("model card: %s", write_card(run, predictor=predictor))
    except ResourceError as error:
        log.warning("no model card: %s", error)


def compare_runs(
    runs: Sequence[Path],
    dataset: Dataset,
    *,
    ks: Sequence[int] | None = None,
    propensity: tuple[float, float] | None = None,
    num_resamples: int = 1000,
    baselines: Sequence[Baseline] = (),
) -> RunComparison:
    """Score every run and baseline on the same queries, and compare each but the first run with it.

    Own labels that one of the runs leaves out are left out for all of them, and for the baselines.
    """
    names = [*(str(run) for run in runs), *baselines]
    if len(set(names)) < 2 or len(set(names)) < len(names):
        raise UsageError(
            f"compare needs two different runs or more, or a run and a baseline, got {', '.join(names) or 'none'}"
        )
    predictors = {str(run): Predictor.load(run) for run in runs}
    for predictor in predictors.values():
        dataset = _filter_own(predictor, dataset).dataset
    split, ks = test_split(dataset), _choose_ks(ks or (1, 3, 5), dataset)
    relevance = dataset.train.relevance
    settings: dict[str, Any] = {"ks": ks, "propensity": propensity or dataset.propensity}
    tops = {name: predict_columns(each, dataset, split, max(ks)) for name, each in predictors.items()}
    tops |= {name: baseline(name, dataset, max(ks) + overfetch(split.filtered)).ids for name in baselines}
    reports = {
        name: score_report(top_ids, split, relevance, num_resamples=0, **settings) for name, top_ids in tops.items()
    }
    differences = {
        name: compare(tops[names[0]], tops[name], split, relevance, num_resamples=num_resamples, **settings)
        for name in names[1:]
    }
    return RunComparison(reports, differences)


def dial_curve(
    predictor: Predictor,
    dataset: Dataset,
    *,
    dials: Sequence[float] = DIALS,
    propensity: tuple[float, float] | None = None,
) -> DialCurve:
    """Score the test split at several values of the frequency dial; the texts are encoded once.

    Args:
        predictor: gives the model, the head and whether neighbours vote.
        dataset: the data set whose test split is scored.
        dials: the values; the predictor's own is added.
        propensity: the constants (a, b) of PSP; the data set's own if left out.
    """
    if not dials:
        raise UsageError("a dial curve needs at least one value of the dial")
    dataset = _filter_own(predictor, dataset).dataset
    split = test_split(dataset)
    ks = [k for k in _DIAL_KS if k <= dataset.num_labels]
    _warn_of_other_fields(predictor, dataset)
    model = predictor.model
    encoded = encode_texts(model, split.texts, predictor.choice)
    num_places = max(ks) + overfetch(split.filtered)
    points = {}
    values = sorted({*dials, predictor.choice.dial})
    for dial in track(values, what="turn the dial", total=len(values), unit="value"):
        turned = predictor.variant(predictor.choose(dial=dial), model=model)
        found = rank_texts(model, turned.index, encoded, turned.choice, num_places)
        columns_NK = as_columns(turned, dataset, found.ids)
        constants = propensity or dataset.propensity
        report = score_report(columns_NK, split, dataset.train.relevance, ks=ks, propensity=constants, num_resamples=0)
        points[dial] = report.metrics
    return DialCurve(points=points, current=predictor.choice.dial)


def predict_columns(predictor: Predictor, dataset: Dataset, split: Split, k: int) -> NDArray[np.int64]:
    """Return the best labels of a split's queries as columns of the data set; -1 for labels it does not have.

    Where the split has filter pairs, enough places more than k are returned that k are left after their removal.
    """
    _warn_of_other_fields(predictor, dataset)
    return as_columns(predictor, dataset, _predict_split(predictor, split, k).ids)


def as_columns(predictor: Predictor, dataset: Dataset, ids_NK: NDArray[np.int64]) -> NDArray[np.int64]:
    """Turn positions among the predictor's labels into columns of the data set; -1 for labels it does not have."""
    columns = {label_id: column for column, label_id in enumerate(dataset.label_ids)}
    column_of_label = np.array([columns.get(label_id, -1) for label_id in predictor.labels.ids], dtype=np.int64)
    num_missing = int((column_of_label < 0).sum())
    if num_missing == len(column_of_label):
        raise ModelError(
            f"none of the model's {len(column_of_label):,} label ids is in {dataset.name} (the model has "
            f"{predictor.labels.ids[0]!r}, the data set {dataset.label_ids[0]!r}): evaluate on data that shares labels"
        )
    if num_missing:
        log.warning("%d of the model's labels are not in %s: predicting one is a miss", num_missing, dataset.name)
    columns_NK: NDArray[np.int64] = np.append(column_of_label, -1)[ids_NK]
    return columns_NK


class _Scored(NamedTuple):
    """A data set to score on, and its test queries with the filter pairs that it came with."""

    dataset: Dataset
    given: Split


def _filter_own(predictor: Predictor, dataset: Dataset) -> _Scored:
    """Add own labels to the filter pairs of the test queries where the run leaves them out, and say so."""
    given = test_split(dataset)
    filtered = predictor.own_labels.filter_test(dataset)
    num_added = _count_filter_pairs(test_split(filtered)) - _count_filter_pairs(given)
    if num_added:
        log.info("%s pairs of a test query and its own label are left out, as in training", f"{num_added:,}")
    return _Scored(filtered, given)


def _count_filter_pairs(split: Split) -> int:
    return 0 if split.filtered is None else int(split.filtered.nnz)


def _describe_own(
    columns_NK: NDArray[np.int64], scored: _Scored, ks: Sequence[int], propensity: tuple[float, float]
) -> dict[str, Any]:
    """Return how many own labels are left out, and the metrics if they were not; empty if there are none."""
    dataset, given = scored
    num_given, filtered = _count_filter_pairs(given), test_split(dataset).filtered
    if filtered is None or filtered.nnz == num_given:
        return {}
    own = filtered.copy() if given.filtered is None else filtered - filtered.multiply(given.filtered.astype(bool))
    own.eliminate_zeros()
    kept = score_report(columns_NK, given, dataset.train.relevance, ks=ks, propensity=propensity, num_resamples=0)
    return {
        "num_queries": int((np.diff(own.indptr) > 0).sum()),
        "num_positive": int(own.multiply(given.relevance).nnz),
        "metrics_with_own": kept.metrics,
    }


def _rank_and_score(
    predictor: Predictor, scored: _Scored, ks: Sequence[int] | None, processes: Processes | None, **settings: Any
) -> tuple[Report, NDArray[np.int64]]:
    """Return the report on the test split, and the predictions as columns of the data set."""
    dataset = scored.dataset
    split = test_split(dataset)
    ks = _choose_ks(ks, dataset)
    _warn_of_other_fields(predictor, dataset)
    found = _predict_split(predictor, split, max(*ks, FITTED_PLACES), processes=processes)
    columns_NK = as_columns(predictor, dataset, found.ids)
    report = score_report(columns_NK, split, dataset.train.relevance, ks=ks, **settings)
    errors, bins = _calibration_errors(predictor, split, found, columns_NK)
    own = _describe_own(columns_NK, scored, ks, settings["propensity"])
    hierarchy = _score_hierarchy(columns_NK, dataset, ks)
    return replace(report, calibration=errors, reliability=bins, own_labels=own, hierarchy=hierarchy), columns_NK


def _score_hierarchy(columns_NK: NDArray[np.int64], dataset: Dataset, ks: Sequence[int]) -> dict[str, float]:
    """Return the metrics that count broader labels; none where the data set has no hierarchy."""
    ks = [k for k in ks if k <= _HIERARCHY_K]
    if dataset.names is None or not dataset.names.broader or not ks:
        return {}
    split = test_split(dataset)
    scores_NK = np.zeros(columns_NK.shape, dtype=np.float32)
    kept_NK = remove_filtered(columns_NK, scores_NK, split.filtered, max(ks)).ids
    broader = _broader_matrix(dataset.label_ids, dataset.names.broader)
    return {name: ratio.value for name, ratio in hierarchy_ratios(kept_NK, split.relevance, broader, ks).items()}


def _broader_matrix(label_ids: Sequence[str], broader: Mapping[str, Sequence[str]]) -> csr_matrix:
    """Return child x parent over the labels, followed by the other concepts that are above any of them."""
    rows = {label_id: row for row, label_id in enumerate(label_ids)}
    pairs: list[tuple[int, int]] = []
    waiting = list(label_ids)
    for child in waiting:
        for parent in broader.get(child, ()):
            if parent not in rows:
                rows[parent] = len(rows)
                waiting.append(parent)
            pairs.append((rows[child], rows[parent]))
    children, parents = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return csr_matrix((np.ones(len(pairs)), (children, parents)), shape=(len(rows), len(rows)))


def _warn_of_other_fields(predictor: Predictor, dataset: Dataset) -> None:
    """Warn where a run's texts were titles and these are full texts, or the other way round."""
    fields = predictor.model.facts.get("text_fields")
    if fields and dataset.text_fields and list(fields) != list(dataset.text_fields):
        log.warning(
            "the texts of the run were %s, these are %s: choose the same text_fields unless this is meant",
            describe_fields(fields),
            describe_fields(dataset.text_fields),
        )


def _predict_split(predictor: Predictor, split: Split, k: int, *, processes: Processes | None = None) -> TopK:
    """Return the best labels of a split's queries; each of several processes ranks a share of the queries."""
    processes = processes or SingleProcess()
    start, stop = (len(split) * end // processes.size for end in (processes.rank, processes.rank + 1))
    texts, places = split.texts[start:stop], k + overfetch(split.filtered)
    starts = range(0, max(len(texts), 1), _TEXTS_PER_BLOCK)
    blocks = [
        predictor.top(texts[first : first + _TEXTS_PER_BLOCK], places)
        for first in track(starts, what="rank", total=len(starts), unit="block")
    ]
    found = TopK(*(np.concatenate([getattr(block, name) for block in blocks]) for name in ("ids", "scores")))
    if processes.size == 1:
        return found
    return TopK(concatenate_arrays(processes, found.ids), concatenate_arrays(processes, found.scores))


def _find_test_misses(dataset: Dataset, columns_NK: NDArray[np.int64]) -> Iterator[Miss]:
    """Yield the misses of the first test queries, from predictions with places to spare for the filter pairs."""
    split = test_split(dataset)
    split = split.select(np.arange(min(len(split), MISSED_TEXTS)))
    columns_NK = columns_NK[: len(split)]
    kept_NK = remove_filtered(columns_NK, np.zeros(columns_NK.shape), split.filtered, MISSED_PLACES).ids
    return find_misses(kept_NK, split.texts, split.relevance, dataset.label_ids)


def _calibration_errors(
    predictor: Predictor, split: Split, found: TopK, columns_NK: NDArray[np.int64]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Return the calibration error of each query's first predictions, before and after calibration, and its bins.

    Before it, the probabilities are a softmax over the labels found, at the temperature of training.
    """
    calibration = predictor.calibration
    if calibration is None:
        return {}, []
    model, levels_N = predictor.model, None
    if split.filtered is not None:  # probabilities were fitted, and are predicted, without filter pairs
        levels_N = level(remove_filtered(columns_NK, found.scores, split.filtered, NUM_PLACES).scores)
    probabilities = {
        "softmax": softmax(found.scores, model.head.temperature),
        "calibrated": calibration.probabilities(found, model.labels.counts, levels_N=levels_N),
    }
    errors, bins = {}, []
    for name, probabilities_NK in probabilities.items():
        kept = remove_filtered(columns_NK, probabilities_NK, split.filtered, REPORTED_PLACES)
        is_label = np.isfinite(kept.scores)
        hits = member_mask(kept.ids, split.relevance)[is_label]
        errors[name] = calibration_error(kept.scores[is_label], hits)
        bins = reliability(kept.scores[is_label], hits)  # of the last, calibrated ones
    return errors, bins


def _choose_ks(ks: Sequence[int] | None, dataset: Dataset) -> list[int]:
    """Return the given cut-offs, or the default ones that the number of labels allows."""
    return list(ks) if ks is not None else [k for k in DEFAULT_KS if k <= dataset.num_labels] or [1]
