"""The planner against real runs on a small world."""

import json
import subprocess
import sys
import time

import pytest
import torch

import dexter
from dexter.config import load_config
from dexter.errors import UsageError
from dexter.planning import timing
from dexter.planning.plan import describe_needs, plan, plan_counts
from dexter.planning.sizes import WORD_PIECES, batch_size, shape_of, sizes_from_data, steps_per_epoch
from dexter.planning.timing import draw_sample
from dexter.training import trainer as trainer_module
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL, make_world


@pytest.fixture(scope="module")
def found(world):
    return plan(world, recipe="dexter", overrides=SMALL, clock=time.process_time)


@pytest.mark.parametrize("recipe", ["dexter", "unidec", "infonce", "dexa"])
def test_estimated_sizes_are_those_of_the_run(recipe, tmp_path):
    world = make_world(num_train=1_500, num_labels=150)
    config = resolve_presets(load_config(recipe, {**SMALL, "train.device": "cpu"}), world)
    found = sizes_from_data(world, config)
    trainer = Trainer(config, world, tmp_path)
    encoder = shape_of(trainer.encoder)
    assert found.num_queries == pytest.approx(len(trainer.train_split), rel=0.05)
    assert found.num_label_texts == len(trainer.label_tokens)
    assert found.encoder.dimension == encoder.dimension
    # Single characters are pieces too, which the estimate leaves out.
    assert found.encoder.table_rows == pytest.approx(encoder.table_rows, abs=60)
    assert found.tokens_per_query == pytest.approx(trainer.query_tokens.lengths.mean(), rel=0.1)
    assert steps_per_epoch(found, config) == trainer.steps_per_epoch


@pytest.mark.parametrize("recipe", ["dexter", "unidec", "dexa"])
def test_disk_is_what_the_run_leaves(recipe, world, tmp_path):
    settings = {
        **SMALL,
        "train.epochs": 2,
        "encoder.dimension": 128,
        "encoder.ngrams": 2,
        "encoder.ngram_buckets": 5_000,
    }
    found = plan(world, recipe=recipe, overrides=settings)
    run = dexter.train(world, recipe=recipe, out=tmp_path / "run", overrides=settings, keep_checkpoints=True)
    written = {path: path.stat().st_size for path in run.path.rglob("*") if path.is_file()}
    assert sum(term.bytes for term in found.disk) == pytest.approx(sum(written.values()), rel=0.1)
    after = sum(size for path, size in written.items() if "checkpoints" not in path.parts)
    assert found.disk_after == pytest.approx(after, rel=0.1)


def test_time_is_measured_in_parts(found):
    assert found.duration.epoch == pytest.approx(sum(term.seconds for term in found.duration.terms))
    assert found.duration.total > found.duration.epochs * found.duration.step * found.num_steps > 0
    assert found.duration.tune > 0
    assert found.duration.largest.setting


def test_real_steps_are_timed(world, monkeypatch):
    """The heads that are timed are those of the run, with its own settings: they come from `training` alone."""
    built = []

    def build(config, *arguments, **named):
        built.append(build_objective(config, *arguments, **named))
        return built[-1]

    build_objective = trainer_module.build_objective
    monkeypatch.setattr(trainer_module, "build_objective", build)
    settings = {**SMALL, "encoder.normalize": True, "head.projection": 0, "head.classifier": False}
    plan(world, recipe="dexml", overrides=settings)
    assert [objective.dual.normalize for objective in built] == [False]


@pytest.mark.parametrize("recipe", ["dexter", "unidec"])
def test_a_sample_keeps_batches_and_a_label_of_every_query(recipe, monkeypatch):
    monkeypatch.setitem(timing._SAMPLED_CHARACTERS, "static", 20_000)
    world = make_world(num_train=3_000, num_labels=150)
    config = resolve_presets(load_config(recipe, {**SMALL, "train.device": "cpu"}), world)
    sizes = sizes_from_data(world, config)
    sample = draw_sample(world, config, sizes)
    assert 300 < len(sample.train) < 1_000
    assert sample.train.relevance.getnnz(axis=1).min() > 0
    sampled = sizes_from_data(sample, config)
    assert batch_size(sampled, config) == pytest.approx(batch_size(sizes, config), rel=0.1)
    found = timing.time_run(world, config, sizes, clock=time.process_time)
    assert found.num_steps == steps_per_epoch(sizes, config)
    assert found.step > 0


def test_what_training_needs_in_one_line(world):
    said = describe_needs(world, recipe="dexter", overrides=SMALL)
    assert said.startswith("needs about ")
    assert "of memory (largest: " in said
    assert said.endswith(" of disk")


def test_planning_leaves_random_states_and_threads_alone(world):
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    plan(world, recipe="unidec", overrides={**SMALL, "batch.start": 0})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_the_report_names_the_largest_and_what_shrinks_it(found):
    text = found.render()
    assert "to shrink the largest (" in text
    assert "to shorten the largest (" in text
    assert "fits " in text
    values = json.loads(json.dumps(found.to_json()))
    assert values["fits"] is True
    assert values["memory"]["peak"] == round(found.peak_memory)
    assert values["time"]["epoch"] > 0


def test_several_processes_and_devices_are_planned_without_timing(world):
    found = plan(world, recipe="unidec", overrides=SMALL, world_size=4, gpu_memory=24)
    assert found.duration is None
    assert found.memory.separate
    assert {exchange.name for exchange in found.exchanges} >= {"queries", "query gradients", "max", "sum", "gradients"}
    assert "sent by each process in a step" in found.render()
    assert "not measured" in found.render()


def test_counts_alone_include_the_rows_of_n_grams_and_leave_out_word_pieces_without_pretraining():
    def rows(**overrides):
        settings = {f"encoder.{name}": value for name, value in overrides.items()}
        found = plan_counts(num_queries=900, num_labels=250, tokens_per_text=12, recipe="dexml", overrides=settings)
        return found.sizes.encoder.table_rows

    assert rows(ngrams=2, ngram_buckets=5_000) == rows() + 5_000
    assert rows(pretrained="none") == rows() - WORD_PIECES


def test_a_cluster_for_very_many_labels():
    found = plan_counts(
        num_queries=52_000_000,
        num_labels=450_000_000,
        tokens_per_text=8,
        recipe="unidec",
        overrides={
            "encoder.kind": "transformer",
            "encoder.pretrained": "distilbert-base-uncased",
            "encoder.dimension": 64,
            "head.projection": 64,
            "head.storage": "bfloat16",
            "batch.size": 8_192,
        },
        world_size=2,
        gpu_memory=80,
    )
    assert found.fits is False
    assert 2 < found.processes_needed < 64
    table = 450_000_000 * 64 * (2 + 4)
    assert found.memory.peak("device") > table / 2


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_labels": 0}, "validation.metric|labels"),
        ({"num_queries": 0}, "queries"),
        ({"world_size": 0}, "world-size"),
        ({"gpu_memory": 0.0}, "gpu-memory"),
        ({"overrides": {"encoder.kind": "transformer", "encoder.pretrained": "some/other"}}, "encoder.pretrained"),
    ],
)
def test_bad_input_is_a_usage_error(changed, expected):
    counts = {"num_queries": 1_000, "num_labels": 100, "tokens_per_text": 10.0, **changed}
    with pytest.raises(UsageError, match=expected):
        plan_counts(**counts)


@pytest.mark.slow
def test_memory_is_within_a_quarter_of_a_real_run(tmp_path):
    from dexter.data.formats import save_dataset

    world = make_world(num_train=4_000, num_labels=190)
    save_dataset(world, tmp_path / "data")
    settings = [f"{name}={value}" for name, value in SMALL.items()]
    options = [part for setting in settings for part in ("--set", setting)]
    code = (
        "import re, sys\nfrom pathlib import Path\nfrom dexter.cli.main import main\n"
        "try: main()\n"
        # Not ru_maxrss, which begins with the size of the process that started this one.
        "finally: print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "train", str(tmp_path / "data"), "--out", str(tmp_path / "run"), *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = 1024 * int(ended.stderr.split()[-1])
    predicted = dexter.plan(tmp_path / "data", overrides=SMALL).peak_memory
    assert predicted == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(
    ("recipe", "num_queries", "num_labels", "labels_per_query", "devices", "gib"),
    [
        ("dexml-eurlex-4k", 15_449, 3_956, 5.3, 1, 80),
        ("dexml-lf-amazontitles-1.3m", 2_248_619, 1_305_265, 22.2, 16, 80),
        ("unidec-lf-amazontitles-1.3m", 2_248_619, 1_305_265, 22.2, 1, 48),
        ("unidec-lf-wikiseealso-320k", 693_082, 312_330, 2.11, 1, 48),
    ],
)
def test_the_papers_runs_fit_the_papers_hardware(recipe, num_queries, num_labels, labels_per_query, devices, gib):
    found = plan_counts(
        num_queries=num_queries,
        num_labels=num_labels,
        tokens_per_text=128,
        tokens_per_label=14,
        labels_per_query=labels_per_query,
        recipe=recipe,
        world_size=devices,
        gpu_memory=gib,
    )
    assert found.fits
