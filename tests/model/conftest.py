"""A run that may be changed, and what it means that two predictors have the same labels."""

import shutil

import numpy as np
import pytest


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the trained run."""
    return shutil.copytree(trained, tmp_path / "run")


def same_labels(one, other, texts):
    """Ids, texts, counts, versions, examples and predictions are equal to the last bit."""
    assert list(one.labels.ids) == list(other.labels.ids)
    assert list(one.labels.texts) == list(other.labels.texts)
    np.testing.assert_array_equal(one.labels.counts, other.labels.counts)
    assert one.version == other.version
    assert [each[:3] for each in one.examples] == [each[:3] for each in other.examples]
    assert one.predict(texts, k=7) == other.predict(texts, k=7)
