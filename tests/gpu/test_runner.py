"""`make test-gpu`: says that there is no device, or writes one report; every test on a GPU has a twin on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_succeeds(tmp_path, capsys):
    assert main([str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out == f"no CUDA device (torch {torch.__version__})\n"
    assert not list(tmp_path.iterdir())


def test_the_report_has_outcomes_and_measurements(tmp_path):
    """Run on the CPU twins of one module: the report is the same but for the device."""
    report = tmp_path / "report.json"
    code = f"""
import sys
from tests.gpu.__main__ import main
test = "tests/losses/test_against_double_loop.py"
sys.exit(main([{str(report)!r}, test, "-k", "test_on_the_device and cpu and psl", "-q"], selection="not slow"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(report.read_text())
    assert written["counts"] == {"passed": 3, "failed": 0, "skipped": 0}
    assert written["versions"]["torch"] == torch.__version__
    assert len(written["devices"]) == torch.cuda.device_count()
    for entry in written["tests"].values():
        assert max(entry["measured"]["errors of value, dq, dy"]) < 1e-5


def test_every_test_on_a_gpu_has_a_twin_on_the_cpu():
    """Only the fixture `device` carries the mark, and it always has both devices."""
    modules = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    marked = [path for path in modules if "mark.cuda" in path.read_text()]
    assert marked == [ROOT / "tests" / "conftest.py"]
    assert marked[0].read_text().count('params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]') == 1
    takers = {path.name for path in modules if "(device, " in path.read_text() or ", device" in path.read_text()}
    assert {"test_precision.py", "test_step.py", "test_against_double_loop.py"} <= takers
