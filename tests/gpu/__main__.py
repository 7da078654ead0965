"""`make test-gpu`: run every test marked `cuda` and write one report; without a CUDA device, say so and succeed.

    python -m tests.gpu [REPORT.json] [pytest's own arguments]

The report has the devices, the versions, and for each test its outcome, its seconds and what it measured.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

DEFAULT_REPORT = Path("gpu-report.json")
_PACKAGES = ("torch", "transformers", "numpy", "safetensors")


class Recorder:
    """Collects the outcome of each test and the properties that it recorded."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "measured": {}})
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        entry["measured"] = dict(report.user_properties)
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
            entry["reason"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext

    def to_json(self) -> dict[str, Any]:
        outcomes = [entry["outcome"] for entry in self.tests.values()]
        return {
            "made": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in _PACKAGES},
            "cuda": torch.version.cuda,
            "devices": describe_devices(),
            "counts": {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")},
            "tests": self.tests,
        }


def describe_devices() -> list[dict[str, Any]]:
    """Name, memory in GiB and compute capability of each CUDA device."""
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        {"name": device.name, "GiB": round(device.total_memory / 2**30, 1), "capability": [device.major, device.minor]}
        for device in found
    ]


def main(arguments: list[str], *, selection: str = "cuda") -> int:
    """Run the selected tests, write the report, and return the exit code."""
    if selection == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__})")
        return 0
    report = Path(arguments.pop(0)) if arguments and arguments[0].endswith(".json") else DEFAULT_REPORT
    recorder = Recorder()
    code = int(pytest.main(["-m", selection, "-p", "no:cacheprovider", *arguments], plugins=[recorder]))
    report.write_text(json.dumps(recorder.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{report}: {recorder.to_json()['counts']}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
