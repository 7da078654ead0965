"""One text at a time: cold start, latency by labels and neighbours, batch throughput of finished runs, as records.

    OMP_NUM_THREADS=1 python bench/latency.py runs/stackexchange4 runs/debian-related --out latency.jsonl

Processor milliseconds of one thread, texts are training queries without some of their words. "one pass" is what a text
cost before: every label and training query scored in float32. Both are measured in turns of 20 texts, since one pass
empties the cache. A cold start has compiled modules, as an installed package has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dexter.index import search
from dexter.predict.predictor import Predictor

BATCH, TURN = 512, 20


def cold_start(run: Path, text: str) -> float:
    """Return the least processor seconds of three calls of `dexter predict`, after one that compiles its modules."""
    seconds = []
    with tempfile.TemporaryDirectory() as compiled:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-m", "dexter", "predict", str(run), text]
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True, env=environment)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def one_pass(predictor: Predictor, text: str) -> None:
    """Score every label and training query, as a search without an index does."""
    model, choice = predictor.model, predictor.choice
    representations_ND = model.encode_queries([text])
    search(model.search_vectors(representations_ND, head=choice.head, dial=choice.dial), predictor.index.vectors_LD, 20)
    if choice.votes is not None and model.training_queries is not None:
        search(representations_ND, model.training_queries.index.vectors_LD, choice.votes.neighbours)


def measure(run: Path, num_texts: int) -> dict[str, Any]:
    """Measure one run."""
    predictor, generator = Predictor.load(run), np.random.default_rng(0)
    kept = predictor.model.training_queries
    texts = predictor.sample_training_texts(num_texts) or list(predictor.labels.texts[:num_texts])
    texts = [" ".join(word for word in text.split() if generator.random() < 0.6) for text in texts]
    for text in texts[:40]:
        predictor.predict([text])
    calls = {"one text": lambda text: predictor.predict([text]), "one pass": lambda text: one_pass(predictor, text)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for start in range(0, len(texts), TURN):
        for name, call in calls.items():
            for text in texts[start : start + TURN]:
                started = time.process_time()
                call(text)
                times[name].append(1e3 * (time.process_time() - started))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    many = (texts * BATCH)[:BATCH]
    started = time.process_time()
    predictor.predict(many)
    seconds = time.process_time() - started
    return {
        "run": run.name,
        "labels": len(predictor.labels.ids),
        "dimensions": predictor.index.vectors_LD.shape[1],
        "neighbours": 0 if kept is None or not predictor.choice.uses_neighbours else len(kept),
        "cold_start_s": round(cold_start(run, texts[0]), 3),
        **{
            f"{name.replace(' ', '_')}_{point}_ms": round(float(np.percentile(values, percent)), 3)
            for name, values in times.items()
            for point, percent in (("p50", 50), ("p99", 99))
        },
        "batch_texts_per_s": round(BATCH / seconds),
        "resident_mb": resident,
        "files_mb": sum(path.stat().st_size for path in (run / "model").rglob("*") if path.is_file()) // 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--out", type=Path, help="append the records here, one JSON object per line")
    arguments = parser.parse_args()
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set OMP_NUM_THREADS=1: it is read when NumPy is imported"
    for run in arguments.runs:
        record = measure(run, arguments.texts)
        print(json.dumps(record))
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
