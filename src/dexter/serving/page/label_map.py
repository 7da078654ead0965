"""The page /map: the labels as points of the plane in which they differ most (principal components).

Shapes: L labels, N of them, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dexter.predict import Labels, Predictor
from dexter.serving.page.view import Renderer, page_router
from dexter.serving.runs import ServedRuns
from dexter.types import band_of

_MAX_POINTS = 3_000
_MAX_FITTED = 20_000
"""Labels that the principal components are computed from; more would hardly change them."""
_MAX_FOUND = 200
_DRAWING_ORDER = ("tail", "torso", "frequent", "unseen")
"""Bands from the bottom to the top: the tail has most labels and would hide the others."""


@dataclass(frozen=True)
class MapPoint:
    """A label on the map; both coordinates are between 0 and 1."""

    id: str
    text: str
    band: str
    x: float
    y: float
    found: bool = False
    """Whether it was searched for."""


@dataclass(frozen=True)
class LabelMap:
    """The coordinates of all labels, and which of them are drawn."""

    labels: Labels
    coordinates_L2: NDArray[np.float32]
    drawn: Sequence[int]
    explained: float
    """Share of the variance that lies in the plane."""

    def points(self, found: Sequence[int] = ()) -> list[MapPoint]:
        """Return the labels that are drawn and those that were found, in drawing order."""
        hits, points = set(found), []
        for row in sorted({*self.drawn, *hits}):
            label, (x, y) = self.labels.entry(row), self.coordinates_L2[row].tolist()
            points.append(MapPoint(label.id, label.text, band_of(label.count), x, y, row in hits))
        return sorted(points, key=lambda point: (point.found, _DRAWING_ORDER.index(point.band)))


def map_routes(runs: ServedRuns, render: Renderer) -> APIRouter:
    """Make the route GET /map."""
    router = page_router(render)
    maps: dict[str, tuple[str | None, int, LabelMap]] = {}

    @router.get("/map")
    async def show_map(q: Annotated[str, Query(max_length=1_000)] = "", model: str | None = None) -> Response:
        """Show the labels as points, and those that match `q`; the map is made once per version of the labels."""
        run = runs.get(model)
        if not run.is_ready:
            return render.waiting(run)
        predictor = run.predictor
        if maps.get(run.name, ())[:2] != (predictor.fingerprint, predictor.version):
            version, made = await run.read_labels(map_labels)
            maps[run.name] = predictor.fingerprint, version, made
        label_map = maps[run.name][2]
        found = (await run_in_threadpool(label_map.labels.find_rows, q))[:_MAX_FOUND] if q.strip() else []
        return render("map", model=run.name, map=label_map, points=label_map.points(found), found=found, q=q)

    return router


def map_labels(predictor: Predictor, *, max_points: int = _MAX_POINTS) -> LabelMap:
    """Project the labels on their principal components, and choose a sample of them to draw.

    The same labels give the same map.
    """
    generator = np.random.default_rng(0)
    labels, vectors_LD = predictor.labels, predictor.label_embeddings()
    drawn = _sample(len(labels.ids), max_points, generator)
    fitted = _sample(len(labels.ids), _MAX_FITTED, generator)
    vectors_LD = vectors_LD / np.maximum(np.linalg.norm(vectors_LD, axis=1, keepdims=True), 1e-12)
    mean_D, axes_D2, explained = principal_axes(vectors_LD[fitted])
    coordinates_L2 = (vectors_LD - mean_D) @ axes_D2
    low, high = coordinates_L2.min(axis=0), coordinates_L2.max(axis=0)
    return LabelMap(labels, (coordinates_L2 - low) / np.maximum(high - low, 1e-12), drawn.tolist(), explained)


def principal_axes(vectors_ND: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32], float]:
    """Return the mean, the two directions of largest variance, and their share of the variance."""
    mean_D = vectors_ND.mean(axis=0, dtype=np.float64)
    centred_ND = vectors_ND - mean_D
    values_D, directions_DD = np.linalg.eigh(centred_ND.T @ centred_ND)
    axes_D2 = directions_DD[:, :-3:-1]
    # The sign of an eigenvector is arbitrary: make its largest element positive, so that maps do not flip.
    axes_D2 = axes_D2 * np.sign(np.take_along_axis(axes_D2, np.abs(axes_D2).argmax(axis=0)[None], axis=0))
    total = float(values_D.sum())
    explained = float(values_D[-2:].sum()) / total if total > 0 else 0.0
    return mean_D.astype(np.float32), axes_D2.astype(np.float32), explained


def _sample(total: int, most: int, generator: np.random.Generator) -> NDArray[np.int64]:
    if total <= most:
        return np.arange(total, dtype=np.int64)
    return np.sort(generator.choice(total, size=most, replace=False)).astype(np.int64)
