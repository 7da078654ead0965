"""The labels as points of a plane: the two directions in which they differ most (principal components).

Shapes: L labels, N of them drawn, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.model import Model
from dexter.serving.page.rendering import band_of

MOST_POINTS = 2_500
_FITTED = 20_000
"""The directions are found from so many labels at most: more would not turn them."""
_ON_TOP = ("tail", "torso", "head", "unseen")


@dataclass(frozen=True)
class Point:
    """A label on the map; both coordinates are between 0 and 1."""

    id: str
    text: str
    band: str
    x: float
    y: float


@dataclass(frozen=True)
class LabelMap:
    """The points that are drawn, how many labels there are, and how much of their differences the plane shows."""

    points: Sequence[Point]
    total: int
    explained: float


def map_labels(model: Model, *, most: int = MOST_POINTS, seed: int = 0) -> LabelMap:
    """Lay out the labels, or a sample where there are many; the same labels give the same map."""
    generator = np.random.default_rng(seed)
    total = len(model.labels.ids)
    drawn = _sample(total, most, generator)
    fitted = _sample(total, _FITTED, generator)
    vectors_LD = torch.nn.functional.normalize(model.meanings(), dim=1)
    mean_D, axes_D2, explained = principal_axes(vectors_LD[torch.from_numpy(fitted)])
    places_N2 = ((vectors_LD[torch.from_numpy(drawn)] - mean_D) @ axes_D2).cpu().numpy()
    labels = model.labels
    points = [
        Point(str(labels.ids[row]), str(labels.texts[row]), band_of(int(labels.counts[row])), float(x), float(y))
        for row, (x, y) in zip(drawn, _into_unit_square(places_N2), strict=True)
    ]
    # What is drawn last lies on top: the rarest band, which has most labels, would hide the others.
    return LabelMap(sorted(points, key=lambda point: _ON_TOP.index(point.band)), total, explained)


def principal_axes(vectors_ND: Tensor) -> tuple[Tensor, Tensor, float]:
    """Mean, the two directions of the largest variance, and their share of it."""
    vectors_ND = vectors_ND.double()
    mean_D = vectors_ND.mean(dim=0)
    values_D, directions_DD = torch.linalg.eigh((vectors_ND - mean_D).T @ (vectors_ND - mean_D))
    axes_D2 = directions_DD[:, -2:].flip(1)
    # The sign of an eigenvector is arbitrary: it is fixed, so that a map does not flip between two calls.
    largest_2 = axes_D2.gather(0, axes_D2.abs().argmax(dim=0, keepdim=True))
    axes_D2 = axes_D2 * largest_2.sign()
    total = float(values_D.sum())
    explained = float(values_D[-2:].sum()) / total if total > 0 else 0.0
    return mean_D.float(), axes_D2.float(), explained


def _sample(total: int, most: int, generator: np.random.Generator) -> NDArray[np.int64]:
    if total <= most:
        return np.arange(total, dtype=np.int64)
    return np.sort(generator.choice(total, size=most, replace=False)).astype(np.int64)


def _into_unit_square(places_N2: NDArray[np.floating]) -> NDArray[np.floating]:
    low, high = places_N2.min(axis=0), places_N2.max(axis=0)
    scaled: NDArray[np.floating] = (places_N2 - low) / np.maximum(high - low, 1e-12)
    return scaled
