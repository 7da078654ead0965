"""`kill -9` at random moments of training: resumed until it ends, it gives the weights of a run that nobody touched."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from dexter.files import verify_manifest
from tests.conftest import scaled
from tests.training.test_trainer import assert_same_weights

CHECKPOINT_STEPS = 5
TRAINING = f"""
import os, signal, sys
import dexter, scipy.optimize, torch._dynamo
from dexter.training import trainer
from tests.conftest import SMALL, make_world

world = make_world()
over = {{**SMALL, "train.epochs": 6, "train.checkpoint_steps": {CHECKPOINT_STEPS}, "encoder.token_dropout": 0.1}}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
for line in sys.stdin:
    run, seconds = line.split()
    child = os.fork()  # once imported, torch need not be imported again for each kill
    if child == 0:
        dexter.train(world, recipe="dexml", out=run, overrides=over, resume=True, keep_checkpoints=True)
        os._exit(0)
    if signal.sigtimedwait([signal.SIGCHLD], float(seconds)) is None:
        os.kill(child, signal.SIGKILL)
        signal.sigwait([signal.SIGCHLD])
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Trains in the run folder of each line, in a process that is killed after the seconds given; prints how it ended."""


@pytest.fixture
def trainings():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", TRAINING], env=environment, **pipes)

    def train(run, kill_after=600.0):
        """Train or resume; return how the process ended."""
        print(run, kill_after, file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield train
    process.stdin.close()
    process.wait(60)


def last_steps(run):
    """The last step in the log of a run, and in its checkpoints, all of which are whole."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    for path in checkpoints:
        verify_manifest(path)
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines()[:-1] if log.exists() else []  # the last may be cut
    logged = max((json.loads(line)["step"] for line in lines), default=0)
    return logged, int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1_800)
def test_killed_at_random_moments_and_resumed(trainings, tmp_path, record_property):
    assert trainings(tmp_path / "whole") == 0
    started = time.monotonic()
    assert trainings(tmp_path / "timed") == 0
    seconds = time.monotonic() - started
    generator, num_runs, kills, saved = random.Random(0), 0, 0, 0
    while kills < scaled(200):
        run = tmp_path / f"killed-{num_runs}"
        ended = trainings(run, kill_after=generator.uniform(0.0, 1.2 * seconds))
        if ended == signal.SIGKILL:
            kills += 1
            logged, newest = last_steps(run)
            assert newest >= saved and logged - newest <= CHECKPOINT_STEPS
            saved = newest
        else:
            assert ended == 0
            assert_same_weights(tmp_path / "whole", run)
            num_runs, saved = num_runs + 1, 0
    assert trainings(run) == 0
    assert_same_weights(tmp_path / "whole", run)
    record_property("runs", num_runs + 1)
