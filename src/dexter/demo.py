"""`dexter demo`: the whole flow on built-in data, so that a newcomer sees a trained model beside honest baselines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dexter.data import Dataset
from dexter.data.check import check
from dexter.data.formats import load_dataset, save_dataset
from dexter.data.sources import build
from dexter.evaluation.baselines import TfidfNeighbours, popularity
from dexter.evaluation.evaluate import DEFAULT_KS, TABLE_COLUMNS, predict_columns, test_split
from dexter.evaluation.page import collect_examples, save_page
from dexter.evaluation.plots import save_comparison_plot
from dexter.evaluation.reports import Report, score_report
from dexter.evaluation.tables import render_table
from dexter.predictor import Predictor
from dexter.training import train

log = logging.getLogger("dexter")
_QUESTION = "solve a linear system of equations with a symmetric positive definite matrix"
_NEW_LABEL = (
    "my.cholesky_solve",
    "my.cholesky_solve: solve linear equations with a symmetric positive definite matrix",
)


def run_demo(out: Path, *, overrides: Mapping[str, Any] | None = None) -> None:
    """Build, check, score baselines, train, evaluate; print a table, leave a plot and a page, and add a label."""
    dataset = _data(out / "pydocs")
    print(check(dataset, folder=out / "pydocs").render())
    run = train(dataset, recipe="dexter", out=_next_folder(out / "runs"), overrides=overrides)
    predictor = Predictor.load(run.path)
    k = max(DEFAULT_KS)
    split = test_split(dataset)
    tops = {
        "popularity": popularity(dataset, k).ids,
        "TF-IDF neighbours": TfidfNeighbours.fit(dataset.train.texts, dataset.train.relevance)
        .predict(split.texts, k)
        .ids,
        f"dexter ({run.config.recipe})": predict_columns(predictor, dataset, split, k),
    }
    reports = {
        name: score_report(top_ids, split, dataset.train.relevance, ks=DEFAULT_KS) for name, top_ids in tops.items()
    }
    print(f"\nTest queries of {dataset.name}, trained in {run.seconds:.0f} s:\n")
    print(render_table(reports, TABLE_COLUMNS))
    _leave_pictures(out, dataset, reports, list(tops.values())[-1])
    _show_new_label(predictor)
    print(f"\nNext: dexter predict {run.path} {_QUESTION!r}")


def _data(folder: Path) -> Dataset:
    if not folder.exists():
        save_dataset(build("pydocs"), folder)
    return load_dataset(folder)


def _next_folder(parent: Path) -> Path:
    """A folder that does not exist yet, so that a second demo keeps the first one's run."""
    number = 1
    while (parent / f"demo-{number}").exists():
        number += 1
    return parent / f"demo-{number}"


def _leave_pictures(out: Path, dataset: Dataset, reports: Mapping[str, Report], top_ids: Any) -> None:
    save_comparison_plot(reports, out / "comparison.png")
    save_page(
        reports,
        out / "report.html",
        title="dexter on pydocs",
        subtitle="Which other functions does the documentation of this one point to?",
        columns=TABLE_COLUMNS,
        examples=collect_examples(top_ids, dataset),
    )
    print(f"\nA plot and a page: {out / 'comparison.png'}, {out / 'report.html'}")


def _show_new_label(predictor: Predictor) -> None:
    """Predict, add a label, predict again: no training in between."""
    print(f"\n{_QUESTION!r}")
    for label in predictor.predict([_QUESTION], k=3)[0]:
        print(f"  {label.score:6.3f}  {label.text}")
    predictor.add_labels([_NEW_LABEL])
    print(f"the same after adding the label {_NEW_LABEL[0]!r}, without training:")
    for label in predictor.predict([_QUESTION], k=3)[0]:
        print(f"  {label.score:6.3f}  {label.text}")
