"""Quality and cost on a data set: our recipes beside omikuji and TF-IDF nearest neighbours, in one run.

    python -m venv /tmp/omikuji && /tmp/omikuji/bin/pip install omikuji
    python bench/quality.py stackexchange4 --recipes dexter dexml --threads 1 --omikuji /tmp/omikuji/bin/python
    python bench/quality.py debian-related --recipes dexml dexml-hnm supconde unidec --set train.epochs=8

A recipe has a row for each of its heads without neighbours, and one as it predicts by itself: head, neighbours and dial
chosen on validation. omikuji (Parabel: 3 trees, its default settings, beam 10) gets unigram TF-IDF vectors and runs in
an interpreter of its own; without one its row is left out. *train* is everything from texts to a model (TF-IDF vectors
and tokens included), *predict* everything from test texts to 100 labels each. CPU seconds hold on a machine that is not
quiet, wall seconds do not. Filter pairs, own labels of the test queries among them where the first recipe leaves these
out, are removed from the predictions of every method.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

import shared_data
from dexter.config import load_config, parse_overrides
from dexter.data import Dataset, Split
from dexter.data.own_labels import find_own_labels
from dexter.evaluation.baselines import TfidfNeighbours
from dexter.metrics import overfetch, remove_filtered, score
from dexter.predict.predictor import Predictor
from dexter.training import train

NUM_PLACES = 100
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")
OMIKUJI = """
import json, sys, time
import omikuji
train_path, test_path, out_path, places, threads = sys.argv[1:]
clocks = [(time.process_time(), time.perf_counter())]
model = omikuji.Model.train_on_data(train_path, omikuji.Model.default_hyper_param(), int(threads))
clocks.append((time.process_time(), time.perf_counter()))
model.init_prediction_thread_pool(int(threads))
predicted = []
for line in open(test_path):
    pairs = [(int(feature), float(value)) for feature, value in (pair.split(":") for pair in line.split())]
    predicted.append([label for label, _ in model.predict(pairs, top_k=int(places))] if pairs else [])
clocks.append((time.process_time(), time.perf_counter()))
json.dump({"clocks": clocks, "predicted": predicted}, open(out_path, "w"))
"""
"""What the other interpreter runs."""


@dataclass(frozen=True)
class Time:
    """Seconds of the processor and of the wall."""

    cpu: float
    wall: float

    @classmethod
    def now(cls) -> Time:
        """Read the clocks."""
        return cls(time.process_time(), time.perf_counter())

    def __sub__(self, other: Time) -> Time:
        return Time(self.cpu - other.cpu, self.wall - other.wall)

    def __add__(self, other: Time) -> Time:
        return Time(self.cpu + other.cpu, self.wall + other.wall)


@dataclass(frozen=True)
class Row:
    """One method: its best labels of every test query, and what they cost."""

    top_ids: NDArray[np.int64]
    predict: Time
    train: Time


def run_recipe(
    dataset: Dataset, test: Split, recipe: str, *, threads: int, settings: Mapping[str, Any]
) -> Iterator[tuple[str, Row]]:
    """Train a recipe once, and yield a row for each of its heads and one as it predicts by itself."""
    overrides = {"train.threads": threads, **settings}
    with tempfile.TemporaryDirectory() as folder:
        start = Time.now()
        finished = train(dataset, recipe=recipe, out=Path(folder) / "run", overrides=overrides)
        trained = Time.now() - start
        chosen = Predictor.load(finished.path)
        for head in chosen.model.heads:
            plain = chosen.variant(chosen.choose(head=head, neighbours=False))
            yield f"{recipe} {head}", Row(*ask(plain, test), train=trained)
        yield recipe, Row(*ask(chosen, test), train=trained)


def ask(predictor: Predictor, test: Split) -> tuple[NDArray[np.int64], Time]:
    """Return the best labels of the test queries, and the time to find them."""
    start = Time.now()
    return predictor.top(test.texts, num_places(test)).ids, Time.now() - start


def num_places(test: Split) -> int:
    """Return how many labels of each query are wanted, so that `NUM_PLACES` are left without filter pairs."""
    return NUM_PLACES + overfetch(test.filtered)


def run_neighbours(dataset: Dataset, test: Split) -> Row:
    """Run TF-IDF nearest neighbours."""
    start = Time.now()
    model = TfidfNeighbours.fit(dataset.train.texts, dataset.train.relevance)
    trained = Time.now()
    top_ids = model.predict(test.texts, num_places(test)).ids
    return Row(top_ids, predict=Time.now() - trained, train=trained - start)


def run_omikuji(dataset: Dataset, test: Split, interpreter: str, *, threads: int) -> Row | None:
    """Run omikuji in another interpreter; None where it is not installed there."""
    if subprocess.run([interpreter, "-c", "import omikuji"], capture_output=True, check=False).returncode:
        print(f"omikuji: left out, {interpreter} has no omikuji (pip install it anywhere, pass --omikuji PYTHON)")
        return None
    start = Time.now()
    train_vectors, test_vectors = tfidf(dataset.train.texts, test.texts)
    vectorized = Time.now() - start
    with tempfile.TemporaryDirectory() as folder:
        train_path, test_path, out_path = (Path(folder) / name for name in ("train.txt", "test.txt", "out.json"))
        write_svmlight(train_path, train_vectors, dataset.train.relevance)
        test_path.write_text("".join(f"{features(test_vectors, row)}\n" for row in range(len(test))))
        arguments = [str(train_path), str(test_path), str(out_path), str(num_places(test)), str(threads)]
        # It logs to stdout, and its progress bars have a line per example on stderr.
        command = [interpreter, "-c", OMIKUJI, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        results = json.loads(out_path.read_text())
    begun, trained, ended = (Time(*clock) for clock in results["clocks"])
    top_ids = np.full((len(test), num_places(test)), -1, dtype=np.int64)
    for row, labels in enumerate(results["predicted"]):
        top_ids[row, : len(labels)] = labels
    # Vectors of train and test are made in one go; the training row carries them.
    return Row(top_ids, predict=ended - trained, train=trained - begun + vectorized)


def tfidf(train_texts: Sequence[str], test_texts: Sequence[str]) -> tuple[csr_matrix, csr_matrix]:
    """Return unigram TF-IDF vectors of unit length."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer: Any = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    return vectorizer.fit_transform(train_texts), vectorizer.transform(test_texts)


def write_svmlight(path: Path, vectors: csr_matrix, relevance: csr_matrix) -> None:
    """Write the file omikuji trains on: a header, then the labels and features of one query per line.

    Queries without a feature are left out: omikuji refuses such lines, and there is nothing to learn from them.
    """
    rows = np.flatnonzero(np.diff(vectors.indptr))
    with path.open("w") as file:
        file.write(f"{len(rows)} {vectors.shape[1]} {relevance.shape[1]}\n")
        for row in rows.tolist():
            labels = relevance.indices[relevance.indptr[row] : relevance.indptr[row + 1]]
            file.write(f"{','.join(map(str, labels))} {features(vectors, row)}\n")


def features(vectors: csr_matrix, row: int) -> str:
    """Return a row's features as text, in ascending order."""
    part = slice(vectors.indptr[row], vectors.indptr[row + 1])
    order = np.argsort(vectors.indices[part])
    pairs = zip(vectors.indices[part][order], vectors.data[part][order], strict=True)
    return " ".join(f"{column}:{value:.6g}" for column, value in pairs)


def print_row(name: str, row: Row, dataset: Dataset, test: Split) -> None:
    """Print a line of the table."""
    kept = remove_filtered(row.top_ids, np.zeros(row.top_ids.shape), test.filtered, NUM_PLACES).ids
    metrics = score(kept, test.relevance, dataset.train.relevance, ks=(1, 3, 5, 10, 100))
    per_query = 1e3 / len(test)
    print(
        f"{name:26s}"
        + "".join(f"{metrics[column]:8.2f}" for column in COLUMNS)
        + f"{row.train.cpu:11.1f}{row.train.wall:8.1f}{row.predict.cpu * per_query:14.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="stackexchange4", help="the data set's name")
    parser.add_argument("--recipes", nargs="*", default=["dexter", "dexml"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every recipe")
    parser.add_argument("--omikuji", default=sys.executable, metavar="PYTHON", help="an interpreter that has omikuji")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    settings = parse_overrides(arguments.set)
    dataset = shared_data.load(arguments.data)
    own_labels = find_own_labels(dataset, load_config(arguments.recipes[0], settings).data.own_labels)
    if own_labels.excludes:
        print(f"{own_labels.describe()}; filter pairs are removed from the predictions of every method")
    test = own_labels.filter_test(dataset).test
    assert test is not None
    print(
        f"{arguments.data}: {len(dataset.train):,} training and {len(test):,} test queries, "
        f"{dataset.num_labels:,} labels, {arguments.threads} threads"
    )
    print(f"{'':26s}{''.join(f'{c:>8s}' for c in COLUMNS)}{'train CPU':>11s}{'wall s':>8s}{'CPU ms/query':>14s}")
    for recipe in arguments.recipes:
        for name, row in run_recipe(dataset, test, recipe, threads=arguments.threads, settings=settings):
            print_row(name, row, dataset, test)
    peer = run_omikuji(dataset, test, arguments.omikuji, threads=arguments.threads)
    if peer is not None:
        print_row("omikuji", peer, dataset, test)
    print_row("TF-IDF kNN", run_neighbours(dataset, test), dataset, test)


if __name__ == "__main__":
    main()
