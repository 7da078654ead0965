"""Several processes beside one: the same numbers, the bytes between them, and the speed. Gloo, on this machine.

    python bench/distributed.py                    equality of every recipe, and bytes per step
    python bench/distributed.py --speed            2 processes x 1 thread beside 1 process x 2 threads
    python bench/distributed.py --recipes dexml unidec --steps 10      a quick look

Equality: the largest difference from one process after so many steps with the same global batches, of any step's loss
and of any weight, relative to the largest entry of its tensor. In double precision it is the order of summation alone.
Bytes: what the first rank sends in a step when ranks stand in a ring, by purpose, beside what `dexter plan` foresees.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse import csr_matrix

from dexter.config import load_config
from dexter.data import Dataset, Split
from dexter.planning.plan import plan
from dexter.recipes import method_names
from dexter.training import objective, trainer
from dexter.training.distributed import ProcessGroup, joined
from dexter.training.presets import resolve_presets

QUICK: dict[str, Any] = {
    "batch.refresh": 1,
    "batch.size": 32,
    "encoder.dimension": 32,
    "encoder.pretrained": "none",
    "head.dropout": 0.0,
    "train.epochs": 4,
    "train.learning_rate": 0.02,
    "train.threads": 1,
}
SPEED = {"static": {}, "transformer": {"encoder.kind": "transformer", "encoder.max_length_query": 64}}


def make_data(num_queries: int, num_labels: int, *, num_words: int = 400, seed: int = 0) -> Dataset:
    """Labels of three words, and queries that hold the words of one to three labels among others."""
    random = np.random.default_rng(seed)
    words = np.array([f"w{chr(97 + i % 26)}{i}" for i in range(num_words)])
    texts = [" ".join(random.choice(words, 3, replace=False)) for _ in range(num_labels)]
    rows, columns, queries = [], [], []
    for row in range(num_queries):
        labels = random.choice(num_labels, random.integers(1, 4), replace=False)
        own = [word for label in labels for word in texts[label].split()]
        queries.append(" ".join(random.permutation([*own, *random.choice(words, 20)])))
        rows += [row] * len(labels)
        columns += labels.tolist()
    relevance = csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(num_queries, num_labels))
    train = Split(queries, [str(row) for row in range(num_queries)], relevance)
    return Dataset("words", texts, [str(label) for label in range(num_labels)], train, None)


def settings_of(recipe: str) -> dict[str, Any]:
    config = load_config(recipe)
    changes = dict(QUICK)
    if config.batch.order == "clustered" or config.batch.hard_negatives:
        changes["batch.start"] = 1
    if config.head.projection:
        changes["head.projection"] = 24
    if config.batch.classifier_positives:
        changes["batch.positives"] = 1
    return changes


def widened(build: Any) -> Any:
    return lambda *arguments, **more: build(*arguments, **more).double()


def take_steps(
    processes: ProcessGroup, recipe: str, changes: dict[str, Any], data: Dataset, steps: int, double: bool
) -> Any:
    """Losses, weights (the first rank has those of all labels), seconds and traffic of some steps."""
    config = resolve_presets(load_config(recipe, changes), data)
    build = widened if double else lambda build: build
    with (
        mock.patch.object(trainer, "build_encoder", build(trainer.build_encoder)),
        mock.patch.object(objective, "Objective", build(objective.Objective)),
    ):
        run = trainer.Trainer(config, data, Path(tempfile.gettempdir()), processes)
    run.take_step()
    processes.barrier()
    processes.traffic.clear()
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    losses = [float(run.take_step().loss) for _ in range(steps)]
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    traffic = {name: record.bytes / steps for name, record in processes.traffic.items()}
    calls = sum(record.calls for record in processes.traffic.values()) / steps
    weights = {f"encoder.{name}": value.cpu().numpy() for name, value in run.encoder.state_dict().items()}
    whole = trainer.whole_model(processes, run._model(), run.labels, run.text_of_label)
    if whole is not None:
        weights |= {name: value.numpy() for name, value in whole._head_state().items()}
    return {
        "losses": np.array(losses),
        "weights": weights,
        "seconds": seconds / steps,
        "processor": processor / steps,
        "traffic": traffic,
        "calls": calls,
    }


def on_ranks(size: int, *arguments: Any) -> list[Any]:
    """What `take_steps` gives on each rank of a processes of its own; this process starts no threads: it may fork."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = context.Queue()
    processes = [context.Process(target=_work, args=(rank, size, port, queue, arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    answers = dict(queue.get() for _ in processes)
    for process in processes:
        process.join()
    return [answers[rank] for rank in range(size)]


def _work(rank: int, size: int, port: int, queue: Any, arguments: tuple[Any, ...]) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    with joined() as processes:
        queue.put((rank, take_steps(processes, *arguments)))


def difference(got: Any, wanted: Any) -> tuple[float, float]:
    """Largest relative difference of losses, and of weights."""
    losses = np.abs(got["losses"] - wanted["losses"]).max() / np.abs(wanted["losses"]).max()
    weights = [
        np.abs(got["weights"][name] - value).max() / max(np.abs(value).max(), 1e-12)
        for name, value in wanted["weights"].items()
        if value.size and np.issubdtype(value.dtype, np.floating)
    ]
    return float(losses), float(max(weights))


def equality(recipes: list[str], steps: int, labels: int) -> None:
    data = make_data(400, labels)
    print(f"{steps} steps, batches of 32 queries, {labels} labels; largest relative difference from one process")
    print(
        f"{'recipe':16s}{'loss, 2 ranks':>15s}{'weights':>10s}{'loss, 3 ranks':>15s}{'weights':>10s}{'calls/step':>12s}"
    )
    for recipe in recipes:
        arguments = (recipe, settings_of(recipe), data, steps, True)
        single = on_ranks(1, *arguments)[0]
        line, first = f"{recipe:16s}", None
        for size in (2, 3):
            first = on_ranks(size, *arguments)[0]
            loss, weights = difference(first, single)
            line += f"{loss:15.1e}{weights:10.1e}"
        print(line + f"{first['calls']:12.0f}", flush=True)


def traffic(recipes: list[str]) -> None:
    data = make_data(2000, 501, num_words=3000)
    names = ("queries", "query gradients", "max", "sum", "gradients", "table gradients")
    print(
        "\nkilobytes that the first of 2 ranks sends in a step, measured / planned: "
        "batches of 32, 501 labels, dimension 32"
    )
    print(f"{'recipe':16s}" + "".join(f"{name:>18s}" for name in (*names, "all")))
    for recipe in recipes:
        found = on_ranks(2, recipe, settings_of(recipe), data, 10, False)[0]["traffic"]
        foreseen = plan(data, recipe=recipe, overrides=settings_of(recipe), world_size=2).exchanges
        planned = {exchange.name: float(exchange.sent) for exchange in foreseen}
        pairs = [(found.get(name, 0.0), planned.get(name, 0.0)) for name in names]
        pairs.append((sum(found.values()), sum(planned.values())))
        cells = "".join(f"{f'{measured / 1e3:.2f} / {expected / 1e3:.2f}':>18s}" for measured, expected in pairs)
        print(f"{recipe:16s}{cells}", flush=True)


def speed(steps: int) -> None:
    print("a step of dexml; static: 256 queries, 4,001 labels; MiniLM: 32 queries, 501 labels")
    print(f"{'encoder':14s}{'processes':>10s}{'threads':>9s}{'s/step, wall':>14s}{'s/step, processor':>19s}")
    for kind, changes in SPEED.items():
        static = kind == "static"
        data = make_data(4000, 4001 if static else 501, num_words=3000)
        more = {**changes, "batch.size": 256 if static else 32, "validation.fraction": 0.0}
        for size, threads in ((1, 2), (2, 1)):
            arguments = ("dexml", more | {"train.threads": threads}, data, steps if static else 3, False)
            found = on_ranks(size, *arguments)
            wall, processor = max(one["seconds"] for one in found), sum(one["processor"] for one in found)
            print(f"{kind:14s}{size:10d}{threads:9d}{wall:14.3f}{processor:19.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="*", default=method_names())
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--labels", type=int, default=61)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--bytes", action="store_true", help="bytes per step only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.speed:
        speed(options.steps)
        return
    if not options.bytes:
        equality(options.recipes, options.steps, options.labels)
    traffic(options.recipes)


if __name__ == "__main__":
    main()
