"""What `dexter plan` predicts beside what a run needs: peak memory of the process, disk, seconds of an epoch.

    python bench/planner.py [--cases stackexchange4/dexter ...]

Every case is a process of its own with one thread. It trains for a few steps, with the refresh, a validation,
checkpoints and the tuning at the end; the largest resident size that the system recorded until then is the memory. Then
it plans between two more stretches of training, from whose steps an epoch is put together. Times are processor seconds,
and prediction and run take turns, since the machine may not be quiet. Columns: predicted, measured, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dexter.config import Config, parse_overrides
from dexter.data import Dataset
from dexter.data.formats import load_dataset
from shared_data import locate

if TYPE_CHECKING:
    from dexter.training.trainer import Trainer

HARD = ["batch.start=0"]
"""Clusters and hard negatives from the first step, so that a short run meets them."""
MINILM = ["encoder.kind=transformer"]
CASES: dict[str, tuple[str, str, list[str]]] = {
    "stackexchange4/dexter": ("stackexchange4", "dexter", []),
    "stackexchange4/dexml": ("stackexchange4", "dexml", []),
    "stackexchange4/unidec": ("stackexchange4", "unidec", HARD),
    "debian-related/dexter": ("debian-related", "dexter", []),
    "debian-related/unidec": ("debian-related", "unidec", HARD),
    "npm-deps/dexter": ("npm-deps", "dexter", []),
    "npm-deps/dexml-hnm": ("npm-deps", "dexml-hnm", HARD),
    "delicious-bow/dexml": ("delicious-bow", "dexml", []),
    "pydocs/dexter": ("pydocs", "dexter", []),
    "pydocs/dexml-hnm, MiniLM": ("pydocs", "dexml-hnm", [*HARD, *MINILM]),
    "pydocs/infonce, MiniLM": ("pydocs", "infonce", MINILM),
}
WARM_STEPS, STEPS = 3, 5


def main() -> None:
    """Run every case, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _, recipe, settings = CASES[arguments.cases[0]]
        print(json.dumps(compare(arguments.child, recipe, settings)))
        return
    print("| | memory MB | | ratio | disk MB | | ratio | s/step | | s/epoch | | ratio | s to tune | |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for case in arguments.cases:
            data = folder(CASES[case][0], Path(place))
            answer = output([__file__, "--child", str(data), "--cases", case])
            print(row(case, **json.loads(answer.splitlines()[-1])), flush=True)


def row(case: str, predicted: dict[str, float], measured: dict[str, float]) -> str:
    """One line of the table."""
    cells = [case]
    for name, scale, digits in (("memory", 1e6, 0), ("disk", 1e6, 0), ("step", 1, 3), ("epoch", 1, 1), ("tune", 1, 1)):
        cells += [f"{values[name] / scale:,.{digits}f}" for values in (predicted, measured)]
        if name not in ("step", "tune"):
            cells.append(f"{predicted[name] / measured[name]:.2f}")
    return f"| {' | '.join(cells)} |"


def compare(data: Path, recipe: str, settings: list[str]) -> dict[str, dict[str, float]]:
    """Train a little, plan, and train a little more."""
    from dexter.training.run import open_run
    from dexter.training.trainer import Trainer

    dataset = load_dataset(data)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        trainer = Trainer(open_run(out, dataset, recipe, overrides(settings), resume=False), dataset, out)
        watch = Stopwatch(trainer)
        watch.train(WARM_STEPS)
        memory = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refresh = watch.seconds["_refresh"]
        watch.forget()
        watch.train(STEPS)
        predicted = predict(dataset, recipe, settings)
        watch.train(STEPS)
        step = watch.seconds["take_step"] / (2 * STEPS)
        apart = sum(watch.seconds[name] for name in ("take_step", "save", "_tune"))
        validation = (watch.seconds["run"] - apart) / 2
        checkpoint = watch.seconds["save"] / watch.calls["save"]
        seconds = trainer.steps_per_epoch * step + validation + checkpoint
        measured = {
            "memory": memory,
            "disk": float(sum(path.stat().st_size for path in out.rglob("*") if path.is_file())),
            "step": step,
            "epoch": seconds + refresh * refreshes_per_epoch(trainer.config),
            "tune": watch.seconds["_tune"] / 2,
        }
    return {"predicted": predicted, "measured": measured}


class Stopwatch:
    """Processor seconds that a trainer spends in its parts."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.forget()
        for name in ("run", "save", "take_step", "_refresh", "_tune"):
            setattr(trainer, name, self._timed(name, getattr(trainer, name)))

    def forget(self) -> None:
        """Start from zero."""
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def train(self, num_steps: int) -> None:
        """Some more steps, with a validation and checkpoints at their end."""
        self.trainer.num_steps = self.trainer.step + num_steps
        self.trainer.run()

    def _timed(self, name: str, work: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            started = time.process_time()
            result = work()
            self.seconds[name] += time.process_time() - started  # type: ignore[assignment]
            self.calls[name] += 1
            return result

        return timed


def predict(dataset: Dataset, recipe: str, settings: list[str]) -> dict[str, float]:
    """What the planner says."""
    from dexter.planning.plan import plan

    found = plan(dataset, recipe=recipe, overrides=overrides(settings), clock=time.process_time)
    assert found.duration is not None
    return {
        "memory": found.peak_memory,
        "disk": sum(term.bytes for term in found.disk),
        "step": found.duration.step,
        "epoch": found.duration.epoch,
        "tune": found.duration.tune,
    }


def refreshes_per_epoch(config: Config) -> float:
    """How often clusters and hard negatives are made anew."""
    if config.batch.order != "clustered" and not config.batch.hard_negatives:
        return 0.0
    return math.ceil((config.train.epochs - config.batch.start) / config.batch.refresh) / config.train.epochs


def overrides(settings: list[str]) -> dict[str, object]:
    """The settings of a case, with one thread."""
    return parse_overrides([*settings, "train.threads=1"])


def folder(name: str, place: Path) -> Path:
    """A shared data set; pydocs is built, in a process of its own, since that imports whatever it documents."""
    if name != "pydocs":
        return locate(name)
    if not (place / name).exists():
        output(["-m", "dexter", "data", "build", name, "--out", str(place / name)])
    return place / name


def output(arguments: list[str]) -> str:
    """What a Python process prints."""
    return subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    main()
