"""Bootstrap intervals: against plain resampling, their coverage, and what pairing brings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dexter.errors import DataError, UsageError
from dexter.evaluation import intervals as intervals_module
from dexter.evaluation.intervals import bootstrap, paired_bootstrap
from dexter.metrics import Ratio


def mean_of(values):
    return Ratio(np.asarray(values, dtype=float), np.ones(len(values)))


def test_bootstrap_equals_drawing_the_queries_again():
    rng = np.random.default_rng(0)
    numerator, denominator = rng.random(37), rng.random(37) + 0.5
    got = bootstrap({"PSP@1": Ratio(numerator, denominator)}, num_resamples=200, confidence=0.9, seed=3)["PSP@1"]
    generator = np.random.default_rng(3)
    draws = []
    for _ in range(200):
        rows = generator.integers(0, 37, 37)
        draws.append(100 * numerator[rows].sum() / denominator[rows].sum())
    assert got.value == pytest.approx(100 * numerator.sum() / denominator.sum())
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(draws, [0.05, 0.95])))


def test_the_block_size_changes_nothing(monkeypatch):
    values = {"P@1": mean_of(np.random.default_rng(1).random(50))}
    expected = bootstrap(values, num_resamples=33)
    monkeypatch.setattr(intervals_module, "_BLOCK_WEIGHTS", 120)
    assert bootstrap(values, num_resamples=33)["P@1"].low == pytest.approx(expected["P@1"].low)


def test_the_same_seed_gives_the_same_interval():
    values = {"P@1": mean_of(np.random.default_rng(1).random(50))}
    assert bootstrap(values, seed=7) == bootstrap(values, seed=7)
    assert bootstrap(values, seed=7) != bootstrap(values, seed=8)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    inside = 0
    for seed in range(200):
        sample = np.random.default_rng(seed).random(200) < 0.3
        interval = bootstrap({"P@1": mean_of(sample)}, num_resamples=200, confidence=0.9, seed=seed)["P@1"]
        inside += interval.low <= 30.0 <= interval.high
    assert 165 <= inside <= 195


def test_pairing_finds_a_small_difference_that_separate_intervals_hide():
    rng = np.random.default_rng(2)
    difficulty = rng.random(400)
    before, after = {"P@1": mean_of(difficulty)}, {"P@1": mean_of(difficulty + 0.01 + 0.01 * rng.random(400))}
    assert bootstrap(before)["P@1"].high > bootstrap(after)["P@1"].low
    difference = paired_bootstrap(before, after)["P@1"]
    assert difference.excludes_zero
    assert difference.low < difference.value < difference.high
    reverse = paired_bootstrap(after, before)["P@1"]
    assert (reverse.value, reverse.low, reverse.high) == pytest.approx(
        (-difference.value, -difference.high, -difference.low)
    )


def test_equal_systems_differ_by_nothing():
    values = {"P@1": mean_of([0.0, 1.0, 1.0])}
    interval = paired_bootstrap(values, values)["P@1"]
    assert (interval.value, interval.low, interval.high) == (0.0, 0.0, 0.0)
    assert not interval.excludes_zero


def test_only_shared_metrics_are_compared_and_undefined_ones_are_nan():
    nothing = Ratio(np.zeros(3), np.zeros(3))
    got = paired_bootstrap({"P@1": mean_of([1, 0, 1]), "R@1": nothing}, {"R@1": nothing, "P@5": nothing})
    assert got.keys() == {"R@1"}
    assert all(math.isnan(value) for value in (got["R@1"].value, got["R@1"].low, got["R@1"].high))
    assert not got["R@1"].excludes_zero


def test_no_queries_at_all():
    assert math.isnan(bootstrap({"P@1": mean_of([])}, num_resamples=5)["P@1"].low)
    assert bootstrap({}) == {}


def test_wrong_settings_are_named():
    values = {"P@1": mean_of([1.0])}
    with pytest.raises(UsageError, match="0 resamples"):
        bootstrap(values, num_resamples=0)
    with pytest.raises(UsageError, match=r"confidence 1\.0"):
        bootstrap(values, confidence=1.0)
    with pytest.raises(DataError, match="needs the same"):
        paired_bootstrap(values, {"P@1": mean_of([1.0, 0.0])})
