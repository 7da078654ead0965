"""The same mathematics on several ranks: each recipe and loss takes the steps of one process, to rounding.

Computed in double precision: in single precision Adam turns rounding noise in gradients that should be zero into steps
of full length, and no two orders of summation agree for long.
"""

from unittest import mock

import numpy as np
import pytest
import torch

from dexter.config import load_config
from dexter.data import Dataset
from dexter.errors import ModelError
from dexter.evaluation import evaluate
from dexter.predict.predictor import Predictor
from dexter.processes import LabelShard
from dexter.recipes import method_names
from dexter.training import objective as objective_module
from dexter.training import train
from dexter.training import trainer as module
from dexter.training.checkpoint import load_checkpoint
from dexter.training.presets import resolve_presets
from tests.conftest import SMALL, make_world
from tests.training.ranks import run_ranks

NUM_STEPS = 30
LOGARITHMS = ("encoder.token_weights", "encoder.position_weights")


def settings(recipe, **changes):
    quick = {"batch.refresh": 1, "head.dropout": 0.0, "train.epochs": 3}
    if recipe not in ("renee", "dexter", "dexml", "dexml-topk", "dexml-softmax", "infonce", "bce", "bce-scaled"):
        quick["batch.start"] = 1
    if recipe in ("supconde", "unidec", "unidec-pos-clf"):
        quick["head.projection"] = 24
    if recipe == "unidec-pos-clf":
        quick["batch.positives"] = 1
    return {**SMALL, **quick, **changes}


def widened(build):
    """Builders of the trainer's parts that give them in double precision."""
    return lambda *arguments, **more: build(*arguments, **more).double()


def make_trainer(world, dataset, recipe, changes, folder):
    config = resolve_presets(load_config(recipe, settings(recipe, **changes)), dataset)
    with (
        mock.patch.object(module, "build_encoder", widened(module.build_encoder)),
        mock.patch.object(objective_module, "Objective", widened(objective_module.Objective)),
    ):
        return module.Trainer(config, dataset, folder, world)


def take_steps(world, dataset, cases, folder):
    """For each case, the losses of the steps, all weights afterwards, those with a row per label in label order, and
    the sizes of the steps."""
    return [_steps(world, dataset, recipe, changes, folder) for recipe, changes in cases]


def _steps(world, dataset, recipe, changes, folder):
    trainer = make_trainer(world, dataset, recipe, changes, folder)
    losses, sizes = [], []
    for _ in range(NUM_STEPS):
        losses.append(float(trainer.take_step().loss))
        sizes.append(trainer.step_sizes)
    weights = {f"encoder.{name}": value.cpu().numpy().copy() for name, value in trainer.encoder.state_dict().items()}
    whole = module.whole_model(world, trainer._model(), trainer.labels, trainer.text_of_label)
    if whole is not None:
        heads = {"dual": whole.head, "classifier": whole.classifier}
        weights |= {
            f"{head}.{name}": value.copy()
            for head, arrays in heads.items()
            if arrays is not None
            for name, value in arrays.state().items()
        }
        weights["representations"] = whole.representations_LD.copy()
    return losses, weights, sizes


def largest_difference(got, wanted):
    """Of losses and weights, relative to the largest entry of each tensor; logarithms (which may all be near 0, and of
    which Adam moves even one whose gradient is rounding noise) relative to 1."""
    losses = np.abs(np.array(got[0]) - np.array(wanted[0])).max() / np.abs(wanted[0]).max()
    assert got[1].keys() == wanted[1].keys()
    differences = [
        np.abs(got[1][name] - value).max() / max(np.abs(value).max(), 1.0 if name in LOGARITHMS else 1e-12)
        for name, value in wanted[1].items()
        if value.size
    ]
    return max(losses, *differences)


def assert_equal_to_one_process(num_ranks, dataset, cases, folder, *, start="fork"):
    expected = run_ranks(1, take_steps, dataset, cases, folder)[0]
    for rank, answers in enumerate(run_ranks(num_ranks, take_steps, dataset, cases, folder, start=start)):
        for (recipe, changes), got, wanted in zip(cases, answers, expected, strict=True):
            if rank > 0:
                wanted = (wanted[0], {name: wanted[1][name] for name in got[1]}, wanted[2])
            assert largest_difference(got, wanted) < 1e-6, f"{recipe} {changes} on rank {rank} of {num_ranks}"
            assert got[2] == wanted[2], "the sizes of a step must be those of the whole pool"


VARIANTS = [
    ("dexml", {"train.tokens_per_micro_batch": 20}),
    ("dexml", {"loss.positives": 0, "train.gradient_clip": 0.05}),
    ("unidec", {"loss.positives": 1, "loss.balance": 0.2, "loss.classifier_balance": 0.9}),
    ("dexml-hnm", {"batch.shortlist": 12, "batch.hard_negatives": 3, "loss.undrawn": "negative"}),
    ("bce", {"train.beta2": 0.999}),
    ("dexml", {"batch.pool": "in-batch", "batch.correct_pool": True}),
    ("dexter", {"train.gradient_clip": 0.05}),
    ("dexml", {"train.label_refresh": 3}),
    ("unidec", {"loss.prior": True}),
]


def test_some_recipes_on_three_ranks(tmp_path):
    world = make_world(num_train=200, num_labels=37)
    cases = [("dexter", {}), ("dexml-topk", {"loss.k": 3}), ("dexa", {}), ("unidec-pos-clf", {})]
    assert_equal_to_one_process(3, world, cases, tmp_path)


def test_two_ranks_on_the_device(device, tmp_path):
    """Two CUDA devices take the steps of one, as two processes on a CPU do."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    cases = [("dexml", {"train.device": device}), ("unidec", {"train.device": device})]
    start = "spawn" if device == "cuda" else "fork"
    assert_equal_to_one_process(2, make_world(num_train=120), cases, tmp_path, start=start)


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("recipe", method_names())
def test_every_recipe(tmp_path, recipe, num_ranks):
    changes = {"loss.k": 3} if recipe == "dexml-topk" else {}
    assert_equal_to_one_process(num_ranks, make_world(), [(recipe, changes)], tmp_path)


@pytest.mark.slow(minutes=1)
def test_sums_are_over_the_queries_of_all_ranks(tmp_path):
    """Sums are so much larger than means that rounding noise is not small beside Adam's epsilon: two steps only."""
    cases = [("bce", {"loss.average": "sum"}), ("unidec", {}), ("bce", {"loss.average": "query"})]
    one, *_ = run_ranks(1, take_steps, make_world(), cases, tmp_path)
    three, *_ = run_ranks(3, take_steps, make_world(), cases, tmp_path)
    for (losses, *_), (expected, *_) in zip(three, one, strict=True):
        np.testing.assert_allclose(losses[:2], expected[:2], rtol=1e-9)


@pytest.mark.slow(minutes=1)
def test_every_setting_that_ranks_must_agree_on(tmp_path):
    assert_equal_to_one_process(3, make_world(), VARIANTS, tmp_path)


def test_a_rank_without_labels_and_without_queries(tmp_path):
    """Five labels with two texts, and batches of two queries, on three ranks."""
    world = make_world(num_train=64, num_labels=5)
    texts = ["river stone"] * 3 + ["cloud amber"] * 2
    world = Dataset("twins", texts, world.label_ids, world.train, world.test)
    changes = {"batch.size": 2, "validation.fraction": 0.0}
    cases = [("dexml", changes), ("unidec", changes), ("dexter", changes)]
    assert_equal_to_one_process(3, world, cases, tmp_path)


def test_labels_are_dealt_out_by_text():
    places = np.array([0, 1, 0, 2, 3, 1, 4])
    shards = [LabelShard.of(places, rank=rank, size=3) for rank in range(3)]
    assert [shard.labels.tolist() for shard in shards] == [[0, 2, 4], [1, 5, 6], [3]]
    assert [shard.texts.tolist() for shard in shards] == [[0, 3], [1, 4], [2]]
    assert shards[1].text_of_label.tolist() == [0, 0, 1]
    assert LabelShard.of(places[:2], rank=2, size=3).labels.tolist() == []


def dropped(world, dataset, folder):
    trainer = make_trainer(world, dataset, "dexml", {"encoder.token_dropout": 0.5}, folder)
    return [torch.rand(5).tolist(), float(trainer.take_step().loss)]


def test_ranks_drop_different_features(tmp_path):
    first, second = run_ranks(2, dropped, make_world(num_train=100), tmp_path)
    assert first[0] != second[0]
    assert first[1] == second[1]


def go_on(world, dataset, recipe, changes, folder, until):
    """Resume, take steps until some step, save; the losses and, on the first rank, the weights."""
    trainer = make_trainer(world, dataset, recipe, changes, folder)
    trainer.restore()
    losses = []
    while trainer.step < until:
        losses.append(float(trainer.take_step().loss))
    trainer.save()
    return losses


@pytest.mark.parametrize(
    ("recipe", "changes"), [("unidec", {"loss.prior": True}), ("dexml", {"loss.prior": True})], ids=str
)
def test_resumed_on_two_then_three_then_one(tmp_path, recipe, changes):
    dataset = make_world(num_train=200)
    whole = run_ranks(1, go_on, dataset, recipe, changes, tmp_path / "whole", NUM_STEPS)[0]
    losses = []
    for num_ranks, until in ((2, 11), (3, 19), (1, NUM_STEPS)):
        losses += run_ranks(num_ranks, go_on, dataset, recipe, changes, tmp_path / "parts", until)[0]
    np.testing.assert_allclose(losses, whole, rtol=1e-6)
    wanted, got = (load_checkpoint(tmp_path / name / "checkpoints") for name in ("whole", "parts"))
    assert got.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        scale = max(float(tensor.double().abs().max()), 1e-12) if tensor.numel() else 1.0
        torch.testing.assert_close(got.tensors[name], tensor, rtol=0, atol=1e-6 * scale, msg=name)


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    run_ranks(1, go_on, make_world(num_train=200), "unidec", {}, tmp_path, 2)
    with pytest.raises(ModelError, match=r"lacks rows|does not fit"):
        run_ranks(1, go_on, make_world(num_train=200, num_labels=40), "unidec", {}, tmp_path, 2)


def validated(world, dataset, predictor, folder):
    report = evaluate(predictor, dataset, ks=(1, 3, 5), num_resamples=10, processes=world)
    run = train(dataset, recipe="unidec", out=folder / str(world.size), overrides=settings("unidec"))
    return report.metrics, run.best, sorted(path.name for path in (run.path / "model" / "dexter").iterdir())


def test_evaluation_validation_and_the_published_model_on_three_ranks(world, trained, tmp_path):
    """Test queries over ranks give the report of one process; labels over ranks are searched and published as one."""
    predictor = Predictor.load(trained)
    single = run_ranks(1, validated, world, predictor, tmp_path)[0]
    for report, best, files in run_ranks(3, validated, world, predictor, tmp_path):
        assert report == single[0]
        assert files == single[2]
        for name, value in single[1].items():
            assert best[name] == pytest.approx(value, abs=3.0)
    one, three = (Predictor.load(tmp_path / name) for name in ("1", "3"))
    assert list(one.labels.ids) == list(three.labels.ids)
    texts = list(world.test.texts[:20])
    agree = [a[0].id == b[0].id for a, b in zip(one.predict(texts, 1), three.predict(texts, 1), strict=True)]
    assert np.mean(agree) > 0.8
