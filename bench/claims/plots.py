"""Plots of the claims: figures of all rows with their intervals, and curves over deciles of label frequency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.claims.claim import Results, Study

NUM_DECILES = 10


def save_plots(results: Sequence[Results], folder: Path) -> dict[int, str]:
    """Write the plot of every claim that has one and records for it; return the files' names by claim."""
    import matplotlib
    from matplotlib.figure import Figure

    # Without a date and with fixed ids: the same records give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "claims"
    names = {}
    for one in results:
        studies = [study for study in one.claim.studies if _means(one, study)]
        if not one.claim.plot or not studies:
            continue
        height = 3.2 if one.claim.plot == "deciles" else 0.9 + 0.24 * max(len(_means(one, study)) for study in studies)
        figure = Figure(figsize=(4.2 * len(studies), height), layout="constrained")
        for axes, study in zip(figure.subplots(1, len(studies), squeeze=False)[0], studies, strict=True):
            (_draw_deciles if one.claim.plot == "deciles" else _draw_rows)(axes, one, study)
        folder.mkdir(parents=True, exist_ok=True)
        names[one.claim.number] = f"claim-{one.claim.number}.svg"
        figure.savefig(folder / names[one.claim.number], metadata={"Date": None})
    return names


def _means(results: Results, study: Study) -> list[str]:
    """Return the names of the rows that have the plotted figure."""
    metric = "decile 1 R@10" if results.claim.plot == "deciles" else results.claim.plot
    return [row.name for row in results.claim.rows_of(study) if metric and results.mean(study, row, metric)]


def _draw_rows(axes: Any, results: Results, study: Study) -> None:
    """Draw one point with its interval per row."""
    names = _means(results, study)
    for place, name in enumerate(reversed(names)):
        estimate = results.mean(study, results.claim.row(study, name), results.claim.plot)
        assert estimate is not None
        half = estimate.half if estimate.half < float("inf") else 0.0
        axes.errorbar(estimate.mean, place, xerr=half, fmt="o", markersize=4, capsize=2, color="C0")
    axes.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
    axes.set_title(f"{study.sample}, {study.encoder}: {results.claim.plot}", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.tick_params(axis="x", labelsize=7)


def _draw_deciles(axes: Any, results: Results, study: Study) -> None:
    """Draw one curve per row over the deciles of label frequency."""
    for name in _means(results, study):
        row = results.claim.row(study, name)
        means = [results.mean(study, row, f"decile {number} R@10") for number in range(1, NUM_DECILES + 1)]
        points = [(number, found.mean) for number, found in enumerate(means, start=1) if found]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1, label=name)
    axes.set_title(f"{study.sample}: R@10 by decile, frequent to rare", fontsize=8)
    axes.legend(fontsize=6)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=7)
