"""The page /training: the curves of a run's `metrics.jsonl`, which grow while it trains."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.config import load_config
from dexter.errors import DexterError
from dexter.files import open_regular
from dexter.serving.page.view import Renderer, as_number, page_router
from dexter.serving.runs import ServedRuns
from dexter.training.run import is_finished

_MAX_POINTS = 300
_MAX_BYTES = 64 * 2**20
"""Of a longer file only the end is read."""
_VALIDATION_METRICS = ("P@1", "P@5", "nDCG@5", "PSP@5")
_CHARTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Loss": {"loss": ("train", "loss")},
    "Validation, %": {name: ("validation", name) for name in _VALIDATION_METRICS},
    "Positives in the pool per query": {
        "step": ("train", "positives_per_query"),
        "epoch mean": ("epoch", "positives_per_query"),
    },
    "Labels in the pool": {"step": ("train", "pool_labels"), "epoch mean": ("epoch", "pool_labels")},
    "Queries per second": {"queries_per_second": ("train", "queries_per_second")},
    "Learning rate": {"learning_rate": ("train", "learning_rate")},
}
"""By title and name of the curve: the kind of record, and the value that is drawn."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart: (step, value) pairs."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        """The last value."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Chart:
    """Curves that share both axes."""

    title: str
    curves: Sequence[Curve]

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(value for curve in self.curves for _, value in curve.points)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(value for curve in self.curves for _, value in curve.points)

    @property
    def last_step(self) -> float:
        """The last step."""
        return max(curve.points[-1][0] for curve in self.curves)

    def svg_points(self, curve: Curve) -> str:
        """Return the points of a curve in a box of 100 x 40, in SVG's notation; the origin is at the top left."""
        span, steps = (self.high - self.low) or 1.0, self.last_step or 1.0
        return " ".join(
            f"{100 * step / steps:.2f},{40 * (1 - (value - self.low) / span):.2f}" for step, value in curve.points
        )


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The progress of a run's training."""

    charts: Sequence[Chart] = ()
    live: bool = False
    """Whether it is still training."""
    step: int = 0
    epoch: float = 0.0
    epochs: float | None = None
    """Number of epochs of the whole training."""
    seconds: float | None = None
    """Time since the start."""
    best: Mapping[str, float] | None = None
    """Validation metrics of the best model."""

    @property
    def share(self) -> float:
        """Share of the training that is done, from 0 to 1."""
        return min(self.epoch / self.epochs, 1.0) if self.epochs else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time until the end at the present speed; None if unknown."""
        return self.seconds * (1 - self.share) / self.share if self.seconds and self.share > 0 else None


def training_routes(runs: ServedRuns, render: Renderer) -> APIRouter:
    """Make the route GET /training."""
    router = page_router(render)

    @router.get("/training")
    async def training(model: str | None = None) -> Response:
        """Show the curves of a run."""
        run = runs.get(model)
        progress = TrainingProgress() if run.folder is None else await run_in_threadpool(_read_progress, run.folder)
        return render("training", model=run.name, training=progress)

    return router


def _read_progress(folder: Path) -> TrainingProgress:
    """Read the progress from the files of a run, which may still be written to."""
    records = read_records(folder / "metrics.jsonl")
    nothing: dict[str, Any] = {}
    last = next((record for record in reversed(records) if record.get("kind") == "train"), nothing)
    best = next((record for record in reversed(records) if record.get("best") is True), nothing)
    try:
        has_config = (folder / "config.toml").is_file()  # a pipe would never end
        epochs = float(load_config(folder / "config.toml").train.epochs) if has_config else None
    except (DexterError, OSError, ValueError, OverflowError):
        epochs = None
    values = {name: as_number(best.get(name)) for name in _VALIDATION_METRICS}
    return TrainingProgress(
        charts=make_charts(records),
        live=bool(records) and not is_finished(folder),
        step=int(as_number(last.get("step")) or 0),
        epoch=as_number(last.get("epoch")) or 0.0,
        epochs=epochs,
        seconds=as_number(last.get("seconds")),
        best={name: value for name, value in values.items() if value is not None},
    )


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSON lines file; incomplete lines are skipped."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_BYTES))
            lines = file.read(_MAX_BYTES).split(b"\n")
    except OSError:
        return []
    return [record for line in lines if (record := _parse_record(line)) is not None]


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def make_charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Make the charts that the records have values for."""
    charts = []
    for title, sources in _CHARTS.items():
        points = {name: thin(_read_points(records, kind, value)) for name, (kind, value) in sources.items()}
        curves = [Curve(name, found) for name, found in points.items() if found]
        if curves:
            charts.append(Chart(title, curves))
    return charts


def thin(points: Sequence[tuple[float, float]], most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Keep at most `most` points at equal distances, and the last one."""
    step = max(1, math.ceil(len(points) / most))
    return list(points[::-1][::step][::-1])


def _read_points(records: Iterable[Mapping[str, Any]], kind: str, name: str) -> list[tuple[float, float]]:
    numbers = (
        (as_number(record.get("step")), as_number(record.get(name))) for record in records if record.get("kind") == kind
    )
    return [(step, value) for step, value in numbers if step is not None and value is not None]
