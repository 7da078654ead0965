"""What an evaluation finds and how it is shown: bands, intervals, reports, records, tables, plots and a page."""

from __future__ import annotations

from dexter.evaluation.bands import BANDS, Band, score_bands
from dexter.evaluation.baselines import TfidfNeighbours, popularity
from dexter.evaluation.evaluate import evaluate
from dexter.evaluation.intervals import Interval, bootstrap, paired_bootstrap
from dexter.evaluation.page import Example, collect_examples, save_page
from dexter.evaluation.plots import save_comparison_plot
from dexter.evaluation.records import make_record, write_record
from dexter.evaluation.reports import Comparison, Report, compare, score_report
from dexter.evaluation.tables import render_comparison, render_table

__all__ = [
    "BANDS",
    "Band",
    "Comparison",
    "Example",
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
    "render_table",
    "save_comparison_plot",
    "save_page",
    "score_bands",
    "score_report",
    "write_record",
]
