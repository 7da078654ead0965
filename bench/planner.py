"""What `dexter plan` predicts beside what a run needs: peak memory of the process, disk, seconds of an epoch.

    python bench/planner.py [--cases stackexchange4/dexter ...] [--pydocs FOLDER]

Every case is a process of its own with one thread. It trains for a few steps, with the refresh, a validation,
checkpoints and the tuning at the end; the memory is the largest resident size that the system recorded until then. Then
it plans between two more stretches of training, whose steps make up the measured epoch. Times are processor seconds,
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
from pathlib import Path
from typing import TYPE_CHECKING

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
    "pydocs/unidec": ("pydocs", "unidec", HARD),
    "pydocs/dexml-hnm, MiniLM": ("pydocs", "dexml-hnm", [*HARD, *MINILM]),
    "pydocs/infonce, MiniLM": ("pydocs", "infonce", MINILM),
}
WARM_STEPS, STEPS = 3, 5
REFRESH_PHASES = ("embed", "cluster", "mine")


def main() -> None:
    """Run every case, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--pydocs", type=Path, help="where pydocs is built already")
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
            name = CASES[case][0]
            data = arguments.pydocs if name == "pydocs" and arguments.pydocs else folder(name, Path(place))
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
        train(trainer, WARM_STEPS)
        memory = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refresh = sum(trainer.watch.seconds[phase] for phase in REFRESH_PHASES)
        trainer.watch.seconds.clear()
        elapsed = train(trainer, STEPS)
        predicted = predict(dataset, recipe, settings)
        elapsed += train(trainer, STEPS)
        spent = trainer.watch.seconds
        others = sum(spent[phase] for phase in ("validation", "checkpoint", "tuning", *REFRESH_PHASES))
        step = (elapsed - others) / (2 * STEPS)
        # A stretch has one validation and two checkpoints, one after the validation and one at the end.
        seconds = trainer.steps_per_epoch * step + spent["validation"] / 2 + spent["checkpoint"] / 4
        measured = {
            "memory": memory,
            "disk": float(sum(path.stat().st_size for path in out.rglob("*") if path.is_file())),
            "step": step,
            "epoch": seconds + refresh * refreshes_per_epoch(trainer.config),
            "tune": spent["tuning"] / 2,
        }
    return {"predicted": predicted, "measured": measured}


def train(trainer: Trainer, num_steps: int) -> float:
    """Take some more steps, with a validation, checkpoints and the tuning at their end; return processor seconds."""
    started = time.process_time()
    trainer.num_steps = trainer.step + num_steps
    trainer.run(keep_checkpoints=True)
    return time.process_time() - started


def predict(dataset: Dataset, recipe: str, settings: list[str]) -> dict[str, float]:
    """What the planner predicts."""
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
    """How often clusters and hard negatives are recomputed."""
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
