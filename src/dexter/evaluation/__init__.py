"""Evaluation: reports with bands and intervals, result records, tables, plots and a page.

`evaluate` needs a trained model and with it torch; it is imported on first use, everything else is light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dexter.evaluation.baselines import TfidfNeighbours, popularity
from dexter.evaluation.intervals import Interval, bootstrap, paired_bootstrap
from dexter.evaluation.page import ExampleQuery, collect_examples, save_page
from dexter.evaluation.plots import save_comparison_plot
from dexter.evaluation.records import make_record, write_record
from dexter.evaluation.report import Comparison, Report, compare, score_report, test_split
from dexter.evaluation.tables import render_comparison, render_deciles, render_table

if TYPE_CHECKING:
    from dexter.evaluation.runs import evaluate

__all__ = [
    "Comparison",
    "ExampleQuery",
    "Interval",
    "Report",
    "TfidfNeighbours",
    "bootstrap",
    "collect_examples",
    "compare",
    "evaluate",
    "make_record",
    "paired_bootstrap",
    "popularity",
    "render_comparison",
    "render_deciles",
    "render_table",
    "save_comparison_plot",
    "save_page",
    "score_report",
    "test_split",
    "write_record",
]


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        from dexter.evaluation.runs import evaluate

        return evaluate
    raise AttributeError(f"module 'dexter.evaluation' has no attribute {name!r}")
