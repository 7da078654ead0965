"""What is decided from the data: the pool, the metric, and refusals of what the data cannot serve."""

import dataclasses

import pytest

from dexter.config import load_config
from dexter.errors import UsageError
from dexter.training.presets import resolve_presets
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
