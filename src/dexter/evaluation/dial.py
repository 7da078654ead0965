"""The dial's curve: P@k against PSP@k of one model as label frequency counts for less and less, as text and plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dexter.data import Dataset
from dexter.errors import UsageError, require
from dexter.evaluation.reports import score_report
from dexter.evaluation.runs import as_columns, test_split
from dexter.files import atomic_path
from dexter.metrics import overfetch
from dexter.predict.predictor import Predictor

DIALS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_KS = (1, 3, 5)


@dataclass(frozen=True, kw_only=True)
class DialCurve:
    """What each value of the dial gives on the test split."""

    points: Mapping[float, Mapping[str, float]]
    """Metrics in percent, by value of the dial."""
    current: float
    """The value that predictions use."""

    def render(self) -> str:
        """A table with a row for each value; * marks the one that predictions use."""
        columns = self.columns
        lines = ["dial " + "".join(f"{name:>8s}" for name in columns)]
        for dial, metrics in self.points.items():
            mark = "*" if dial == self.current else " "
            lines.append(f"{dial:4g}{mark}" + "".join(f"{metrics[name]:8.2f}" for name in columns))
        return "\n".join(lines)

    @property
    def columns(self) -> list[str]:
        """The metrics that are shown."""
        return [name for name in next(iter(self.points.values())) if name.startswith(("P@", "PSP@"))]

    def save_plot(self, path: str | Path) -> None:
        """Write a PNG: a line for each cut-off, a dot for each value of the dial."""
        figure_module = require("matplotlib.figure", extra="data", purpose="drawing a plot")
        figure = figure_module.Figure(figsize=(6.4, 4.4), dpi=150, layout="constrained", facecolor="white")
        axes = figure.subplots()
        for name in (name for name in self.columns if name.startswith("P@")):
            across = [metrics[f"PS{name}"] for metrics in self.points.values()]
            up = [metrics[name] for metrics in self.points.values()]
            axes.plot(across, up, marker="o", markersize=4, label=f"k = {name.partition('@')[2]}")
            for x, y, dial in zip(across, up, self.points, strict=True):
                axes.annotate(f"{dial:g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axes.set(xlabel="PSP@k (rare labels count more)", ylabel="P@k", title="The frequency dial, 0 to 1")
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.legend(frameon=False)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def dial_curve(
    predictor: Predictor,
    dataset: Dataset,
    *,
    dials: Sequence[float] = DIALS,
    propensity: tuple[float, float] = (0.55, 1.5),
) -> DialCurve:
    """Score the test split at several values of the dial; the texts are encoded once.

    Args:
        predictor: whose model, head and neighbours are used.
        dataset: the data whose test split is scored.
        dials: the values; the predictor's own joins them.
        propensity: the constants (a, b) of PSP.
    """
    if not dials:
        raise UsageError("a dial curve needs at least one value of the dial")
    split = test_split(dataset)
    ks = [k for k in _KS if k <= dataset.num_labels]
    model = predictor.model
    representations_ND = model.encode_queries(split.texts)
    points = {}
    for dial in sorted({*dials, predictor.dial}):
        turned = Predictor(model, head=predictor.head, neighbours=predictor.uses_neighbours, dial=dial)
        found = turned.top_encoded(representations_ND, max(ks) + overfetch(split.filtered))
        columns_NK = as_columns(turned, dataset, found.ids)
        report = score_report(columns_NK, split, dataset.train.relevance, ks=ks, propensity=propensity, num_resamples=0)
        points[dial] = report.metrics
    return DialCurve(points=points, current=predictor.dial)
