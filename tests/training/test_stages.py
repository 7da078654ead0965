"""Two stages, as in NGAME: first the encoder, then a classifier on the frozen encoder."""

import numpy as np
import pytest
import torch

import dexter
from dexter.config import load_config
from dexter.errors import Interrupted, UsageError
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL
from tests.training.test_trainer import assert_same_weights, stop_after

TWO = {**SMALL, "train.epochs": 3, "head.classifier_start": 2, "batch.refresh": 1, "validation.fraction": 0.0}


def make_trainer(world, folder, **changes):
    return Trainer(resolve_presets(load_config("ngame-classifier", TWO | changes), world), world, folder)


def copy_of(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def unit(vector):
    return vector / max(np.linalg.norm(vector), 1e-12)


def test_the_encoder_alone_is_trained_first_and_then_the_classifier_alone_from_its_vectors(world, tmp_path):
    trainer = make_trainer(world, tmp_path)
    start = 2 * trainer.steps_per_epoch
    rows, encoder = trainer.objective.classifier.table.weight, copy_of(trainer.encoder)
    before = rows.detach().clone()
    while trainer.step < start:
        trainer.take_step()
    assert torch.equal(rows, before)
    trained = copy_of(trainer.encoder)
    assert not torch.equal(trained["table"], encoder["table"])
    expected = slow_rows(trainer, world)
    trainer.optimizers.step = lambda *_, **__: trainer.optimizers.forget_gradients()
    trainer.take_step()
    np.testing.assert_allclose(rows.detach().numpy(), expected, atol=1e-5)


def slow_rows(trainer, world):
    """The direction of each label's text plus that of the mean of its queries, label by label."""
    queries = trainer.encoder.embed(trainer.query_tokens)
    labels = trainer.encoder.embed(trainer.label_tokens)
    found = []
    for label in range(world.num_labels):
        own = [queries[row] for row in range(len(queries)) if world.train.relevance[row, label]]
        found.append(unit(labels[label]) + (unit(np.mean(own, axis=0)) if own else 0.0))
    length = np.mean([np.linalg.norm(query) for query in queries])
    return np.stack(found) / max(1.0, length)


def test_the_encoder_stays_as_it_is_in_the_second_stage(world, tmp_path):
    trainer = make_trainer(world, tmp_path)
    while trainer.step < 2 * trainer.steps_per_epoch:
        trainer.take_step()
    trained = copy_of(trainer.encoder)
    trainer.take_step()
    rows = copy_of(trainer.objective.classifier)
    while trainer.step < trainer.num_steps:
        trainer.take_step()
    assert all(torch.equal(value, trained[name]) for name, value in trainer.encoder.state_dict().items())
    assert not torch.equal(trainer.objective.classifier.table.weight, rows["table.weight"])


def test_resumed_in_either_stage_is_uninterrupted(world, tmp_path, monkeypatch):
    settings = TWO | {"validation.fraction": 0.1}
    whole, run = tmp_path / "whole", tmp_path / "parts"
    dexter.train(world, recipe="ngame-classifier", out=whole, overrides=settings, keep_checkpoints=True)
    steps = -(-360 // 32)
    for stop_at in (3, 2 * steps, 2 * steps + 2):
        stop_after(monkeypatch, stop_at)
        with pytest.raises(Interrupted):
            dexter.train(world, recipe="ngame-classifier", out=run, overrides=settings, resume=run.exists())
        monkeypatch.undo()
    dexter.train(world, out=run, resume=True, keep_checkpoints=True)
    assert_same_weights(whole, run)


def test_a_second_stage_needs_a_classifier():
    with pytest.raises(UsageError, match=r"head\.classifier_start"):
        load_config("ngame", {"head.classifier_start": 2})
