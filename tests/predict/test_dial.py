"""The dial: what queries hold against the label prior, learned or not."""

import numpy as np
import pytest

import dexter
from dexter import Predictor
from dexter.errors import UsageError
from dexter.model.model import frequency_prior
from tests.conftest import SMALL


@pytest.mark.parametrize("dial", [0.0, 0.3, 1.0])
def test_the_dial_weighs_the_learned_prior(trained, world, dial):
    predictor = Predictor.load(trained, dial=dial, neighbours=False)
    model = predictor.model
    queries = model.search_vectors(model.encode_queries(world.test.texts[:7]))
    labels = model.label_vectors().copy()
    for name, elements in model.score_slices().items():
        labels[:, elements] *= dial if name.endswith("prior") else 1.0
    expected = queries @ labels.T
    found = predictor.top(world.test.texts[:7], len(world.label_ids))
    scores = np.empty_like(expected)
    np.put_along_axis(scores, found.ids, found.scores, axis=1)
    np.testing.assert_allclose(scores, expected, atol=1e-5, rtol=1e-5)


def test_without_a_learned_prior_the_dial_adds_the_log_frequency(world, tmp_path):
    run = dexter.train(world, recipe="dexml", out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    plain, dialled = (Predictor.load(run.path, dial=dial, neighbours=False) for dial in (None, 0.5))
    assert plain.choice.dial == 0.0
    num_labels = len(world.label_ids)
    before, after = (predictor.top(world.test.texts[:5], num_labels) for predictor in (plain, dialled))
    prior = frequency_prior(plain.labels.counts, plain.model.head.temperature)
    expected, scores = np.empty((5, num_labels)), np.empty((5, num_labels))
    np.put_along_axis(expected, before.ids, before.scores, axis=1)
    np.put_along_axis(scores, after.ids, after.scores, axis=1)
    np.testing.assert_allclose(scores, expected + 0.5 * prior, atol=1e-5)


def test_the_frequency_prior_leaves_the_most_common_label_alone():
    prior = frequency_prior(np.array([0, 3, 100]), 0.05)
    assert prior[2] == 0
    assert prior[0] < prior[1] < 0


@pytest.mark.parametrize("dial", [-0.1, 1.5, float("nan")])
def test_other_values_are_refused(trained, dial):
    with pytest.raises(UsageError, match="from 0"):
        Predictor.load(trained, dial=dial)
