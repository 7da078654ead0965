"""Probabilities: monotone, honest on fresh data, by band; thresholds that keep their word."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from scipy.optimize import isotonic_regression
from scipy.sparse import csr_matrix

from dexter import Predictor
from dexter.errors import UsageError
from dexter.predict.calibration import (
    Calibration,
    MonotoneMap,
    OperatingPoint,
    calibrate,
    calibration_error,
    lead,
    pool_violators,
    softmax,
)
from dexter.types import TopK


def draw(seed, *, num_queries=600, num_labels=40):
    """Rankings whose leads decide how likely a label is right: rare labels less than common ones."""
    generator = np.random.default_rng(seed)
    counts = np.where(np.arange(num_labels) % 2, 500, 3)
    level = generator.normal(size=(num_queries, 1))
    leads = np.sort(generator.gamma(0.6, size=(num_queries, num_labels)), axis=1)[:, ::-1]
    leads = leads - leads[:, 5:20].mean(axis=1, keepdims=True)
    ids = generator.permuted(np.tile(np.arange(num_labels), (num_queries, 1)), axis=1)
    truth = 1.0 / (1.0 + np.exp(2.0 - 2.0 * leads - (counts[ids] > 100)))
    hits = generator.random(truth.shape) < truth
    rows, places = np.nonzero(hits)
    relevance = csr_matrix((np.ones(len(rows)), (rows, ids[rows, places])), shape=(num_queries, num_labels))
    return TopK(ids, (leads + level).astype(np.float32)), relevance, counts, hits, truth


@pytest.mark.parametrize("size", [1, 2, 3, 17, 400])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_blocks_are_those_of_isotonic_regression(size, weighted):
    generator = np.random.default_rng(size)
    values = (generator.random(size) < np.linspace(0.1, 0.9, size)).astype(np.float64)
    weights = generator.integers(1, 9, size).astype(np.float64) if weighted else np.ones(size)
    expected = isotonic_regression(values, weights=weights)
    np.testing.assert_array_equal(pool_violators(values, weights), expected.blocks[:-1])


def test_a_map_never_falls_and_is_never_certain():
    generator = np.random.default_rng(0)
    leads = generator.normal(size=500)
    fitted = MonotoneMap.fit(leads, generator.random(500) < 1 / (1 + np.exp(-3 * leads)))
    assert (np.diff(fitted.leads) > 0).all()
    assert (np.diff(fitted.probabilities) >= 0).all()
    assert 0 < fitted.probabilities[0] < 0.1
    assert 0.9 < fitted.probabilities[-1] < 1
    assert fitted(np.array([-99.0, 99.0])).tolist() == [fitted.probabilities[0], fitted.probabilities[-1]]


def test_leads_forget_the_level_of_a_query():
    scores = np.random.default_rng(0).normal(size=(3, 30))
    np.testing.assert_allclose(lead(scores), lead(scores + 7.0), atol=1e-12)
    few = np.array([[3.0, 2.0, 1.0, -np.inf]])
    np.testing.assert_allclose(lead(few)[0, :3], [2.0, 1.0, 0.0])
    assert lead(np.empty((0, 30))).shape == (0, 30)


def test_probabilities_hold_on_fresh_queries_and_by_band():
    found, relevance, counts, *_ = draw(0)
    calibration = calibrate(found, relevance, counts)
    assert set(calibration.maps) == {"all", "frequent", "tail"}
    fresh, _, _, hits, truth = draw(1)
    chances = calibration.probabilities(fresh, counts)
    assert np.abs(chances - truth).mean() < 0.04
    assert calibration_error(chances, hits) < 2.0 < 5.0 < calibration_error(softmax(fresh.scores, 0.05), hits)
    for members in (counts[fresh.ids] > 100, counts[fresh.ids] < 10):
        assert abs(chances[members].mean() - hits[members].mean()) < 0.02


def test_a_band_with_few_examples_uses_the_map_of_all_and_rarer_labels_that_of_the_rarest():
    found, relevance, counts, *_ = draw(0)
    leads, none = lead(found.scores), np.zeros(len(counts), dtype=np.int64)
    calibration = calibrate(found, relevance, counts)
    np.testing.assert_allclose(calibration.probabilities(found, none), calibration.maps["tail"](leads), atol=1e-6)
    np.testing.assert_allclose(calibration.probabilities(found, none + 50), calibration.maps["all"](leads), atol=1e-6)


def test_too_little_to_learn_from_is_nothing():
    found, relevance, counts, *_ = draw(0, num_queries=3)
    assert calibrate(found, csr_matrix(relevance.shape), counts) is None


def test_thresholds_keep_their_word_on_fresh_queries():
    found, relevance, counts, *_ = draw(0)
    calibration = calibrate(found, relevance, counts)
    fresh, _, _, hits, _ = draw(1)
    chances = calibration.probabilities(fresh, counts)
    for wanted in (0.5, 0.7, 0.85):
        kept = chances >= calibration.threshold_for(wanted)
        assert hits[kept].mean() > wanted - 0.04
    best = calibration.threshold_for()
    assert all(
        point.f1 <= max(p.f1 for p in calibration.operating if p.threshold == best) for point in calibration.operating
    )
    with pytest.raises(UsageError, match="the highest is"):
        Calibration(maps={}, operating=(OperatingPoint(threshold=0.5, precision=0.6, recall=0.1),)).threshold_for(0.9)


def test_saved_as_plain_values_and_read_again():
    found, relevance, counts, *_ = draw(0)
    calibration = calibrate(found, relevance, counts)
    assert Calibration.from_json(asdict(calibration)) == calibration
    for broken in (
        {"maps": {}, "operating": []},
        {"maps": {"all": {"leads": [1.0], "probabilities": []}}, "operating": []},
    ):
        with pytest.raises(ValueError, match="calibration maps"):
            Calibration.from_json(broken)


def test_calibration_error_equals_a_slow_loop():
    generator = np.random.default_rng(2)
    chances, hits = generator.random((30, 5)), generator.random((30, 5)) < 0.4
    slow = 0.0
    for low in range(15):
        inside = (chances * 15).astype(int) == low
        if inside.any():
            slow += inside.mean() * abs(chances[inside].mean() - hits[inside].mean())
    assert calibration_error(chances, hits) == pytest.approx(100 * slow)
    assert np.isnan(calibration_error(np.empty(0), np.empty(0, dtype=bool)))


def test_predictions_carry_probabilities_only_where_they_hold(trained, world):
    predictor = Predictor.load(trained)
    assert all(0 < label.probability < 1 for label in predictor.predict(world.test.texts[:2], k=3)[0])
    other = Predictor.load(trained, dial=0.5)
    assert other.predict(["river"], k=1)[0][0].probability is None
    with pytest.raises(UsageError, match="no probabilities"):
        other.predict(["river"], threshold=0.5)
    with pytest.raises(UsageError, match="above 0"):
        predictor.predict(["river"], threshold=1.5)


@pytest.mark.parametrize("threshold", [0.01, 0.3, 1.0])
def test_with_a_threshold_there_are_exactly_those_that_reach_it(trained, world, threshold):
    predictor = Predictor.load(trained)
    everything = predictor.predict(world.test.texts, k=len(world.label_ids))
    above = predictor.predict(world.test.texts, threshold=threshold)
    reaching = [[label for label in labels if label.probability >= threshold] for labels in everything]
    few = predictor.predict(world.test.texts, k=2, threshold=threshold)
    for found, expected in ((above, reaching), (few, [row[:2] for row in above])):
        assert [[label.id for label in labels] for labels in found] == [[label.id for label in row] for row in expected]
        chances = [[label.probability for labels in rows for label in labels] for rows in (found, expected)]
        assert chances[0] == pytest.approx(chances[1], rel=1e-5)


def test_few_labels_and_no_texts(trained, world):
    predictor = Predictor.load(trained)
    predictor.remove_labels(list(world.label_ids[3:]))
    assert len(predictor.predict(["river"], k=9)[0]) == 3
    assert predictor.predict([], threshold=0.5) == []
    assert 0 < predictor.find_threshold(precision=0.1) <= predictor.find_threshold(precision=0.5)


def test_probabilities_fall_with_rank_where_that_costs_nothing():
    """Here one map serves all bands, so that what rises is chance; in `draw` rare labels are truly likelier."""
    rng = np.random.default_rng(0)
    scores = -np.sort(-rng.normal(size=(400, 30)), axis=1)
    found = TopK(np.tile(np.arange(30), (400, 1)), scores.astype(np.float32))
    chance = 1 / (1 + np.exp(-2 * lead(found.scores)))
    relevance = csr_matrix(rng.random(chance.shape) < chance)
    counts = np.where(np.arange(30) % 2 == 0, 5, 500)
    calibration = calibrate(found, relevance, counts)
    assert calibration.falls and set(calibration.maps) >= {"tail", "frequent"}
    assert (np.diff(calibration.probabilities(found, counts), axis=1) <= 0).all()
    assert Calibration.from_json(json.loads(json.dumps(asdict(calibration)))) == calibration
    found, relevance, counts, *_ = draw(0)
    calibration = calibrate(found, relevance, counts)
    assert not calibration.falls
    assert (np.diff(calibration.probabilities(found, counts), axis=1) > 0).any()
