"""Turn scores into probabilities by a monotone map for each band of label frequency, fitted on validation queries.

The map is of a label's *lead*: its score less the mean score of the query's places 6 to 20. Scores of different
queries differ in level, which says little about any label; without the level the map is better calibrated and better
at separating right from wrong labels. Within a query, leads order labels as scores do.

The map is fitted by isotonic regression, smoothed so that it never reaches 0 or 1, and interpolated. A band with few
examples uses the map of all labels; a band rarer than every band with a map uses that of the rarest of them.
Shapes: N queries, K places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dexter.errors import UsageError
from dexter.types import BANDS, TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

NUM_PLACES = 20
"""Places that a lead needs; all labels where there are fewer."""
FITTED_PLACES = 100
"""Places of each validation query that a map is fitted on."""
REPORTED_PLACES = 5
"""Places of each query that the calibration error is computed over."""
_FIRST_BACKGROUND = 5
_FEWEST = 50
"""Relevant pairs, and irrelevant pairs, that a band needs at least for a map of its own."""
_FEWEST_IN_ALL = 10
_RARE_FIRST = tuple(reversed(list(BANDS)))
_FEWEST_OF_BAND = np.array([BANDS[band][0] for band in _RARE_FIRST])
_POOLED = "all"
_STEPS = 100
_BINS = 15


@dataclass(frozen=True)
class MonotoneMap:
    """Leads in ascending order, and the probabilities there, which never fall."""

    leads: tuple[float, ...]
    probabilities: tuple[float, ...]

    @cached_property
    def _points(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array(self.leads), np.array(self.probabilities)

    def __call__(self, leads: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the probabilities of leads; beyond the ends, those at the ends."""
        return np.asarray(np.interp(leads, *self._points))

    @classmethod
    def fit(cls, leads: NDArray[np.floating], relevant: NDArray[np.bool_]) -> MonotoneMap:
        """Fit by isotonic regression; each step is smoothed by adding half a hit and half a miss."""
        order = np.argsort(leads, kind="stable")
        leads, hits = leads[order].astype(np.float64), relevant[order].astype(np.float64)
        starts = pool_violators(hits, np.ones(len(hits)))
        sizes = np.diff(np.append(starts, len(hits)))
        rates = (np.add.reduceat(hits, starts) + 0.5) / (sizes + 1.0)
        # Smoothing may have put small steps below the one before.
        firsts = pool_violators(rates, sizes)
        smoothed = np.add.reduceat(rates * sizes, firsts) / np.add.reduceat(sizes, firsts)
        middles = np.add.reduceat(leads, starts) / sizes
        return cls(tuple(middles.tolist()), tuple(np.repeat(smoothed, np.diff(np.append(firsts, len(rates)))).tolist()))


def pool_violators(values: NDArray[np.float64], weights: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return where the blocks of the isotonic regression begin: runs of values whose weighted means rise.

    Neighbours that do not rise belong to one block, in whatever order they are pooled: here all such runs at once.
    """
    starts, sums = np.arange(len(values)), values * weights
    while True:
        rises = np.append(True, np.diff(sums / weights) > 0)
        if rises.all():
            return starts
        firsts = np.flatnonzero(rises)
        starts, sums, weights = starts[firsts], np.add.reduceat(sums, firsts), np.add.reduceat(weights, firsts)


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Precision and recall on validation when labels whose probability reaches a threshold are kept."""

    threshold: float
    precision: float
    recall: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The maps of all bands, and the precision and recall of thresholds."""

    maps: Mapping[str, MonotoneMap]
    """By band, and one for all labels."""
    operating: tuple[OperatingPoint, ...] = field(default=())
    """In order of threshold."""
    falls: bool = False
    """Whether a label is at most as likely as those above it. Maps of different bands would let it be likelier; this is
    forbidden where validation says that it costs nothing."""

    def probabilities(
        self, found: TopK, counts_L: NDArray[np.integer], *, levels_N: NDArray[np.float64] | None = None
    ) -> NDArray[np.float32]:
        """Return how likely each found label is right, given the training counts of all labels; 0 for no label.

        With `falls` they never rise within a query's ranking.
        `found` has at least `NUM_PLACES` places, or all labels; otherwise `levels_N` is the `level` of each query.
        """
        leads_NK = lead(found.scores, levels_N)
        bands_NK = np.searchsorted(_FEWEST_OF_BAND, counts_L[found.ids], side="right")
        bands_NK[found.ids < 0] = 0
        result = np.zeros(found.ids.shape, dtype=np.float32)
        for place in set(bands_NK.ravel().tolist()) - {0}:
            members = bands_NK == place
            result[members] = self._map(_RARE_FIRST[place - 1])(leads_NK[members])
        return np.minimum.accumulate(result, axis=1) if self.falls else result

    def is_exhausted(
        self, found: TopK, threshold: float, *, levels_N: NDArray[np.float64] | None = None
    ) -> NDArray[np.bool_]:
        """Return for each query whether no label beyond those found can reach the threshold."""
        last = np.where(np.isfinite(found.scores), lead(found.scores, levels_N), -np.inf).min(axis=1)
        best = np.max([self._map(band)(last) for band in BANDS], axis=0)
        return np.asarray((best < threshold) | (found.ids < 0).any(axis=1))

    def threshold_for(self, precision: float | None = None) -> float:
        """Return the lowest threshold with at least this precision on validation; that of the best F1 if left out."""
        if precision is None:
            return max(self.operating, key=lambda point: point.f1).threshold
        for point in self.operating:
            if point.precision >= precision:
                return point.threshold
        best = max(point.precision for point in self.operating)
        raise UsageError(f"no threshold has precision {precision:g} on validation; the highest is {best:.3f}")

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        """Make it from plain values, as `dataclasses.asdict` returns them."""
        maps = {
            str(band): MonotoneMap(tuple(map(float, entry["leads"])), tuple(map(float, entry["probabilities"])))
            for band, entry in values["maps"].items()
        }
        usable = all(len(entry.leads) == len(entry.probabilities) > 0 for entry in maps.values())
        if _POOLED not in maps or not usable:
            raise ValueError("calibration maps are missing or not of one length")
        points = tuple(OperatingPoint(**point) for point in values["operating"])
        return cls(maps=maps, operating=points, falls=bool(values.get("falls", False)))  # older runs have no `falls`

    def _map(self, band: str) -> MonotoneMap:
        """Return the map of a band, else of the rarest band with one if this is rarer, else of all labels."""
        if band in self.maps:
            return self.maps[band]
        names = list(BANDS)
        rarest = next((name for name in reversed(names) if name in self.maps), _POOLED)
        is_rarer = rarest != _POOLED and names.index(band) > names.index(rarest)
        return self.maps[rarest if is_rarer else _POOLED]


def lead(scores_NK: NDArray[np.floating], levels_N: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Return each score less the level of its query; 0 less the level where there is no label."""
    levels_N = level(scores_NK) if levels_N is None else levels_N
    return np.asarray(np.where(np.isfinite(scores_NK), scores_NK, 0.0) - levels_N[:, None])


def level(scores_NK: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean score of each query's places 6 to 20 (the last score where there are at most 5 places)."""
    known = np.isfinite(scores_NK)
    background = slice(_FIRST_BACKGROUND, NUM_PLACES)
    if scores_NK.shape[1] > _FIRST_BACKGROUND and known.all():
        places = min(scores_NK.shape[1], NUM_PLACES) - _FIRST_BACKGROUND
        return np.asarray(scores_NK[:, background].sum(axis=1) / np.float64(places))
    scores_NK = np.where(known, scores_NK, 0.0)
    num_background = known[:, background].sum(axis=1)
    num_known = known.sum(axis=1)
    means = scores_NK[:, background].sum(axis=1) / np.maximum(num_background, 1)
    last = scores_NK[np.arange(len(scores_NK)), np.maximum(num_known - 1, 0)]
    return np.asarray(np.where(num_background > 0, means, last))


def in_band(counts: NDArray[np.integer], band: str) -> NDArray[np.bool_]:
    """Return which of the labels with these training counts are in a band."""
    low, high = BANDS[band]
    return np.asarray((counts >= low) & (counts <= high))


def calibrate(found: TopK, relevance: csr_matrix, counts_L: NDArray[np.integer]) -> Calibration | None:
    """Fit the maps on validation queries; None where too few of the labels found are right.

    Args:
        found: the best labels of each query, `FITTED_PLACES` or all labels.
        relevance: queries x labels.
        counts_L: training queries of each label.
    """
    from dexter.metrics import member_mask

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
    first = (slice(None), slice(REPORTED_PLACES))
    risen_NK, fallen_NK = (
        Calibration(maps=maps, falls=falls).probabilities(found, counts_L) for falls in (False, True)
    )
    hits_NK = member_mask(found.ids, relevance)
    falls = _costs_nothing(risen_NK[first], fallen_NK[first], hits_NK[first])
    probabilities = (fallen_NK if falls else risen_NK)[there]
    points = _operating_points(probabilities, hits, num_relevant=int(relevance.nnz))
    return Calibration(maps=maps, operating=points, falls=falls)


def _costs_nothing(before_NK: NDArray[np.floating], after_NK: NDArray[np.floating], hits_NK: NDArray[np.bool_]) -> bool:
    """Whether the log loss of other probabilities is higher by no more than a standard error of the difference."""
    losses = [
        -np.log(np.maximum(np.where(hits_NK, chances, 1.0 - chances), 1e-6)).mean(axis=1)
        for chances in (before_NK.astype(np.float64), after_NK.astype(np.float64))
    ]
    difference = losses[1] - losses[0]
    return bool(difference.mean() <= difference.std() / np.sqrt(len(difference)))


def _operating_points(
    probabilities: NDArray[np.floating], hits: NDArray[np.bool_], *, num_relevant: int
) -> tuple[OperatingPoint, ...]:
    """Compute precision and recall at thresholds 0.01, 0.02, ... as far as any label reaches them."""
    points = []
    for threshold in np.arange(1, _STEPS) / _STEPS:
        kept = probabilities >= threshold
        if not kept.any():
            break
        right = int(hits[kept].sum())
        points.append(
            OperatingPoint(
                threshold=float(threshold), precision=right / int(kept.sum()), recall=right / max(num_relevant, 1)
            )
        )
    return tuple(points)


def softmax(scores_NK: NDArray[np.floating], temperature: float) -> NDArray[np.float32]:
    """Return the softmax over the given places, with which calibrated probabilities are compared."""
    logits = (scores_NK - scores_NK[:, :1]) / temperature
    weights = np.exp(logits, dtype=np.float32)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def calibration_error(probabilities: NDArray[np.floating], hits: NDArray[np.bool_]) -> float:
    """Return the expected calibration error in percent: the mean distance of probabilities from the share of hits.

    Probabilities are put into 15 bins of equal width; each bin's mean is compared with its share of hits.
    """
    if not probabilities.size:
        return float("nan")
    return float(
        100.0
        * sum(abs(one["claimed"] - one["right"]) * one["count"] for one in reliability(probabilities, hits))
        / probabilities.size
    )


def reliability(probabilities: NDArray[np.floating], hits: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Return the mean probability, the share of hits and the size of each of 15 bins of equal width that has any."""
    bins = np.minimum((probabilities * _BINS).astype(np.int64), _BINS - 1).ravel()
    claimed = np.bincount(bins, weights=probabilities.ravel().astype(np.float64), minlength=_BINS)
    right = np.bincount(bins, weights=hits.ravel().astype(np.float64), minlength=_BINS)
    sizes = np.bincount(bins, minlength=_BINS)
    return [
        {"claimed": float(claimed[one] / sizes[one]), "right": float(right[one] / sizes[one]), "count": int(sizes[one])}
        for one in np.flatnonzero(sizes)
    ]
