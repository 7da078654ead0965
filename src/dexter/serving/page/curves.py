"""Curves of a training run: what `metrics.jsonl` holds, as lines of a few hundred points. Knows no HTTP and no HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_POINTS = 300
_MOST_BYTES = 64 * 2**20
"""Of a longer file the end is read."""
_CHARTS: Mapping[str, tuple[str, Sequence[str]]] = {
    "Loss": ("train", ("loss",)),
    "Validation, %": ("validation", ("P@1", "P@5", "nDCG@5", "PSP@5")),
    "Queries per second": ("train", ("queries_per_second",)),
    "Learning rate": ("train", ("learning_rate",)),
}
"""By title: the kind of record, and the values that are drawn."""


@dataclass(frozen=True)
class Curve:
    """One line: (step, value) pairs."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        """Where it stands."""
        return self.points[-1][1]


@dataclass(frozen=True)
class Chart:
    """Lines that share both axes."""

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

    def path(self, curve: Curve, *, width: float = 100.0, height: float = 40.0) -> str:
        """The points of a line in a box of this size, as SVG writes them; the origin is at the top left."""
        span, steps = (self.high - self.low) or 1.0, self.last_step or 1.0
        return " ".join(
            f"{width * step / steps:.2f},{height * (1 - (value - self.low) / span):.2f}" for step, value in curve.points
        )


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file that may be written to meanwhile; lines that are not whole are passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return [record for line in lines if (record := _parse(line)) is not None]


def make_charts(records: Iterable[Mapping[str, Any]]) -> list[Chart]:
    """The charts that the records have values for."""
    records = list(records)
    charts = []
    for title, (kind, names) in _CHARTS.items():
        wanted = [record for record in records if record.get("kind") == kind]
        curves = [Curve(name, points) for name in names if (points := thin(_points(wanted, name)))]
        if curves:
            charts.append(Chart(title, curves))
    return charts


def thin(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many of the points, at equal distances, the last one among them."""
    step = max(1, math.ceil(len(points) / most))
    return list(points[::-1][::step][::-1])


def _points(records: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    pairs = ((record.get("step"), record.get(name)) for record in records)
    return [
        (float(step), float(value))
        for step, value in pairs
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value)
    ]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
