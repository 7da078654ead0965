"""Half precision inside the encoder: near float32, exact under gradient caching, scaled, skipped, resumed, agreed on.

Tests that take a `device` run on the CPU and, by `make test-gpu`, on a CUDA device.
"""

import functools
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch

import dexter
from dexter.batches import Positives
from dexter.config import load_config
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import DivergedError, Interrupted, UsageError
from dexter.losses import decoupled_softmax
from dexter.training import precision as precision_module
from dexter.training import trainer as trainer_module
from dexter.training.checkpoint import load_checkpoint
from dexter.training.distributed import ProcessGroup
from dexter.training.gradcache import EncoderInput, backward
from dexter.training.precision import GradientScaler, autocast, check_precision, tf32_products
from dexter.training.presets import resolve_presets
from tests.conftest import make_world
from tests.training.ranks import run_ranks
from tests.training.test_trainer import assert_same_weights, stop_after
from tests.training.test_transformer_runs import SETTINGS as TRANSFORMER_SETTINGS

HALF = ("bfloat16", "float16")
BOUNDS = {"float32": 1e-5, "bfloat16": 0.03, "float16": 0.004}
"""Largest error of the gradient of a weight matrix, relative to its norm, against float32."""
POSITIVES = Positives([0, 1, 1, 4, 6], [0, 3, 10, 2, 9])


def random_texts(count, seed):
    words = [f"w{number}" for number in range(30)]
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(words, size=random.integers(1, 9))) for _ in range(count)]


class Setup:
    """A small transformer with seven queries and eleven labels."""

    def __init__(self, device, *, dropout=0.0, packed=None):
        texts = random_texts(7, 0), random_texts(11, 1)
        self.device = device
        self.encoder = TransformerEncoder.random([*texts[0], *texts[1]], hidden_size=32, dropout=dropout).to(device)
        self.encoder.train()
        self.encoder.packed = packed
        for layer in self.encoder.model.modules():
            if isinstance(layer, torch.nn.Linear):
                # As large as trained ones: with the starting weights nearly all passes by the layers.
                layer.weight.data.mul_(5)
        self.tokens = [self.encoder.tokenize(part, side="query") for part in texts]

    def encode(self, tokens, rows, precision):
        ids, offsets = tokens.select(rows)
        ids, offsets = (torch.from_numpy(np.array(part, dtype=np.int64)).to(self.device) for part in (ids, offsets))
        with autocast(precision, self.device):
            return self.encoder(ids, offsets)

    def plain(self, precision, size=100):
        """The gradients of one backward pass through the graph of all micro-batches."""
        vectors = []
        for tokens in self.tokens:
            parts = cut(len(tokens), size)
            encoded = torch.cat([self.encode(tokens, rows, precision) for rows in parts])
            vectors.append(encoded[torch.from_numpy(np.argsort(np.concatenate(parts))).to(self.device)])
        self.loss(*vectors).backward()
        return self.take_gradients()

    def cached(self, precision, size, scale=1.0):
        inputs = [
            EncoderInput(
                encode=lambda rows, tokens=tokens: self.encode(tokens, rows, precision),
                micro_batches=cut(len(tokens), size),
            )
            for tokens in self.tokens
        ]
        result = backward(self.loss, *inputs, scale=scale)
        assert all(part.dtype == torch.float32 for part in (result.loss, *result.gradients))
        return self.take_gradients()

    def loss(self, queries, labels):
        assert queries.dtype == labels.dtype == torch.float32
        return decoupled_softmax(queries, labels, POSITIVES, temperature=0.1)

    def take_gradients(self):
        gradients = {
            name: parameter.grad for name, parameter in self.encoder.named_parameters() if parameter.grad is not None
        }
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        self.encoder.zero_grad(set_to_none=True)
        return gradients


def cut(num_rows, size):
    order = np.random.default_rng(0).permutation(num_rows)
    return [order[start : start + size] for start in range(0, num_rows, size)]


def relative_error(got, expected):
    """The largest error of the gradient of a matrix, relative to its norm."""
    assert got.keys() == expected.keys()
    matrices = [name for name, gradient in expected.items() if gradient.ndim > 1]
    return max(float((got[name] - expected[name]).norm() / expected[name].norm()) for name in matrices)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("precision", HALF)
def test_gradients_are_near_those_of_float32(device, precision, packed, record_property):
    setup = Setup(device, packed=packed)
    error = relative_error(setup.plain(precision), setup.plain("float32"))
    record_property("relative error", error)
    assert 0 < error < BOUNDS[precision]


@pytest.mark.parametrize("size", [1, 3, 4, 100])
@pytest.mark.parametrize("precision", ["float32", *HALF])
def test_cached_equals_plain_in_every_precision(device, precision, size, record_property):
    """Dropout on, and micro-batches that do not divide: the same numbers, but for the order of float32 sums."""
    setup = Setup(device, dropout=0.3)
    torch.manual_seed(3)
    expected = setup.plain(precision, size)
    torch.manual_seed(3)
    error = relative_error(setup.cached(precision, size), expected)
    record_property("relative error", error)
    assert error < 1e-5


def test_a_scale_that_is_undone_changes_no_bit_in_float32(device):
    setup = Setup(device)
    expected, scaled = setup.cached("float32", 3), setup.cached("float32", 3, scale=2.0**10)
    for name, gradient in expected.items():
        assert torch.equal(scaled[name] / 2.0**10, gradient), name


def test_scaling_saves_small_gradients_in_float16(device):
    """A loss that is 1e-6 times as large: unscaled, most of its gradient vanishes in float16."""
    setup = Setup(device)
    setup.loss = lambda queries, labels: 1e-6 * decoupled_softmax(queries, labels, POSITIVES, temperature=0.1)
    expected = setup.cached("float32", 3)
    scaled = {name: gradient / 2.0**16 for name, gradient in setup.cached("float16", 3, scale=2.0**16).items()}
    assert relative_error(setup.cached("float16", 3), expected) > 0.1
    assert relative_error(scaled, expected) < 0.01


def test_the_scale_falls_with_an_overflow_and_grows_with_good_steps():
    scaler, parameter = GradientScaler(8.0, steps_to_growth=3), torch.nn.Parameter(torch.ones(3))
    unused = torch.nn.Parameter(torch.ones(2))

    def step(value):
        parameter.grad = torch.tensor([8.0, 16.0, value])
        return scaler.unscale([parameter, unused], ProcessGroup())

    assert step(24.0)
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    for value in (float("inf"), float("nan"), -float("inf")):
        assert not step(value)
    assert (scaler.scale, scaler.good_steps) == (1.0, 0)
    assert step(1.0) and step(1.0)
    restored = GradientScaler(steps_to_growth=3)
    restored.load_state(scaler.state())
    assert restored.state() == {"scale": 1.0, "good_steps": 2}
    assert step(1.0)
    assert (scaler.scale, scaler.good_steps) == (2.0, 0)


def test_an_overflow_at_every_scale_is_divergence():
    scaler, parameter = GradientScaler(2.0**-15), torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([float("inf")])
    assert not scaler.unscale([parameter], ProcessGroup())
    with pytest.raises(DivergedError, match="bfloat16"):
        scaler.unscale([parameter], ProcessGroup())


def test_tf32_is_for_cuda_only_and_restored():
    def now():
        return torch.backends.cuda.matmul.fp32_precision

    before = now()
    for precision in ("tf32", *HALF):
        with tf32_products(precision, "cpu"):
            assert now() == before
        with suppress(KeyError), tf32_products(precision, "cuda:0"):
            assert now() == "tf32"
            raise KeyError
        assert now() == before
    with tf32_products("float32", "cuda"):
        assert now() == before


def test_a_precision_that_the_device_lacks_is_refused_in_one_line(monkeypatch):
    for precision in ("float32", "tf32", *HALF):
        check_precision(precision, "cpu")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    with pytest.raises(UsageError, match=r"float16.*'cpu'.*set train\.precision=float32") as caught:
        check_precision("float16", "cpu")
    assert "\n" not in str(caught.value)
    check_precision("tf32", "cpu")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activation_checkpointing_gives_the_same_gradients(device, precision, packed):
    """Dropout on: what is computed again must draw the same numbers, within gradient caching and without."""
    gradients = []
    for checkpointed in (False, True):
        setup = Setup(device, dropout=0.3, packed=packed)
        if checkpointed:
            setup.encoder.checkpoint_activations()
        for function in (setup.plain, setup.cached):
            torch.manual_seed(5)
            gradients.append((function(precision, 4), torch.get_rng_state()))
    for got, state in gradients[2:]:
        assert relative_error(got, gradients[0][0]) < 1e-6
        assert torch.equal(state, gradients[0][1])


@pytest.mark.slow(minutes=4)
@pytest.mark.timeout(1_200)
def test_a_compiled_encoder_gives_the_same_gradients_and_replays_dropout(device, record_property):
    setup = Setup(device, packed=False)
    expected, before = setup.plain("float32"), torch.get_rng_state()
    setup.encoder.compile_model()
    assert torch.equal(torch.get_rng_state(), before)
    error = relative_error(setup.cached("float32", 3), expected)
    record_property("relative error", error)
    assert error < 1e-5
    setup = Setup(device, dropout=0.3)
    setup.encoder.compile_model()
    torch.manual_seed(3)
    expected = setup.plain("float32", 3)
    torch.manual_seed(3)
    assert relative_error(setup.cached("float32", 3), expected) < 1e-5


def test_what_cannot_be_compiled_or_computed_again_is_one_clear_line(monkeypatch):
    encoder = Setup("cpu").encoder
    monkeypatch.setattr(encoder.model, "compile", lambda **_: None)
    monkeypatch.setattr(encoder.model, "forward", lambda **_: 1 / 0)
    with pytest.raises(UsageError, match=r"train\.compile.*division by zero.*set train\.compile=false"):
        encoder.compile_model()
    monkeypatch.setattr(type(encoder.model), "supports_gradient_checkpointing", False)
    with pytest.raises(UsageError, match=r"BertModel.*set train\.activation_checkpointing=false"):
        encoder.checkpoint_activations()


# ---------------------------------------------------------------------------------------------------- whole runs

SETTINGS = TRANSFORMER_SETTINGS | {"train.epochs": 2}


@pytest.fixture(scope="module")
def small_world():
    return make_world(num_train=160, num_labels=19)


@pytest.fixture(scope="module")
def pretrained(small_world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    texts = [*small_world.train.texts, *small_world.label_texts]
    TransformerEncoder.random(texts, num_layers=1, hidden_size=32).save(folder)
    return str(folder)


def settings(pretrained, device="cpu", precision="float16", **changes):
    own = {"encoder.pretrained": pretrained, "train.device": device, "train.precision": precision}
    return {**SETTINGS, **own, **changes}


def make_trainer(world, dataset, overrides, folder):
    config = resolve_presets(
        load_config("unidec", {"head.projection": 16, "loss.average": "mean", **overrides}), dataset
    )
    return trainer_module.Trainer(config, dataset, folder, world)


def weights_of(trainer):
    """Everything an update changes: weights and optimiser states, all in float32 (counts of steps aside)."""
    found = {f"encoder.{name}": value for name, value in trainer.encoder.state_dict().items()}
    found |= {f"objective.{name}": value for name, value in trainer.objective.state_dict().items()}
    for by_label in (False, True):
        found |= {f"state.{name}": value for name, value in trainer.optimizers.state(by_label=by_label).items()}
    assert all(value.dtype == torch.float32 for value in found.values() if value.is_floating_point())
    return {name: value.detach().cpu().clone() for name, value in found.items()}


def test_an_overflow_skips_the_whole_update_and_training_recovers(small_world, pretrained, device, tmp_path):
    trainer = make_trainer(None, small_world, settings(pretrained, device), tmp_path)
    trainer.take_step()
    before, scale = weights_of(trainer), trainer.scaler.scale
    trainer.scaler.scale = 2.0**45
    result = trainer.take_step()
    assert torch.isfinite(result.loss)
    after = weights_of(trainer)
    assert trainer.step == 2
    assert trainer.scaler.scale == 2.0**44
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    for _ in range(40):
        trainer.take_step()
        if any(not torch.equal(value, after[name]) for name, value in weights_of(trainer).items()):
            break
    assert scale / 64 < trainer.scaler.scale < 2.0**44
    assert all(bool(value.isfinite().all()) for value in weights_of(trainer).values())


@pytest.mark.parametrize("precision", HALF)
def test_a_run_learns_in_half_precision(small_world, pretrained, device, tmp_path, precision):
    overrides = settings(pretrained, device, precision, **{"train.epochs": 12})
    run = dexter.train(small_world, recipe="dexml", out=tmp_path / "run", overrides=overrides)
    assert dexter.evaluate(run.path, small_world, ks=(1, 3), num_resamples=0).metrics["P@1"] > 50


def test_tf32_is_float32_on_a_cpu(small_world, pretrained, tmp_path):
    """On a CUDA device the two differ by rounding; without half precision nothing is scaled."""
    results = []
    for precision in ("float32", "tf32"):
        trainer = make_trainer(None, small_world, settings(pretrained, precision=precision), tmp_path)
        results.append((trainer.take_step().loss, weights_of(trainer)))
        assert trainer.scaler is None
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


@pytest.mark.parametrize("precision", HALF)
def test_a_run_resumes_bit_for_bit(small_world, pretrained, device, tmp_path, monkeypatch, precision):
    """The scale changes often: it falls in the first steps, and doubles after every third good one."""
    overrides = settings(pretrained, device, precision)
    eager = functools.partial(GradientScaler, 2.0**32, steps_to_growth=3)

    def train(name, stop=0, **more):
        monkeypatch.setattr(trainer_module, "GradientScaler", eager)
        if stop:
            stop_after(monkeypatch, stop)
        with pytest.raises(Interrupted) if stop else nullcontext():
            dexter.train(small_world, recipe="dexml", out=tmp_path / name, keep_checkpoints=True, **more)
        monkeypatch.undo()

    train("whole", overrides=overrides)
    train("parts", stop=4, overrides=overrides)
    train("parts", stop=7, resume=True)
    train("parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (load_checkpoint(tmp_path / name / "checkpoints").values for name in ("whole", "parts"))
    assert whole.get("scaler") == parts.get("scaler")
    assert ("scaler" in whole) == (precision == "float16")


def skip_together(world, dataset, overrides, folder, when):
    """Take three steps; in the second the gradient of the last rank overflows, before or after ranks sum theirs."""
    trainer = make_trainer(world, dataset, overrides, folder)

    def poison():
        if trainer.step == 1 and world.rank == world.size - 1:
            next(trainer.encoder.parameters()).grad.view(-1)[0] = float("inf")

    def poisoned(function):
        def wrapped(*arguments, **more):
            if function is add_gradients and when == "before":
                poison()
            result = function(*arguments, **more)
            if function is add_gradients and when == "after":
                poison()
            return result

        return wrapped

    add_gradients = trainer_module.add_gradients
    trainer_module.add_gradients = poisoned(add_gradients)
    history = []
    try:
        for _ in range(3):
            trainer.take_step()
            weights = weights_of(trainer)
            shared = [float(value.double().sum()) for name, value in sorted(weights.items()) if name[:3] == "enc"]
            history.append((trainer.scaler.scale, trainer.scaler.good_steps, shared))
    finally:
        trainer_module.add_gradients = add_gradients
    return history


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_processes_skip_the_same_step(small_world, pretrained, tmp_path, when):
    overrides = settings(pretrained, **{"encoder.dropout": 0.0})
    first, second = run_ranks(2, skip_together, small_world, overrides, tmp_path, when)
    assert first == second
    scales = [scale for scale, _, _ in first]
    assert scales == [2.0**16, 2.0**15, 2.0**15]
    assert first[1][2] == first[0][2]
    assert first[2][2] != first[1][2]


def test_divergence_of_the_loss_is_not_an_overflow(small_world, pretrained, tmp_path, monkeypatch):
    trainer = make_trainer(None, small_world, settings(pretrained), tmp_path)

    def poisoned(*arguments, **more):
        result = backward(*arguments, **more)
        result.loss.fill_(float("nan"))
        return result

    monkeypatch.setattr(trainer_module, "backward", poisoned)
    with pytest.raises(DivergedError, match="loss or its gradient"):
        trainer.take_step()


@pytest.mark.parametrize(("probe", "works"), [("import os; os.kill(os.getpid(), 4)", False), ("pass", True)])
def test_a_cpu_on_which_bfloat16_ends_the_process_is_told_before(monkeypatch, probe, works):
    precision_module._has_bfloat16_products.cache_clear()
    monkeypatch.setattr(precision_module, "_PROBE", probe)
    with nullcontext() if works else pytest.raises(UsageError, match="ONEDNN_MAX_CPU_ISA"):
        check_precision("bfloat16", "cpu")
    precision_module._has_bfloat16_products.cache_clear()
