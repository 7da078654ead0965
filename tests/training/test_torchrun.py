"""The launcher: `torchrun` trains, restarts what died, and hears of what hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dexter.training.checkpoint import load_checkpoint
from tests.training.ranks import free_port

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow(minutes=1), pytest.mark.timeout(600)]


def torchrun(*arguments, restarts=0, ranks=2, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(free_port()), "--max-restarts", str(restarts), "--monitor-interval", "0.2"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"} | environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


def stricken(out, what, step, **settings):
    return torchrun(ROOT / "tests/training/stricken_rank.py", out, what, step, **settings)


def assert_same_state(first, second):
    first, second = (load_checkpoint(path / "checkpoints") for path in (first, second))
    assert first.step == second.step
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name


def test_a_killed_rank_is_restarted_and_nothing_is_lost(tmp_path):
    result = stricken(tmp_path / "whole", "NONE", 0)
    assert result.returncode == 0, result.stderr
    result = stricken(tmp_path / "killed", "KILL", 13, restarts=2)
    assert result.returncode == 0, result.stderr
    assert_same_state(tmp_path / "whole", tmp_path / "killed")
    print(result.stderr)


def test_a_hung_rank_is_named_and_the_run_goes_on(tmp_path):
    result = stricken(tmp_path / "whole", "NONE", 0)
    result = stricken(tmp_path / "hung", "STOP", 13, restarts=1, DEXTER_HUNG_SECONDS="4")
    assert "rank 1 gave no sign of life" in result.stderr, result.stderr
    assert result.returncode == 0, result.stderr
    assert_same_state(tmp_path / "whole", tmp_path / "hung")


def test_a_restart_never_goes_on_with_another_run(tmp_path):
    """The folder of another run is refused on every attempt."""
    assert stricken(tmp_path / "run", "NONE", 0).returncode == 0
    before = load_checkpoint(tmp_path / "run" / "checkpoints").step
    result = stricken(tmp_path / "run", "NONE", 0, restarts=1)
    assert result.returncode != 0
    assert "is not empty" in result.stderr
    assert load_checkpoint(tmp_path / "run" / "checkpoints").step == before
