"""A run names where its time went and how many positives its pools hold; phases add up, also over errors."""

import json
import logging
import time

import numpy as np
import pytest

from dexter.batches.sampler import Sampler
from dexter.config import load_config
from dexter.training.log import Stopwatch
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_phases_are_summed():
    watch = Stopwatch()
    for _ in range(3):
        with watch("work"):
            burn(0.01)
    with pytest.raises(ValueError), watch("failing"):  # noqa: PT012
        burn(0.01)
        raise ValueError
    assert watch.seconds["work"] >= 0.03
    assert watch.seconds["failing"] >= 0.01
    assert set(watch.seconds) == {"work", "failing"}


def test_the_phases_of_a_run_are_its_steps_and_refreshes(world, tmp_path):
    changes = {"head.projection": 16, "batch.start": 1, "batch.refresh": 1}
    trainer = Trainer(resolve_presets(load_config("unidec", SMALL | changes), world), world, tmp_path)
    started = time.process_time()
    trainer.run()
    spent = time.process_time() - started
    steps, refreshes = {"batch", "encode", "loss", "backward", "update"}, {"embed", "cluster", "mine"}
    assert set(trainer.watch.seconds) == steps | refreshes | {"validation", "checkpoint", "tuning"}
    assert 0.2 * spent < sum(trainer.watch.seconds.values()) < spent


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("dexml", {}), ("unidec", {"head.projection": 16, "batch.start": 1, "batch.refresh": 1, "batch.cap": 40})],
)
def test_positives_per_query_and_pool_sizes_equal_a_slow_count(world, tmp_path, monkeypatch, caplog, recipe, changes):
    pools = []
    pool_of = Sampler.pool

    def remembering(self, rows, step):
        pools.append((rows, pool := pool_of(self, rows, step)))
        return pool

    monkeypatch.setattr(Sampler, "pool", remembering)
    trainer = Trainer(resolve_presets(load_config(recipe, SMALL | changes), world), world, tmp_path)
    with caplog.at_level(logging.INFO, logger="dexter"):
        trainer.run()
    relevant = trainer.train_split.relevance.toarray() != 0
    counts = []
    for rows, pool in pools:
        labels = range(world.num_labels) if pool.labels is None else pool.labels
        counts.append((len(rows), len(labels), sum(relevant[row, label] for row in rows for label in labels)))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    assert steps
    for record in steps:
        num_queries, num_labels, num_positives = counts[record["step"] - 1]
        assert record["pool_labels"] == num_labels
        assert record["positives_per_query"] == pytest.approx(num_positives / num_queries)
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert [record["epoch"] for record in epochs] == [1, 2]
    for record, part in zip(epochs, np.split(np.array(counts), 2), strict=True):
        queries, labels, positives = part.sum(axis=0)
        assert record["positives_per_query"] == pytest.approx(positives / queries)
        assert record["pool_labels"] == pytest.approx(labels / len(part))
        assert f"{positives / queries:.2f} positives in the pool per query" in caplog.text
