"""PNG plots: systems side by side, precision and recall by band, reliability, the dial, intervals, Zipf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dexter.errors import UsageError, printable, require
from dexter.evaluation.report import NUM_DECILES, Comparison, Report
from dexter.files import atomic_path
from dexter.types import BANDS

COLOURS = ("#4c6a92", "#c8833a", "#5b9279", "#a35d6a", "#7d6b9d", "#8a8a8a")
"""One per system, in order, distinct also for readers who confuse red and green; repeated beyond the last."""
MAX_DRAWN_K = 10
"""The largest cut-off that is drawn: beyond it P falls towards zero whatever the system."""


def chart_groups(reports: Mapping[str, Report], *, deciles: bool = False) -> dict[str, dict[str, list[float]]]:
    """Return what is drawn: panel title -> bar group -> one value per system. Groups without a value are left out.

    With `deciles`, a last panel has the recall by decile of label frequency.
    """
    if not reports:
        raise UsageError("there is no report to draw: pass at least one")
    ks = sorted(set.intersection(*(set(report.settings["ks"]) for report in reports.values())))
    if not ks:
        raise UsageError("the reports share no cut-off: score them with a common k")
    ks = [k for k in ks if k <= MAX_DRAWN_K] or ks[:1]
    recall = f"R@{ks[-1]}"
    panels = {
        "Precision": {f"P@{k}": [r.metrics[f"P@{k}"] for r in reports.values()] for k in ks},
        "Propensity-scored precision": {f"PSP@{k}": [r.metrics[f"PSP@{k}"] for r in reports.values()] for k in ks},
        f"Recall by label frequency, {recall}": {
            band: [report.by_frequency[band][recall] for report in reports.values()] for band in BANDS
        },
    }
    if deciles:
        panels[f"Recall by decile of label frequency, {recall}"] = {
            f"decile {number}": [report.by_decile[str(number)][recall] for report in reports.values()]
            for number in range(1, NUM_DECILES + 1)
        }
    return {
        title: {group: values for group, values in groups.items() if np.isfinite(values).any()}
        for title, groups in panels.items()
    }


def save_comparison_plot(reports: Mapping[str, Report], path: str | Path) -> None:
    """Draw three panels of grouped bars, one colour per system."""
    panels = chart_groups(reports)
    figure = _new_figure(12.0, 3.9)
    for axes, (title, groups) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        _draw_panel(axes, title, groups, list(reports))
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), frameon=False)
    figure.axes[0].set_ylabel("percent")
    _save(figure, path)


def save_dial_plot(points: Mapping[float, Mapping[str, float]], path: str | Path) -> None:
    """Draw P@k against PSP@k: a line for each cut-off, a dot for each value of the dial.

    `points` are the metrics in percent by value of the dial.
    """
    figure = _new_figure(6.4, 4.4)
    _draw_dial(figure.subplots(), points)
    _save(figure, path)


def _draw_dial(axes: Any, points: Mapping[float, Mapping[str, float]]) -> None:
    """Draw the curve of the dial; `points` as in `save_dial_plot`."""
    for name in (name for name in next(iter(points.values())) if name.startswith("P@")):
        across = [metrics[f"PS{name}"] for metrics in points.values()]
        up = [metrics[name] for metrics in points.values()]
        axes.plot(across, up, marker="o", markersize=4, label=f"k = {name.partition('@')[2]}")
        dials_at: dict[tuple[float, float], list[float]] = {}
        for x, y, dial in zip(across, up, points, strict=True):
            dials_at.setdefault((round(x, 2), round(y, 2)), []).append(dial)
        for place, dials in dials_at.items():  # values that give the same point share a caption
            caption = f"{dials[0]:g}" if len(dials) == 1 else f"{dials[0]:g} to {dials[-1]:g}"
            axes.annotate(caption, place, textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.set(xlabel="PSP@k (rare labels count more)", ylabel="P@k", title="The frequency dial, 0 to 1")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.legend(frameon=False)


def save_evaluation_plot(report: Report, points: Mapping[float, Mapping[str, float]], path: str | Path) -> None:
    """Draw an evaluation: precision against recall by band, the reliability of probabilities, and the dial's curve."""
    figure = _new_figure(15.0, 4.4)
    by_band, reliability, dial = figure.subplots(1, 3)
    _draw_bands(by_band, report)
    _draw_reliability(reliability, report)
    _draw_dial(dial, points)
    _save(figure, path)


def save_intervals_plot(differences: Mapping[str, Comparison], path: str | Path, *, against: str) -> None:
    """Draw the difference of each run from the first with its interval, a row for each metric and run."""
    metrics = list(next(iter(differences.values())).differences)
    figure = _new_figure(7.0, 1.2 + 0.28 * len(metrics) * len(differences))
    axes = figure.subplots()
    for run, (name, found) in enumerate(differences.items()):
        rows = [row + run / (len(differences) + 1) for row in range(len(metrics))]
        values = [found.differences[metric] for metric in metrics]
        centre = np.array([one.value for one in values])
        reach = np.abs(np.array([[one.low, one.high] for one in values]).T - centre)
        colour = COLOURS[run % len(COLOURS)]
        axes.errorbar(centre, rows, xerr=reach, fmt="o", markersize=4, capsize=3, color=colour, label=_legend(name))
    axes.axvline(0.0, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(metrics)), metrics)
    axes.invert_yaxis()
    axes.set(xlabel=f"difference from {_legend(against).strip()}, in points", title="Differences with 95% intervals")
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.legend(frameon=False)
    _save(figure, path)


def _draw_reliability(axes: Any, report: Report) -> None:
    """Draw a reliability diagram: bins of claimed probability, their share of right labels, and their sizes."""
    bins = [one for one in report.reliability if one["count"]]
    axes.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.8)
    if bins:
        sizes = [10 + 190 * one["count"] / max(entry["count"] for entry in bins) for one in bins]
        axes.scatter(
            [one["claimed"] for one in bins], [one["right"] for one in bins], s=sizes, color=COLOURS[0], alpha=0.7
        )
        axes.plot([one["claimed"] for one in bins], [one["right"] for one in bins], color=COLOURS[0], linewidth=0.8)
    else:
        axes.annotate("the run has no probabilities", (0.5, 0.5), ha="center")
    axes.set(
        xlabel="probability",
        ylabel="share of right labels",
        title="Reliability (first 5 places)",
        xlim=(0, 1),
        ylim=(0, 1),
    )
    axes.grid(color="#e4e4e4", linewidth=0.8)


def _draw_bands(axes: Any, report: Report) -> None:
    """Draw precision against recall at every cut-off, for all labels and for those of each band."""
    ks = report.settings["ks"]
    for number, (name, metrics) in enumerate({"all labels": report.metrics, **report.by_frequency}.items()):
        points = [(metrics[f"R@{k}"], metrics[f"P@{k}"]) for k in ks]
        if np.isfinite(points).all():
            across, up = zip(*points, strict=True)
            axes.plot(across, up, marker="o", markersize=4, label=name, color=COLOURS[number % len(COLOURS)])
    for k in ks:
        axes.annotate(
            f"{k}",
            (report.metrics[f"R@{k}"], report.metrics[f"P@{k}"]),
            textcoords="offset points",
            xytext=(4, 4),
            fontsize=7,
        )
    axes.set(xlabel="R@k", ylabel="P@k", title="Precision and recall by label frequency")
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.legend(frameon=False)


def save_zipf_plot(label_counts: np.ndarray, path: str | Path, *, title: str) -> None:
    """Draw the number of training queries of each label by its rank, both axes logarithmic, with the bands."""
    frequencies = np.sort(label_counts[label_counts > 0])[::-1]
    figure = _new_figure(6.0, 4.0)
    axes = figure.subplots()
    axes.loglog(np.arange(1, len(frequencies) + 1), frequencies, linewidth=1.5)
    for name, (least, _) in BANDS.items():
        if least > 0:
            axes.axhline(least, color="0.8", linewidth=0.8)
            axes.annotate(name, (1, least), xytext=(2, 3), textcoords="offset points", color="0.4")
    axes.set(xlabel="label rank", ylabel="training queries", title=f"{title}: {len(frequencies):,} labels")
    _save(figure, path)


def _new_figure(width: float, height: float) -> Any:
    """Return an empty figure of a size in inches."""
    figure_module = require("matplotlib.figure", extra="data", purpose="drawing a plot")
    return figure_module.Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def _legend(name: str) -> str:
    """Return a name for a legend: a dollar sign would start a formula, a leading underscore would hide the name."""
    return " " + printable(name).replace("$", r"\$")


def _save(figure: Any, path: str | Path) -> None:
    """Write a figure as a PNG, whole or not at all."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_panel(axes: Any, title: str, groups: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """Draw grouped bars with their values above them."""
    width = 0.8 / len(names)
    places = np.arange(len(groups))
    table = np.array(list(groups.values()), dtype=np.float64).reshape(len(groups), len(names))
    for system, name in enumerate(names):
        label = _legend(name)
        offset = (system - (len(names) - 1) / 2) * width
        heights = np.nan_to_num(table[:, system])
        bars = axes.bar(places + offset, heights, width * 0.92, label=label, color=COLOURS[system % len(COLOURS)])
        if len(names) <= 4:
            axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=7.5, color="#444444")
    axes.set_title(title, fontsize=10.5, loc="left", color="#222222")
    axes.set_xticks(places, list(groups))
    axes.tick_params(length=0, colors="#444444")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
