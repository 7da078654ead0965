"""Bootstrap intervals over queries, of one system's metrics and of the differences of two systems.

The queries are drawn again with replacement `num_resamples` times, and each metric is recomputed with each query
weighted by how often it was drawn. Two systems share the draws (the comparison is paired), so what makes a query hard
for both cancels out of their difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dexter.errors import DataError, UsageError
from dexter.metrics import Ratio

CONFIDENCE = 0.95
"""Share of the resamples inside an interval."""
SEED = 0
"""Default seed of the resampling."""
_BLOCK_WEIGHTS = 1 << 22
"""Weights held at a time: 32 MB."""


@dataclass(frozen=True)
class Interval:
    """A value in percent with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero: for a difference, whether it is more than chance."""
        return self.low > 0 or self.high < 0


def bootstrap(
    values: Mapping[str, Ratio], *, num_resamples: int = 1000, confidence: float = CONFIDENCE, seed: int = SEED
) -> dict[str, Interval]:
    """Return percentile intervals of each metric of one system."""
    return _intervals([values], num_resamples=num_resamples, confidence=confidence, seed=seed)


def paired_bootstrap(
    before: Mapping[str, Ratio], after: Mapping[str, Ratio], *, num_resamples: int = 1000
) -> dict[str, Interval]:
    """Return percentile intervals of each metric's difference, `after - before`, over the same queries."""
    return _intervals([before, after], num_resamples=num_resamples, confidence=CONFIDENCE, seed=SEED)


def _intervals(
    systems: list[Mapping[str, Ratio]], *, num_resamples: int, confidence: float, seed: int
) -> dict[str, Interval]:
    """Return intervals of the last system's metrics, minus the first's when there are two."""
    if num_resamples < 1 or not 0.0 < confidence < 1.0:
        raise UsageError(
            f"got {num_resamples} resamples and confidence {confidence}: expected 1 or more and a share between 0 and 1"
        )
    names = [name for name in systems[-1] if all(name in system for system in systems)]
    if not names:
        return {}
    tables = [(_stack(system, names, "numerator"), _stack(system, names, "denominator")) for system in systems]
    num_queries = len(tables[0][0])
    if any(len(numerators) != num_queries for numerators, _ in tables):
        raise DataError(
            f"the systems were scored on {[len(n) for n, _ in tables]} queries: a paired comparison needs the same"
        )
    estimate = _difference(tables, np.ones((1, num_queries)))[0]
    draws = np.full((num_resamples, len(names)), np.nan)
    block = max(1, _BLOCK_WEIGHTS // max(num_queries, 1))
    generator = np.random.default_rng(seed)
    for start in range(0, num_resamples, block):
        weights = _draw(generator, min(block, num_resamples - start), num_queries)
        draws[start : start + len(weights)] = _difference(tables, weights)
    tail = (1.0 - confidence) / 2.0
    bounds = [_quantiles(draws[:, column], (tail, 1.0 - tail)) for column in range(len(names))]
    return {name: Interval(float(value), *bound) for name, value, bound in zip(names, estimate, bounds, strict=True)}


def _stack(system: Mapping[str, Ratio], names: list[str], part: str) -> np.ndarray:
    """Return numerators or denominators of the named metrics, queries x metrics."""
    return np.stack([getattr(system[name], part) for name in names], axis=1)


def _draw(generator: np.random.Generator, num_resamples: int, num_queries: int) -> np.ndarray:
    """Return how often each query is drawn in each resample, resamples x queries."""
    draws = [
        np.bincount(generator.integers(0, num_queries, num_queries), minlength=num_queries)
        if num_queries
        else np.zeros(0)
        for _ in range(num_resamples)
    ]
    return np.stack(draws).astype(np.float64)


def _difference(tables: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> np.ndarray:
    """Return the metrics in percent for each row of weights, resamples x metrics; last minus first of two systems."""
    with np.errstate(invalid="ignore", divide="ignore"):
        values = [100.0 * (weights @ numerators) / (weights @ denominators) for numerators, denominators in tables]
    return np.asarray(values[-1] - values[0] if len(values) > 1 else values[0])


def _quantiles(draws: np.ndarray, shares: tuple[float, float]) -> tuple[float, float]:
    """Return quantiles of the draws in which the metric was defined; NaN when it never was."""
    defined = draws[np.isfinite(draws)]
    if not len(defined):
        return float("nan"), float("nan")
    low, high = np.quantile(defined, shares)
    return float(low), float(high)
