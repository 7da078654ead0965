"""Where a UniDEC run spends its time and its memory: phases of a step, cost of a refresh, memory by number of labels.

    python bench/step_breakdown.py --threads 1                               # all parts, some minutes of one core
    python bench/step_breakdown.py --only steps --data shared/data/debian-related --set batch.size=512
    python bench/step_breakdown.py --only memory --labels 10000 100000 1000000

*steps*: the recipe `unidec` with clusters and hard negatives from the first epoch. Processor milliseconds per step of
making the batch (queries, pool, positives), of encoding, of the loss with its gradient, of the backward pass through
the encoder, of the update; then processor seconds per refresh of embedding queries and labels, clustering and mining.
MiniLM trains on few queries.

*memory*: generated data (labels of three words, queries that name two labels), a process of its own per row, from texts
to a published model. *peak* is the largest resident size, *above* what importing torch and an empty model take. A step
touches few rows of the classifier table, so its time must not grow with the number of labels.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

import shared_data
from dexter.config import load_config, parse_overrides
from dexter.data import Dataset, Split
from dexter.data.sources import build
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer

STEP_PHASES = ("batch", "encode", "loss", "backward", "update")
REFRESH_PHASES = ("embed", "cluster", "mine")
EVERY_EPOCH = {"batch.start": 0, "batch.refresh": 1, "validation.fraction": 0.0, "train.epochs": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "static": {},
    "MiniLM": {"encoder.kind": "transformer", "encoder.max_length_query": 32, "train.epochs": 1},
}
MINILM_QUERIES = 128
SYNTHETIC_WORDS, SYNTHETIC_QUERIES = 20_000, 2_048


def make_trainer(dataset: Dataset, folder: Path, overrides: Mapping[str, Any]) -> Trainer:
    """A trainer of the recipe `unidec`, before its first step."""
    return Trainer(resolve_presets(load_config("unidec", overrides), dataset), dataset, folder)


def load(data: str, num_queries: int) -> Dataset:
    """Return `pydocs`, built on this machine, or a shared data set; so many training queries, or all if 0."""
    dataset = build("pydocs") if data == "pydocs" else shared_data.load(data)
    rows = np.random.default_rng(0).permutation(len(dataset.train))[: num_queries or None]
    return replace(dataset, train=dataset.train.select(np.sort(rows)))


def bench_steps(arguments: argparse.Namespace) -> None:
    """Print the phases of steps and refreshes for each encoder."""
    for encoder, settings in ENCODERS.items():
        num_queries = MINILM_QUERIES if encoder == "MiniLM" else arguments.queries
        dataset = load(arguments.data, num_queries)
        chosen = {"train.threads": arguments.threads} | parse_overrides(arguments.set)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(dataset, Path(folder), EVERY_EPOCH | settings | chosen)
            trainer.run()
        print(f"\n{dataset.name}, {encoder}: {len(dataset.train):,} queries, {dataset.num_labels:,} labels")
        _print_phases(trainer)


def _print_phases(trainer: Trainer) -> None:
    seconds, num_steps = trainer.watch.seconds, trainer.num_steps
    step = sum(seconds[phase] for phase in STEP_PHASES)
    queries_per_step = len(trainer.train_split) / trainer.steps_per_epoch
    print(f"  step, mean of {num_steps} with {queries_per_step:.0f} queries: {1000 * step / num_steps:.2f} CPU ms")
    for phase in STEP_PHASES:
        print(f"    {phase:10s}{1000 * seconds[phase] / num_steps:9.2f} ms {100 * seconds[phase] / step:6.1f}%")
    num_refreshes = trainer.config.train.epochs
    print(f"  refresh, mean of {num_refreshes}:")
    for phase in REFRESH_PHASES:
        print(f"    {phase:10s}{seconds[phase] / num_refreshes:9.2f} s")


def synthetic(num_labels: int) -> Dataset:
    """Labels of three words each, and queries that name two labels."""
    random = np.random.default_rng(0)
    words = np.array([f"w{number}" for number in range(SYNTHETIC_WORDS)])
    label_texts = [" ".join(chosen) for chosen in words[random.integers(0, SYNTHETIC_WORDS, (num_labels, 3))]]
    labels = random.integers(0, num_labels, (SYNTHETIC_QUERIES, 2))
    texts = [" ".join(label_texts[label] for label in pair) for pair in labels]
    offsets = np.arange(0, labels.size + 1, 2)
    ones = np.ones(labels.size, dtype=np.float32)
    relevance = csr_matrix((ones, labels.ravel(), offsets), shape=(SYNTHETIC_QUERIES, num_labels))
    queries = Split(texts, [str(number) for number in range(SYNTHETIC_QUERIES)], relevance)
    return Dataset("synthetic", label_texts, [str(number) for number in range(num_labels)], queries)


def measure_memory(num_labels: int, storage: str, *, dimension: int, threads: int) -> dict[str, float]:
    """Peak megabytes before and after a run in this process, and milliseconds per step."""
    before = _peak_megabytes()
    sizes = {"encoder.pretrained": "none", "encoder.dimension": dimension, "head.projection": dimension}
    settings = EVERY_EPOCH | sizes | {"head.storage": storage, "batch.size": 256, "train.threads": threads}
    dataset = synthetic(num_labels)
    texts = _peak_megabytes()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(dataset, Path(folder), settings)
        trainer.run()
    milliseconds = 1000 * sum(trainer.watch.seconds[phase] for phase in STEP_PHASES) / trainer.num_steps
    return {"before": before, "texts": texts, "peak": _peak_megabytes(), "step": milliseconds}


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def bench_memory(arguments: argparse.Namespace) -> None:
    """Print a row per number of labels and storage, each measured in a process of its own."""
    dimension = arguments.dimension
    print(f"\ngenerated data, {SYNTHETIC_QUERIES:,} queries, {dimension} dimensions; megabytes")
    print(f"{'labels':>10s}  {'table':9s}{'texts':>8s}{'peak':>8s}{'bytes/label':>13s}{'ms/step':>9s}")
    for num_labels in arguments.labels:
        for storage in ("float32", "bfloat16"):
            command = [sys.executable, __file__, "--one", str(num_labels), storage, "--dimension", str(dimension)]
            command += ["--threads", str(arguments.threads)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            per_label = 2**20 * (found["peak"] - found["before"]) / num_labels
            print(
                f"{num_labels:10,d}  {storage:9s}{found['texts'] - found['before']:8.0f}"
                f"{found['peak'] - found['before']:8.0f}{per_label:13,.0f}{found['step']:9.1f}",
                flush=True,
            )


PARTS = {"steps": bench_steps, "memory": bench_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--data", default="pydocs", help="pydocs, or the path of a data set")
    parser.add_argument("--queries", type=int, default=0, help="training queries of the static runs; 0: all")
    parser.add_argument("--labels", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dimension", type=int, default=128, help="of the encoder and the heads, for memory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the timed runs")
    parser.add_argument("--one", nargs=2, metavar=("LABELS", "STORAGE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    if arguments.one:
        num_labels, storage = int(arguments.one[0]), arguments.one[1]
        found = measure_memory(num_labels, storage, dimension=arguments.dimension, threads=arguments.threads)
        print(json.dumps(found))
        return
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments)


if __name__ == "__main__":
    main()
