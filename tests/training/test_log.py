"""Phases add up, also over errors, and a run names where its time went."""

import time

import pytest

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
