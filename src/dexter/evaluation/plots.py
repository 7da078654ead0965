"""A picture of several systems: precision, propensity-scored precision, and recall by label frequency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dexter.errors import UsageError, require
from dexter.evaluation.reports import Report
from dexter.evaluation.tables import printable
from dexter.files import atomic_path

COLOURS = ("#4c6a92", "#c8833a", "#5b9279", "#a35d6a", "#7d6b9d", "#8a8a8a")
"""One per system, in order, told apart also by readers who confuse red and green; repeated beyond the last."""


DEEPEST = 10
"""The largest cut-off that is drawn: beyond it P falls towards zero whatever the system."""


def chart_groups(reports: Mapping[str, Report]) -> dict[str, dict[str, list[float]]]:
    """What is drawn: panel title -> bar group -> one value per system. Groups without a value are left out."""
    if not reports:
        raise UsageError("there is no report to draw: pass at least one")
    ks = sorted(set.intersection(*(set(report.settings["ks"]) for report in reports.values())))
    if not ks:
        raise UsageError("the reports share no cut-off: score them with a common k")
    ks = [k for k in ks if k <= DEEPEST] or ks[:1]
    deepest = f"R@{ks[-1]}"
    panels = {
        "Precision": {f"P@{k}": [r.metrics[f"P@{k}"] for r in reports.values()] for k in ks},
        "Propensity-scored precision": {f"PSP@{k}": [r.metrics[f"PSP@{k}"] for r in reports.values()] for k in ks},
        f"Recall by label frequency, {deepest}": {
            band: [report.by_frequency[band][deepest] for report in reports.values()]
            for band in ("frequent", "torso", "tail", "unseen")
        },
    }
    return {
        title: {group: values for group, values in groups.items() if np.isfinite(values).any()}
        for title, groups in panels.items()
    }


def save_comparison_plot(reports: Mapping[str, Report], path: str | Path) -> None:
    """Write a PNG with three panels of grouped bars, one colour per system."""
    figure_module = require("matplotlib.figure", extra="data", purpose="drawing a plot")
    panels = chart_groups(reports)
    figure = figure_module.Figure(figsize=(12.0, 3.9), dpi=150, layout="constrained", facecolor="white")
    for axes, (title, groups) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        _draw_panel(axes, title, groups, list(reports))
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), frameon=False)
    figure.axes[0].set_ylabel("percent")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_panel(axes: Any, title: str, groups: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """Grouped bars with their values above them."""
    width = 0.8 / len(names)
    places = np.arange(len(groups))
    table = np.array(list(groups.values()), dtype=np.float64).reshape(len(groups), len(names))
    for system, name in enumerate(names):
        # A dollar sign would start a formula in matplotlib, a leading underscore would hide the name from the legend.
        label = " " + printable(name).replace("$", r"\$")
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
