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

from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.types import band_of

MOST_POINTS = 3_000
_FITTED = 20_000
"""The directions are found from so many labels at most: more would not turn them."""
_ON_TOP = ("tail", "torso", "frequent", "unseen")


@dataclass(frozen=True)
class Point:
    """A label on the map; both coordinates are between 0 and 1."""

    id: str
    text: str
    band: str
    x: float
    y: float
    found: bool = False
    """Whether it was looked for."""


@dataclass(frozen=True)
class LabelMap:
    """Where every label lies, which are drawn, and how much of their differences the plane shows."""

    labels: Labels
    places_L2: NDArray[np.float32]
    drawn: Sequence[int]
    explained: float

    @property
    def total(self) -> int:
        """How many labels there are."""
        return len(self.labels.ids)

    def points(self, found: Sequence[int] = ()) -> list[Point]:
        """The labels that are drawn, and those that were found too."""
        hits = set(found)
        points = [self._point(row, row in hits) for row in sorted({*self.drawn, *hits})]
        # What is drawn last lies on top: the rarest band, which has most labels, would hide the others.
        return sorted(points, key=lambda point: (point.found, _ON_TOP.index(point.band)))

    def _point(self, row: int, found: bool) -> Point:
        x, y = self.places_L2[row].tolist()
        labels = self.labels
        return Point(labels.ids[row], labels.texts[row], band_of(int(labels.counts[row])), x, y, found)


def map_labels(model: Model, *, most: int = MOST_POINTS, seed: int = 0) -> LabelMap:
    """Lay out the labels, and choose a sample to draw where there are many; the same labels give the same map."""
    generator = np.random.default_rng(seed)
    total = len(model.labels.ids)
    drawn = _sample(total, most, generator)
    fitted = _sample(total, _FITTED, generator)
    vectors_LD = torch.nn.functional.normalize(model.label_embeddings(), dim=1)
    mean_D, axes_D2, explained = principal_axes(vectors_LD[torch.from_numpy(fitted)])
    places_L2 = ((vectors_LD - mean_D) @ axes_D2).cpu().numpy()
    return LabelMap(model.labels, _into_unit_square(places_L2), drawn.tolist(), explained)


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


def _into_unit_square(places_N2: NDArray[np.float32]) -> NDArray[np.float32]:
    low, high = places_N2.min(axis=0), places_N2.max(axis=0)
    scaled: NDArray[np.float32] = (places_N2 - low) / np.maximum(high - low, 1e-12)
    return scaled
