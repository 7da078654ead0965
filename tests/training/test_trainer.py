"""Training end to end on a small world: it learns, it repeats, it resumes bit for bit, it stops cleanly."""

import inspect
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import dexter
from dexter.cli import train as cli
from dexter.config import DEFAULT_RECIPE, Config
from dexter.errors import DivergedError, Interrupted, UsageError
from dexter.training import trainer as module
from dexter.training.checkpoint import load_checkpoint
from tests.conftest import SMALL, make_world


def final_weights(run):
    return load_checkpoint(Path(run) / "checkpoints").tensors


def assert_same_weights(first, second):
    first, second = final_weights(first), final_weights(second)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def train(world, out, *, recipe="dexml", **changes):
    overrides = {**SMALL, **changes}
    return dexter.train(world, recipe=recipe, out=out, overrides=overrides, keep_checkpoints=True)


@pytest.mark.parametrize("recipe", ["dexter", "dexml", "dexml-topk", "dexml-softmax", "infonce", "bce-scaled"])
def test_every_recipe_learns(world, tmp_path, recipe):
    changes = {"train.epochs": 20 if recipe == "bce-scaled" else 6, "validation.metric": "P@1"}
    if recipe == "dexml-topk":
        changes["loss.k"] = 3
    run = train(world, tmp_path / "run", recipe=recipe, **changes)
    report = dexter.evaluate(run.path, world, ks=(1, 3, 5), num_resamples=0)
    assert report.metrics["P@1"] > (60 if recipe in ("bce-scaled", "dexml-topk") else 80)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} == {"train", "epoch", "validation"}


def test_the_same_seed_gives_the_same_run_and_another_seed_another(world, tmp_path):
    for name in ("one", "two"):
        train(world, tmp_path / name)
    train(world, tmp_path / "other", **{"seed": 1})
    assert_same_weights(tmp_path / "one", tmp_path / "two")
    first, other = final_weights(tmp_path / "one"), final_weights(tmp_path / "other")
    assert not torch.equal(first["encoder:table"], other["encoder:table"])


VARIANTS = {
    "plain": {},
    "dropout": {"encoder.token_dropout": 0.2},
    "all positives": {"loss.positives": 0},
    "hard negatives": {"batch.pool": "sampled", "batch.hard_negatives": 2, "batch.shortlist": 20, "batch.refresh": 1},
    "in-batch": {"batch.pool": "in-batch"},
    "prior": {"loss.prior": True},
    "old label encodings": {"train.label_refresh": 3},
    "micro-batches": {"train.tokens_per_micro_batch": 20, "encoder.token_dropout": 0.2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_is_uninterrupted_bit_for_bit(world, tmp_path, monkeypatch, variant):
    changes = VARIANTS[variant]
    train(world, tmp_path / "whole", **changes)
    run = tmp_path / "parts"
    for stop_at in (3, 9, 17):
        stop_after(monkeypatch, stop_at)
        with pytest.raises(Interrupted):
            dexter.train(world, recipe="dexml", out=run, overrides={**SMALL, **changes}, resume=run.exists())
        monkeypatch.undo()
    dexter.train(world, out=run, resume=True, keep_checkpoints=True)
    assert_same_weights(tmp_path / "whole", run)
    whole, parts = (
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (tmp_path / "whole", run)
    )
    for name in ("step", "loss", "P@1", "positives_per_query", "pool_labels"):
        assert [record.get(name) for record in whole] == [record.get(name) for record in parts]


def stop_after(monkeypatch, step):
    """Send the process SIGTERM when it has taken `step` steps."""
    take_step = module.Trainer.take_step

    def interrupting(self):
        result = take_step(self)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(module.Trainer, "take_step", interrupting)


def test_a_signal_saves_and_says_how_to_go_on(world, tmp_path, monkeypatch):
    stop_after(monkeypatch, 2)
    with pytest.raises(Interrupted, match="--resume") as caught:
        train(world, tmp_path / "run")
    assert caught.value.exit_code == 143
    assert load_checkpoint(tmp_path / "run" / "checkpoints").step == 2


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_divergence_stops_the_run_and_names_the_batch(world, tmp_path, monkeypatch, poison):
    real = module.backward

    def poisoned(objective, *sides, **more):
        outcome = real(objective, *sides, **more)
        calls.append(1)
        if len(calls) == 16:
            (outcome.loss if poison == "loss" else outcome.gradients[0]).fill_(float("nan"))
        return outcome

    calls = []
    monkeypatch.setattr(module, "backward", poisoned)
    with pytest.raises(DivergedError, match="step 15") as caught:
        train(world, tmp_path / "run")
    assert caught.value.exit_code == 6
    named = json.loads((tmp_path / "run" / "diverged.json").read_text())
    assert set(named["queries"]) <= set(world.train.uids)
    assert load_checkpoint(tmp_path / "run" / "checkpoints").step == 12


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_stop_the_run_at_the_next_step(world, tmp_path, monkeypatch, value):
    real = module.Trainer.take_step

    def poisoned(self):
        if self.step == 14:
            with torch.no_grad():
                next(self.encoder.parameters()).view(-1).fill_(value)
        return real(self)

    monkeypatch.setattr(module.Trainer, "take_step", poisoned)
    with pytest.raises(DivergedError, match="step 14"):
        train(world, tmp_path / "run")
    assert load_checkpoint(tmp_path / "run" / "checkpoints").step == 12
    assert dexter.Predictor.load(tmp_path / "run" / "model").predict(["river"])


def test_a_run_folder_is_never_overwritten(world, tmp_path):
    train(world, tmp_path / "run", **{"train.epochs": 1})
    with pytest.raises(UsageError, match="--resume"):
        train(world, tmp_path / "run")
    with pytest.raises(UsageError, match="keeps its settings"):
        dexter.train(world, out=tmp_path / "run", overrides={"train.epochs": 9}, resume=True)
    with pytest.raises(UsageError, match="other data"):
        dexter.train(make_world(seed=5), out=tmp_path / "run", resume=True)


def test_early_stopping_ends_before_the_last_epoch(world, tmp_path):
    changes = {"train.epochs": 50, "validation.patience": 2, "train.learning_rate": 1e-9}
    run = train(world, tmp_path / "run", **changes)
    assert load_checkpoint(run.path / "checkpoints").step == 3 * 12


def test_without_validation_the_last_model_is_kept(world, tmp_path):
    run = train(world, tmp_path / "run", **{"validation.fraction": 0.0})
    assert run.best == {}
    assert dexter.Predictor.load(run.path).predict(["river"], k=2)


def test_the_default_recipe_is_that_of_the_command_line(world, tmp_path):
    run = dexter.train(world, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    assert run.config.recipe == Config().recipe == DEFAULT_RECIPE == "dexter"
    assert inspect.signature(cli.train).parameters["recipe"].default == DEFAULT_RECIPE
    assert inspect.signature(dexter.plan).parameters["recipe"].default == DEFAULT_RECIPE


def test_a_finished_run_keeps_its_model_and_drops_its_checkpoints(world, tmp_path, caplog):
    caplog.set_level("INFO", logger="dexter")
    run = dexter.train(world, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    assert not (run.path / "checkpoints").exists()
    assert dexter.Predictor.load(run.path).predict(["river"], k=2)
    again = dexter.train(world, out=run.path, resume=True)
    assert again == run
    assert "is finished already" in caplog.text
    kept = dexter.train(world, out=tmp_path / "kept", overrides={**SMALL, "train.epochs": 1}, keep_checkpoints=True)
    assert load_checkpoint(kept.path / "checkpoints").step > 0


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "gpu", "meta"])
def test_a_device_that_is_not_there_is_a_usage_error(world, tmp_path, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"train\.device.*cpu"):
        train(world, tmp_path / "run", **{"train.device": device})
    assert not (tmp_path / "run").exists()


CLASSIFIER_RECIPES = [
    "dexml-hnm",
    "ance",
    "ngame",
    "dexa",
    "siamesexml",
    "supconde",
    "unidec",
    "unidec-pos-clf",
    "renee",
]


def quick(recipe):
    """Settings that make the long recipes short: clusters and hard negatives from the second epoch on."""
    changes = {"train.epochs": 5, "batch.refresh": 2}
    if recipe != "renee":
        changes["batch.start"] = 1
    if recipe in ("supconde", "unidec", "unidec-pos-clf"):
        changes["head.projection"] = 24
    return changes


@pytest.mark.parametrize("recipe", CLASSIFIER_RECIPES)
def test_clustered_mined_and_classifier_recipes_learn(world, tmp_path, recipe):
    changes = quick(recipe) | {"train.epochs": 10}
    run = train(world, tmp_path / "run", recipe=recipe, **changes)
    heads = dexter.Predictor.load(run.path).model.heads
    assert heads == (
        ("encoder", "classifier", "unified") if recipe in ("unidec", "unidec-pos-clf", "renee") else ("encoder",)
    )
    report = dexter.evaluate(run.path, world, ks=(1, 3), num_resamples=0)
    assert report.metrics["P@1"] > 60


@pytest.mark.parametrize("recipe", CLASSIFIER_RECIPES)
def test_resuming_keeps_clusters_shortlists_and_the_classifier(world, tmp_path, monkeypatch, recipe):
    train(world, tmp_path / "whole", recipe=recipe, **quick(recipe))
    run = tmp_path / "parts"
    for stop_at in (7, 18, 40):
        stop_after(monkeypatch, stop_at)
        with pytest.raises(Interrupted):
            dexter.train(world, recipe=recipe, out=run, overrides={**SMALL, **quick(recipe)}, resume=run.exists())
        monkeypatch.undo()
    dexter.train(world, out=run, resume=True, keep_checkpoints=True)
    assert_same_weights(tmp_path / "whole", run)


def test_a_bfloat16_table_trains_as_well(world, tmp_path):
    scores = []
    for storage in ("float32", "bfloat16"):
        changes = quick("unidec") | {"head.storage": storage, "train.epochs": 8, "validation.fraction": 0.0}
        run = train(world, tmp_path / storage, recipe="unidec", **changes)
        predictor = dexter.Predictor.load(run.path, head="classifier")
        scores.append(dexter.evaluate(predictor, world, ks=(1, 3), num_resamples=0).metrics["P@1"])
    assert abs(scores[0] - scores[1]) < 6


@pytest.mark.parametrize("loss", ["decoupled_softmax", "softmax", "psl"])
def test_the_pool_correction_brings_a_small_pool_closer_to_all_labels(tmp_path, loss):
    """The corrected loss of in-batch pools is, over many batches, nearer to the loss over all labels."""
    world = make_world(num_train=300, num_labels=120, seed=3)
    losses = {}
    for name, changes in {
        "all": {},
        "plain": {"batch.pool": "in-batch"},
        "corrected": {"batch.pool": "in-batch", "batch.correct_pool": True},
    }.items():
        shared = {"train.learning_rate": 1e-9, "train.epochs": 5, "loss.name": loss, "loss.balance": 1.0}
        run = train(world, tmp_path / name, **shared, **changes)
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        losses[name] = np.mean([record["loss"] for record in records if record["kind"] == "train"])
    assert abs(losses["corrected"] - losses["all"]) < 0.3 * abs(losses["plain"] - losses["all"])
