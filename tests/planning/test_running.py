"""What a run says of itself."""

import logging

import dexter
from dexter.planning.running import Pace
from tests.conftest import SMALL


def test_the_pace_is_said_once_after_the_first_steps():
    now = iter([10.0, 10.0 + 5 * 2.0])
    pace = Pace(first_step=100, num_steps=200, steps_per_epoch=50, clock=lambda: next(now))
    lines = [pace.after_step(step) for step in range(101, 201)]
    assert [step for step, line in enumerate(lines, start=101) if line] == [107]
    assert lines[6] == "about 2 s per step: 1.67 min per epoch, 3.1 min to go (validation comes on top)"


def test_a_run_of_a_few_steps_says_nothing_of_time():
    pace = Pace(first_step=0, num_steps=4, steps_per_epoch=4)
    assert not any(pace.after_step(step) for step in range(1, 5))


def test_training_prints_what_it_needs(world, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="dexter"):
        dexter.train(world, recipe="dexter", out=tmp_path / "run", overrides=SMALL)
    said = [record.getMessage() for record in caplog.records]
    assert any("needs about" in line and "of memory (largest: " in line and "of disk" in line for line in said)
    assert any("per epoch" in line for line in said)
