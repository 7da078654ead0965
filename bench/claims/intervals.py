"""Means and differences over seeds with 95% intervals (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval; a single value has an infinite one."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Estimate the mean of a distribution from values drawn from it."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, -math.inf, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return Estimate(mean, mean - half, mean + half)


def estimate_difference(pairs: Sequence[tuple[float, float]], *, ratio: bool = False) -> Estimate:
    """Estimate the mean difference of pairs, first minus second; with `ratio` the geometric mean of first by second."""
    if not ratio:
        return estimate_mean([first - second for first, second in pairs])
    logs = estimate_mean([math.log(first / second) for first, second in pairs])
    return Estimate(*(math.exp(value) for value in (logs.mean, logs.low, logs.high)))
