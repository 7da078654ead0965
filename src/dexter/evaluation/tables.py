"""Reports as fixed-width text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dexter.errors import UsageError, printable
from dexter.evaluation.report import Comparison, Report

BAND_TITLES = {"frequent": "frequent (> 100)", "torso": "torso (10-100)", "tail": "tail (1-9)", "unseen": "unseen (0)"}
"""How tables name the bands: the range is the number of training queries of a label."""


_LARGEST_SHOWN_K = 5
"""Largest cut-off of the figures with own labels."""
DECILES_NOTE = (
    "Deciles: a tenth each of the labels with training queries, 1 the most frequent; in brackets the number of "
    "training queries of a label. Labels with equal numbers are divided by id."
)


class TableRow(NamedTuple):
    """One row of a table of reports."""

    system: str
    group: str | None
    """The title of a band or decile; None for the row over all labels."""
    num_queries: int
    values: list[float]
    """One per column, in percent."""


def default_columns(reports: Mapping[str, Report]) -> tuple[str, ...]:
    """Return P and PSP at every cut-off that all reports share, nDCG and R at the largest."""
    shared = set.intersection(*(set(report.metrics) for report in reports.values())) if reports else set()
    ks = sorted(int(name.removeprefix("P@")) for name in shared if name.startswith("P@"))
    wanted = [f"{metric}@{k}" for metric in ("P", "PSP") for k in ks] + [
        f"{m}@{k}" for m in ("nDCG", "R") for k in ks[-1:]
    ]
    return tuple(name for name in wanted if name in shared)


def table_rows(reports: Mapping[str, Report], columns: Sequence[str], *, deciles: bool = False) -> list[TableRow]:
    """Return one row per system and, below it, one per band, or one per decile of label frequency.

    A band or decile is left out where no query of any report has one of its labels.
    """
    metrics = {name: report.by_decile if deciles else report.by_frequency for name, report in reports.items()}
    sizes = {name: report.decile_sizes if deciles else report.band_sizes for name, report in reports.items()}
    titles = _decile_titles(next(iter(sizes.values()), {})) if deciles else BAND_TITLES
    shown = [group for group in titles if any(size[group]["queries"] for size in sizes.values())]
    rows = []
    for name, report in reports.items():
        missing = [column for column in columns if column not in report.metrics]
        if missing:
            raise UsageError(f"report {name!r} has no {missing[0]}: it has {', '.join(report.metrics)}")
        rows.append(TableRow(name, None, report.num_queries, [report.metrics[column] for column in columns]))
        for group in shown:
            values = [metrics[name][group][column] for column in columns]
            rows.append(TableRow(name, titles[group], sizes[name][group]["queries"], values))
    return rows


def render_table(reports: Mapping[str, Report], columns: Sequence[str] | None = None) -> str:
    """Render a table of several systems in percent, each with a row per label-frequency band."""
    columns = default_columns(reports) if columns is None else tuple(columns)
    return _render_rows(table_rows(reports, columns), columns) + "".join(f"\n{note}" for note in notes(reports))


def render_deciles(reports: Mapping[str, Report], columns: Sequence[str] | None = None) -> str:
    """Render a table of several systems in percent, each with a row per decile of label frequency."""
    columns = default_columns(reports) if columns is None else tuple(columns)
    return f"{_render_rows(table_rows(reports, columns, deciles=True), columns)}\n{DECILES_NOTE}"


def describe_calibration(report: Report) -> str:
    """Render the calibration errors as one line; empty where the run has no probabilities."""
    if not report.calibration:
        return ""
    before, after = (format_percent(report.calibration[name]) for name in ("softmax", "calibrated"))
    return f"Calibration error of the first 5 places: {before} as softmax, {after} calibrated."


def describe_hierarchy(report: Report) -> str:
    """Render the metrics that count broader labels as one line; empty where the labels have no hierarchy."""
    if not report.hierarchy:
        return ""
    shown = {name: f"{name.removeprefix('parent')} {format_percent(value)}" for name, value in report.hierarchy.items()}
    parents = ", ".join(text for name, text in shown.items() if name.startswith("parentP"))
    others = ", ".join(text for name, text in shown.items() if not name.startswith("parentP"))
    return f"With a hit on the parent counted too: {parents}. With all broader labels: {others}."


def render_comparison(comparison: Comparison, names: tuple[str, str] = ("before", "after")) -> str:
    """Render two systems' metrics and the intervals of their differences; * marks an interval that excludes zero."""
    cells = [["", printable(names[0]), printable(names[1]), "difference", "interval", ""]]
    for metric, difference in comparison.differences.items():
        cells.append(
            [
                metric,
                format_percent(comparison.before[metric]),
                format_percent(comparison.after[metric]),
                format_signed(difference.value),
                f"[{format_signed(difference.low)}, {format_signed(difference.high)}]",
                "*" if difference.excludes_zero else "",
            ]
        )
    setting = comparison.settings["intervals"]
    note = (
        f"{comparison.num_queries:,} queries; {setting['confidence']:.0%} intervals from {setting['num_resamples']:,} "
        "paired resamples; * the interval excludes zero"
    )
    return f"{_align(cells)}\n{note}"


def notes(reports: Mapping[str, Report]) -> list[str]:
    """Return what a reader must know about the figures, one line each."""
    lines = ["Percent. A band's row is over the queries that have a label of the band, and counts only such labels."]
    for name, report in reports.items():
        title = printable(name)
        if report.num_without_labels:
            lines.append(
                f"{title}: {report.num_without_labels:,} queries without labels are left out of R, nDCG and MRR."
            )
        if report.num_short:
            k = max(report.settings["ks"])
            lines.append(
                f"{title}: {report.num_short:,} queries have fewer than {k} predictions; the rest count as misses."
            )
        if report.own_labels:
            lines.append(f"{title}: {_describe_own_labels(report)}")
    return lines


def _describe_own_labels(report: Report) -> str:
    """Say how many own labels are left out, how many of them are relevant, and what the figures are with them."""
    own = report.own_labels
    positive = f"{own['num_positive']:,} are" if own["num_positive"] else "none is"
    ks = [k for k in report.settings["ks"] if k <= _LARGEST_SHOWN_K]
    shown = ", ".join(
        f"{name} {own['metrics_with_own'][name]:.2f}" for name in (f"{m}@{k}" for m in ("P", "PSP") for k in ks)
    )
    return (
        f"{own['num_queries']:,} of {report.num_queries:,} queries have a label of their own, which is left out "
        f"({positive} relevant). With own labels: {shown}."
    )


def _decile_titles(sizes: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return how tables name the deciles; the range is the number of training queries of a label."""
    return {
        name: f"decile {name} ({size['least']:,})"
        if size["least"] == size["most"]
        else f"decile {name} ({size['least']:,}-{size['most']:,})"
        for name, size in sizes.items()
    }


def _render_rows(rows: Sequence[TableRow], columns: Sequence[str]) -> str:
    cells = [["", "queries", *columns]]
    for name, group, num_queries, values in rows:
        title = printable(name) if group is None else f"  {group}"
        cells.append([title, f"{num_queries:,}", *(format_percent(value) for value in values)])
    return _align(cells)


def format_percent(value: float) -> str:
    """Format with two decimals, or as a dash where the value is not defined."""
    return f"{value:.2f}" if math.isfinite(value) else "-"


def format_signed(value: float) -> str:
    """Format with a sign and two decimals, or as a dash where the value is not defined."""
    return f"{value:+.2f}" if math.isfinite(value) else "-"


def _align(cells: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right, a rule below the first row."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])
