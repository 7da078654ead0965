"""From scores to probabilities: a monotone map for each band of label frequency, fitted on validation queries.

What is mapped is a label's *lead*: its score less the mean score of the query's places 6 to 20. Scores of different
queries differ in their level, which says little about any label; without it the same map is both better calibrated and
better at telling right from wrong. Within a query a lead orders labels as the score does.

The map is isotonic regression, smoothed so that no stretch claims certainty, and read off by interpolation. A band with
few examples uses the map of all labels; one that is rarer than every band with a map uses that of the rarest of them.
Shapes: N queries, K places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.errors import UsageError
from dexter.metrics import member_mask
from dexter.types import BANDS, TopK

NUM_PLACES = 20
"""Places that must be known for a lead; all labels where there are fewer."""
FITTED_PLACES = 100
"""Places of each validation query that a map is fitted on."""
REPORTED_PLACES = 5
"""Places of each query that a calibration error is taken over."""
_FIRST_BACKGROUND = 5
_FEWEST = 50
"""A band needs so many relevant and so many irrelevant pairs for a map of its own."""
_FEWEST_IN_ALL = 10
_POOLED = "all"
_STEPS = 100
_BINS = 15


@dataclass(frozen=True)
class MonotoneMap:
    """Leads in ascending order, and the probabilities there, which never fall."""

    leads: tuple[float, ...]
    probabilities: tuple[float, ...]

    def __call__(self, leads: NDArray[np.floating]) -> NDArray[np.float64]:
        """The probabilities of leads; beyond the ends those at the ends."""
        return np.asarray(np.interp(leads, self.leads, self.probabilities))

    @classmethod
    def fit(cls, leads: NDArray[np.floating], relevant: NDArray[np.bool_]) -> MonotoneMap:
        """Isotonic regression, each of its steps pulled a little towards one half: by half a hit and half a miss."""
        # Only fitting needs it, and it takes a quarter of a second to import.
        from scipy.optimize import isotonic_regression

        order = np.argsort(leads, kind="stable")
        leads, hits = leads[order].astype(np.float64), relevant[order].astype(np.float64)
        starts = isotonic_regression(hits).blocks[:-1]
        sizes = np.diff(np.append(starts, len(hits)))
        rates = (np.add.reduceat(hits, starts) + 0.5) / (sizes + 1.0)
        # The pull may have put small steps below their neighbours.
        smoothed = isotonic_regression(rates, weights=sizes).x
        middles = np.add.reduceat(leads, starts) / sizes
        return cls(tuple(middles.tolist()), tuple(smoothed.tolist()))


@dataclass(frozen=True, kw_only=True)
class Operating:
    """What keeping every label whose probability reaches a threshold gave on validation."""

    threshold: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The maps of all bands, and what thresholds give."""

    maps: Mapping[str, MonotoneMap]
    """By band, and one for all labels."""
    operating: tuple[Operating, ...] = field(default=())
    """In order of threshold."""

    def probabilities(self, found: TopK, counts_L: NDArray[np.integer]) -> NDArray[np.float32]:
        """How likely each label found is to be right, given the training counts of all labels; 0 where there is none.

        `found` has at least `NUM_PLACES` places, or all labels.
        """
        leads_NK, counts_NK = lead(found.scores), counts_L[found.ids]
        result = np.zeros(found.ids.shape, dtype=np.float32)
        for band in BANDS:
            members = in_band(counts_NK, band) & (found.ids >= 0)
            result[members] = self._map(band)(leads_NK[members])
        return result

    def is_exhausted(self, found: TopK, threshold: float) -> NDArray[np.bool_]:
        """For each query, whether no label beyond those found can reach a probability."""
        last = np.where(np.isfinite(found.scores), lead(found.scores), -np.inf).min(axis=1)
        best = np.max([self._map(band)(last) for band in BANDS], axis=0)
        return np.asarray((best < threshold) | (found.ids < 0).any(axis=1))

    def threshold_for(self, precision: float | None = None) -> float:
        """The lowest threshold with at least this precision on validation; that of the best F1 if left out."""
        if precision is None:
            return max(self.operating, key=lambda point: point.f1).threshold
        for point in self.operating:
            if point.precision >= precision:
                return point.threshold
        best = max(point.precision for point in self.operating)
        raise UsageError(f"no threshold has precision {precision:g} on validation; the highest is {best:.3f}")

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Calibration:
        """What `to_json` gave."""
        maps = {
            str(band): MonotoneMap(tuple(map(float, entry["leads"])), tuple(map(float, entry["probabilities"])))
            for band, entry in values["maps"].items()
        }
        usable = all(len(entry.leads) == len(entry.probabilities) > 0 for entry in maps.values())
        if _POOLED not in maps or not usable:
            raise ValueError("calibration maps are missing or not of one length")
        return cls(maps=maps, operating=tuple(Operating(**point) for point in values["operating"]))

    def _map(self, band: str) -> MonotoneMap:
        """The map of a band; for labels that are rarer than any with a map the rarest, else that of all labels."""
        if band in self.maps:
            return self.maps[band]
        names = list(BANDS)
        rarest = next((name for name in reversed(names) if name in self.maps), _POOLED)
        is_rarer = rarest != _POOLED and names.index(band) > names.index(rarest)
        return self.maps[rarest if is_rarer else _POOLED]


def lead(scores_NK: NDArray[np.floating]) -> NDArray[np.float64]:
    """How far each place stands above the mean of places 6 to 20 (of the last place where there are no more than 5)."""
    known = np.isfinite(scores_NK)
    scores_NK = np.where(known, scores_NK, 0.0)
    background = slice(_FIRST_BACKGROUND, NUM_PLACES)
    num_background = known[:, background].sum(axis=1)
    num_known = known.sum(axis=1)
    means = scores_NK[:, background].sum(axis=1) / np.maximum(num_background, 1)
    last = scores_NK[np.arange(len(scores_NK)), np.maximum(num_known - 1, 0)]
    return np.asarray(scores_NK - np.where(num_background > 0, means, last)[:, None])


def in_band(counts: NDArray[np.integer], band: str) -> NDArray[np.bool_]:
    """Which labels with these training counts are in a band."""
    low, high = BANDS[band]
    return np.asarray((counts >= low) & (counts <= high))


def calibrate(found: TopK, relevance: csr_matrix, counts_L: NDArray[np.integer]) -> Calibration | None:
    """Fit the maps on validation queries; None where too few of the labels found are right.

    Args:
        found: the best labels of each query, `FITTED_PLACES` or all labels.
        relevance: queries x labels.
        counts_L: training queries of each label.
    """
    there = found.ids >= 0
    hits = member_mask(found.ids, relevance)[there]
    leads, counts = lead(found.scores)[there], counts_L[found.ids][there]
    if min(hits.sum(), (~hits).sum()) < _FEWEST_IN_ALL:
        return None
    maps = {_POOLED: MonotoneMap.fit(leads, hits)}
    for band in BANDS:
        members = in_band(counts, band)
        if min(hits[members].sum(), (~hits[members]).sum()) >= _FEWEST:
            maps[band] = MonotoneMap.fit(leads[members], hits[members])
    calibration = Calibration(maps=maps)
    probabilities = calibration.probabilities(found, counts_L)[there]
    return Calibration(maps=maps, operating=_operating_points(probabilities, hits, num_relevant=int(relevance.nnz)))


def _operating_points(
    probabilities: NDArray[np.floating], hits: NDArray[np.bool_], *, num_relevant: int
) -> tuple[Operating, ...]:
    """Precision and recall at every hundredth, as far as any label reaches it."""
    points = []
    for threshold in np.arange(1, _STEPS) / _STEPS:
        kept = probabilities >= threshold
        if not kept.any():
            break
        right = int(hits[kept].sum())
        points.append(
            Operating(
                threshold=float(threshold), precision=right / int(kept.sum()), recall=right / max(num_relevant, 1)
            )
        )
    return tuple(points)


def softmax(scores_NK: NDArray[np.floating], temperature: float) -> NDArray[np.float32]:
    """What a model trained by softmax takes for probabilities, among the places given: to be compared with."""
    logits = (scores_NK - scores_NK[:, :1]) / temperature
    weights = np.exp(logits, dtype=np.float32)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def calibration_error(probabilities: NDArray[np.floating], hits: NDArray[np.bool_]) -> float:
    """Expected calibration error in percent: how far, on average, a probability is from the share of hits around it.

    Probabilities are put into 15 bins of equal width; each bin's mean is held against its share of hits.
    """
    if not probabilities.size:
        return float("nan")
    bins = np.minimum((probabilities * _BINS).astype(np.int64), _BINS - 1).ravel()
    claimed = np.bincount(bins, weights=probabilities.ravel().astype(np.float64), minlength=_BINS)
    right = np.bincount(bins, weights=hits.ravel().astype(np.float64), minlength=_BINS)
    return float(100.0 * np.abs(claimed - right).sum() / probabilities.size)
