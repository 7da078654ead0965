"""What is decided from the data: the pool, the metric, and refusals of what the data cannot serve."""

import dataclasses

import pytest

from dexter.config import load_config
from dexter.errors import UsageError
from dexter.training.presets import resolve_counts, resolve_presets
from tests.conftest import make_world


def with_labels(num_labels):
    world = make_world()
    missing = num_labels - world.num_labels
    texts = [*world.label_texts, *(f"another {number}" for number in range(missing))]
    ids = [*world.label_ids, *(f"another-{number}" for number in range(missing))]
    splits = {}
    for name in ("train", "test"):
        split = getattr(world, name)
        relevance = split.relevance.copy()
        relevance.resize((relevance.shape[0], num_labels))
        splits[name] = dataclasses.replace(split, relevance=relevance, filtered=None)
    return dataclasses.replace(world, label_texts=texts, label_ids=ids, **splits)


def test_few_labels_are_all_in_the_pool():
    batch = resolve_presets(load_config("dexter"), make_world()).batch
    assert batch.pool == "all" and not batch.correct_pool


def test_many_labels_are_sampled_and_corrected():
    batch = resolve_presets(load_config("dexter"), with_labels(8_193)).batch
    assert batch.pool == "in-batch" and batch.correct_pool and batch.random_labels > 0


@pytest.mark.parametrize(
    ("num_queries", "size", "epochs"),
    [
        (1, 32, 4),
        (300, 32, 4),
        (1_000, 64, 4),
        (3_000, 128, 4),
        (10_000, 256, 2),
        (33_437, 512, 2),
        (612_123, 1_024, 2),
    ],
)
def test_few_queries_get_small_batches_and_more_epochs(num_queries, size, epochs):
    config = resolve_counts(load_config("dexter"), num_queries=num_queries, num_labels=2_000)
    assert (config.batch.size, config.train.epochs) == (size, epochs)


@pytest.mark.parametrize(
    ("num_queries", "num_labels", "random_labels"),
    [
        (1_000, 1_024, 0),  # all: 16 per query of a batch of 64
        (1_000, 1_025, 384),
        (10_000, 4_097, 768),
        (33_437, 8_192, 0),  # all: 16 per query of a batch of 512
        (33_437, 8_193, 768),
        (612_123, 8_192, 0),
        (612_123, 8_193, 768),
    ],
)
def test_the_sample_of_labels_grows_with_the_batch(num_queries, num_labels, random_labels):
    batch = resolve_counts(load_config("dexter"), num_queries=num_queries, num_labels=num_labels).batch
    assert (batch.pool, batch.random_labels) == ("in-batch" if random_labels else "all", random_labels)


def test_a_run_whose_epochs_are_chosen_is_validated_at_its_end_only():
    chosen, named = (
        resolve_counts(load_config("dexter", settings), num_queries=1_000, num_labels=2_000)
        for settings in ({}, {"train.epochs": 4})
    )
    assert chosen.train.epochs == named.train.epochs
    assert (chosen.validation.every_epochs, named.validation.every_epochs) == (4.0, 1.0)


def test_what_was_set_is_kept():
    settings = {"batch.size": 100, "batch.random_labels": 50, "train.epochs": 7}
    config = resolve_counts(load_config("dexter", settings), num_queries=1_000, num_labels=2_000)
    assert (config.batch.size, config.batch.random_labels, config.train.epochs) == (100, 50, 7)


@pytest.mark.parametrize(("num_queries", "size"), [(1_000, 32), (10_000, 128), (33_437, 512), (137_648, 1_024)])
def test_a_recipe_with_a_named_pool_has_64_steps_per_epoch_and_its_own_epochs(num_queries, size):
    config = load_config("dexml")
    resolved = resolve_counts(config, num_queries=num_queries, num_labels=2_000)
    assert (resolved.batch.size, resolved.train.epochs) == (size, config.train.epochs)


def test_a_loss_without_correction_gets_none():
    config = load_config("dexter", {"loss.name": "bce"})
    batch = resolve_presets(config, with_labels(8_193)).batch
    assert batch.pool == "in-batch" and not batch.correct_pool


def test_a_pool_that_was_named_stays():
    assert resolve_presets(load_config("dexml"), with_labels(8_193)).batch.pool == "all"


def test_the_metric_looks_at_five_places():
    assert resolve_presets(load_config("dexter"), make_world()).validation.metric == "nDCG@5"


def test_a_metric_with_more_places_than_labels_is_refused():
    world = make_world()
    config = load_config("dexter", {"validation.metric": f"P@{world.num_labels + 1}"})
    with pytest.raises(UsageError, match="needs more labels"):
        resolve_presets(config, world)


@pytest.mark.parametrize(("kind", "factor"), [("static", 0.2), ("transformer", 2.0)])
def test_heads_learn_slower_than_a_static_table_and_faster_than_a_transformer(kind, factor):
    config = load_config("unidec", {"encoder.kind": kind})
    chosen = resolve_counts(config, num_queries=5_000, num_labels=50).train
    assert chosen.head_learning_rate == pytest.approx(factor * chosen.learning_rate)


def test_threads_follow_omp_num_threads_unless_torchrun_set_it(monkeypatch):
    def threads(**settings):
        return resolve_counts(load_config("dexter"), num_queries=1_000, num_labels=2_000, **settings).train.threads

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = threads()
    monkeypatch.setattr("dexter.training.presets.num_cores", lambda: 8)
    assert threads() == 8 >= cores
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads() == 3
    assert threads(num_processes=2) == 8
    for wrong in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", wrong)
        assert threads() == 8
