"""`dexter demo`: the whole flow on built-in data, so that a newcomer sees trained models beside honest baselines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.data import Dataset
from dexter.data.check import check
from dexter.data.findings import without_reciprocal
from dexter.data.formats import load_dataset, save_dataset
from dexter.data.sources import build
from dexter.errors import require
from dexter.evaluation.baselines import Baseline, baseline
from dexter.evaluation.page import collect_examples, save_page
from dexter.evaluation.plots import save_comparison_plot
from dexter.evaluation.report import Report, score_report, test_split
from dexter.evaluation.runs import DEFAULT_KS, TABLE_COLUMNS, predict_columns
from dexter.evaluation.tables import render_table
from dexter.metrics import overfetch, remove_filtered
from dexter.predict.predictor import Predictor
from dexter.predict.rank import RankingChoice
from dexter.training import Run, train

log = logging.getLogger("dexter")
_QUESTION = "solve a linear system of equations with a symmetric positive definite matrix"
_NEW_LABEL = ("my.spd_solve", "my.spd_solve: solve linear systems whose matrix is symmetric positive definite")
_NUM_SHOWN = 5
_SETTINGS: dict[str, dict[str, Any]] = {
    "unidec": {"train.epochs": 8, "batch.start": 2, "batch.refresh": 3, "validation.every_epochs": 2},
    "dexter": {},
}
"""The recipes that are trained. The 20 epochs of the recipe unidec gain little here and take longer."""


def run_demo(out: Path, *, overrides: Mapping[str, Any] | None = None) -> None:
    """Build, check, score baselines, train, evaluate; print a table, leave a plot and a page, and add a label."""
    require("matplotlib.figure", extra="data", purpose="the demo's plot")
    dataset = _data(out / "pydocs")
    print(check(dataset, folder=out / "pydocs").render(), flush=True)
    rankings = _baselines(dataset)
    runs = {
        recipe: train(
            dataset, recipe=recipe, out=_next_folder(out / "runs", recipe), overrides=settings | dict(overrides or {})
        )
        for recipe, settings in _SETTINGS.items()
    }
    rankings |= _rank_by_heads(runs["unidec"], dataset)
    predictor = Predictor.load(runs["dexter"].path)
    split = test_split(dataset)
    rankings["dexter"] = predict_columns(predictor, dataset, split, max(DEFAULT_KS))
    reports = {
        name: score_report(top_ids, split, dataset.train.relevance, ks=DEFAULT_KS, propensity=dataset.propensity)
        for name, top_ids in rankings.items()
    }
    seconds = ", ".join(f"{recipe} in {run.seconds:.0f} s" for recipe, run in runs.items())
    print(f"\nThe {len(split):,} test queries of {dataset.name}. Trained: {seconds}.\n")
    print(render_table(reports, TABLE_COLUMNS))
    _show_without_reciprocal(dataset, rankings)
    _save_pictures(out, dataset, reports, rankings["dexter"])
    _show_new_label(predictor)
    print(f"\nNext: dexter predict {runs['dexter'].path} 'a text of yours'")


def _data(folder: Path) -> Dataset:
    if not folder.exists():
        log.info("building pydocs from the installed packages")
        save_dataset(build("pydocs"), folder)
    return load_dataset(folder)


def _baselines(dataset: Dataset) -> dict[str, NDArray[np.int64]]:
    """Rankings of the test queries to beat (omikuji's if it is installed), with places to spare for filter pairs."""
    split = test_split(dataset)
    k = max(DEFAULT_KS) + overfetch(split.filtered)
    names: dict[str, Baseline] = {"popularity": "popularity", "TF-IDF neighbours": "neighbours"}
    if find_spec("omikuji") is not None:
        names["omikuji"] = "omikuji"
    return {title: baseline(name, dataset, k).ids for title, name in names.items()}


def _rank_by_heads(run: Run, dataset: Dataset) -> dict[str, NDArray[np.int64]]:
    """Rankings of the test queries by each head of a run, as in UniDEC's paper: no neighbours, no choice."""
    split, model = test_split(dataset), Predictor.load(run.path).model
    return {
        f"unidec, {head}": predict_columns(
            Predictor(model, RankingChoice(head=head, dial=model.default_dial)), dataset, split, max(DEFAULT_KS)
        )
        for head in model.heads
    }


def _show_without_reciprocal(dataset: Dataset, rankings: Mapping[str, NDArray[np.int64]]) -> None:
    """The same rankings scored without test pairs whose reverse was trained on."""
    reduced, rows = without_reciprocal(dataset)
    split = test_split(reduced)
    if split.relevance.nnz == test_split(dataset).relevance.nnz:
        return
    reports = {
        name: score_report(top_ids[rows], split, dataset.train.relevance, propensity=dataset.propensity)
        for name, top_ids in rankings.items()
    }
    print("\nWithout test pairs (a, b) whose reverse (b, a) is in training (evaluate --without-reciprocal):\n")
    print(render_table(reports, [name for name in TABLE_COLUMNS if name in reports["dexter"].metrics]))


def _next_folder(parent: Path, name: str) -> Path:
    """A folder that does not exist yet, so that a second demo keeps the first one's runs."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def _save_pictures(out: Path, dataset: Dataset, reports: Mapping[str, Report], top_ids: NDArray[np.int64]) -> None:
    allowed = remove_filtered(top_ids, np.zeros(top_ids.shape), test_split(dataset).filtered, max(DEFAULT_KS)).ids
    save_comparison_plot(reports, out / "comparison.png")
    save_page(
        reports,
        out / "report.html",
        title="dexter on pydocs",
        subtitle="Which other functions does the documentation of this one point to?",
        columns=TABLE_COLUMNS,
        examples=collect_examples(allowed, dataset),
    )
    print(f"\nA plot: {out / 'comparison.png'}\nA page: {out / 'report.html'}")


def _show_new_label(predictor: Predictor) -> None:
    """Predict, add a label, predict again: no training in between."""
    print(f"\n{_QUESTION!r}:")
    _show(predictor)
    predictor.add_labels([_NEW_LABEL])
    print(f"\nThe same after adding the label {_NEW_LABEL[0]!r}, without training:")
    _show(predictor)


def _show(predictor: Predictor) -> None:
    """The best labels, and the place of the new one where it is not among them."""
    ranked = predictor.predict([_QUESTION], k=len(predictor.labels.ids))[0]
    for place, label in enumerate(ranked, start=1):
        if place <= _NUM_SHOWN or label.id == _NEW_LABEL[0]:
            mark = "new" if label.id == _NEW_LABEL[0] else ""
            print(f"{place:4d}. {label.score:6.3f}  {mark:3}  {label.text}")
