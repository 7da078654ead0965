"""The transformer path end to end: gradient caching over many micro-batches, dropout on, saved, resumed, published."""

import pytest

import dexter
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import Interrupted
from tests.conftest import make_world
from tests.training.test_trainer import assert_same_weights, stop_after

SETTINGS = {
    "encoder.kind": "transformer",
    "encoder.max_length_query": 24,
    "encoder.max_length_label": 8,
    "encoder.dropout": 0.1,
    "batch.size": 32,
    "train.learning_rate": 0.002,
    "train.tokens_per_micro_batch": 200,
    "train.threads": 1,
    "validation.fraction": 0.1,
}


@pytest.fixture(scope="module")
def small_world():
    return make_world(num_train=240, num_labels=19)


@pytest.fixture(scope="module")
def pretrained(small_world, tmp_path_factory):
    """A small random encoder in a plain Hugging Face folder."""
    folder = tmp_path_factory.mktemp("encoder")
    texts = [*small_world.train.texts, *small_world.label_texts]
    TransformerEncoder.random(texts, num_layers=1, hidden_size=32).save(folder)
    return str(folder)


def settings(pretrained, **changes):
    return {**SETTINGS, "encoder.pretrained": pretrained, **changes}


@pytest.mark.parametrize("recipe", ["dexml", "unidec"])
def test_a_transformer_learns(small_world, pretrained, tmp_path, recipe):
    changes = {"train.epochs": 12}
    if recipe == "unidec":
        changes |= {"head.projection": 16, "batch.start": 1, "batch.refresh": 4}
    run = dexter.train(small_world, recipe=recipe, out=tmp_path / "run", overrides=settings(pretrained, **changes))
    report = dexter.evaluate(run.path, small_world, ks=(1, 3), num_resamples=0)
    assert report.metrics["P@1"] > 50
    assert (run.path / "model" / "modules.json").exists()


def test_a_transformer_run_resumes_bit_for_bit(small_world, pretrained, tmp_path, monkeypatch):
    overrides = settings(pretrained, **{"train.epochs": 2})
    dexter.train(small_world, recipe="dexml", out=tmp_path / "whole", overrides=overrides, keep_checkpoints=True)
    stop_after(monkeypatch, 5)
    with pytest.raises(Interrupted):
        dexter.train(small_world, recipe="dexml", out=tmp_path / "parts", overrides=overrides)
    monkeypatch.undo()
    dexter.train(small_world, out=tmp_path / "parts", resume=True, keep_checkpoints=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
