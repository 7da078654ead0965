"""Quality and cost on a data set: our recipes beside omikuji, PECOS, linear SVMs and TF-IDF neighbours, in one run.

    python -m venv /tmp/omikuji && /tmp/omikuji/bin/pip install omikuji
    python bench/quality.py stackexchange4 --recipes dexter dexml --threads 1 --omikuji /tmp/omikuji/bin/python
    python bench/quality.py debian-related --recipes dexml dexml-hnm supconde unidec --set train.epochs=8
    python bench/quality.py npm-deps --recipes dexter --seeds 3 --work /tmp/quality --pecos /tmp/pecos/bin/python

A recipe has a row for each of its heads without neighbours, and one as it predicts by itself: head, neighbours and dial
chosen on validation. omikuji (Parabel: 3 trees, its default settings, beam 10), PECOS XR-Linear (default settings, beam
10) and one linear SVM per label (`--svm`, C = 1) get unigram TF-IDF vectors; the first two run in interpreters of their
own, and without one their rows are left out. PECOS 1.2 wants numpy below 2, and of its dependencies XR-Linear needs
only these: pip install "numpy<2" "scipy<1.14" scikit-learn psutil setuptools, then pip install --no-deps
libpecos==1.2.8.

With `--seeds N` whatever draws random numbers runs N times (omikuji draws a seed of its own), rows are means over the
seeds with their largest distance from it, and the differences of the first recipe to every peer are printed with 95%
intervals: a paired bootstrap over test queries of the mean over seeds. With `--work FOLDER` finished rows are kept
there, and a run that was stopped goes on from them; a folder holds rows of one set of settings. *train* is everything
from texts to a model (TF-IDF vectors and tokens included), *predict* everything from test texts to 100 labels each. CPU
seconds hold on a machine that is not quiet, wall seconds do not. Filter pairs, own labels of the test queries among
them where the first recipe leaves these out, are removed from the predictions of every method.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import save_npz

import shared_data
from dexter.config import load_config, parse_overrides
from dexter.data import Dataset, Split
from dexter.data.own_labels import find_own_labels
from dexter.evaluation import omikuji
from dexter.evaluation.baselines import TfidfNeighbours
from dexter.evaluation.intervals import paired_bootstrap
from dexter.metrics import Ratio, inverse_propensity, overfetch, per_query, remove_filtered, score
from dexter.predict.predictor import Predictor
from dexter.training import train
from dexter.types import HEAD_NAMES

NUM_PLACES = 100
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")
PECOS = """
import json, sys, time
import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel
from scipy.sparse import load_npz
folder, out_path, places, threads, seed = sys.argv[1:]
X, Y, X_test = (load_npz(f"{folder}/{name}.npz").astype(np.float32).tocsr() for name in ("train", "labels", "test"))
clocks = [(time.process_time(), time.perf_counter())]
tree = Indexer.gen(LabelEmbeddingFactory.create(Y, X), seed=int(seed), threads=int(threads))
model = XLinearModel.train(X, Y, C=tree, threads=int(threads))
clocks.append((time.process_time(), time.perf_counter()))
scores = model.predict(X_test, only_topk=int(places), threads=int(threads))
predicted = []
for row in range(scores.shape[0]):
    part = slice(scores.indptr[row], scores.indptr[row + 1])
    order = np.argsort(-scores.data[part], kind="stable")
    predicted.append(list(zip(scores.indices[part][order].tolist(), scores.data[part][order].tolist())))
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


def run_omikuji(dataset: Dataset, test: Split, interpreter: str, *, threads: int) -> Row:
    """Run omikuji in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        train_path, test_path = (Path(folder) / name for name in ("train.txt", "test.txt"))
        start = Time.now()
        train_vectors, test_vectors = omikuji.tfidf(dataset.train.texts, test.texts)
        vectorized = Time.now() - start
        omikuji.write_svmlight(train_path, train_vectors, dataset.train.relevance)
        test_path.write_text("".join(f"{omikuji.features(test_vectors, row)}\n" for row in range(len(test))))
        # It logs to stdout, and its progress bars have a line per example on stderr.
        return run_elsewhere(interpreter, omikuji.SCRIPT, [train_path, test_path], test, vectorized, [str(threads)])


def run_pecos(dataset: Dataset, test: Split, interpreter: str, *, threads: int, seed: int) -> Row:
    """Run PECOS XR-Linear in another interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        start = Time.now()
        train_vectors, test_vectors = omikuji.tfidf(dataset.train.texts, test.texts)
        vectorized = Time.now() - start
        for name, matrix in (("train", train_vectors), ("labels", dataset.train.relevance), ("test", test_vectors)):
            save_npz(Path(folder) / f"{name}.npz", matrix, compressed=False)
        return run_elsewhere(interpreter, PECOS, [Path(folder)], test, vectorized, [str(threads), str(seed)])


def run_elsewhere(
    interpreter: str, code: str, inputs: Sequence[Path], test: Split, vectorized: Time, options: Sequence[str]
) -> Row:
    """Run code that trains and predicts in another interpreter.

    Vectors of train and test are made in one go beforehand; the training time carries them.
    """
    with tempfile.TemporaryDirectory() as folder:
        out_path = Path(folder) / "out.json"
        arguments = [*map(str, inputs), str(out_path), str(num_places(test)), *options]
        command = [interpreter, "-c", code, *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        results = json.loads(out_path.read_text())
    begun, trained, ended = (Time(*clock) for clock in results["clocks"])
    top_ids = np.full((len(test), num_places(test)), -1, dtype=np.int64)
    for row, pairs in enumerate(results["predicted"]):
        top_ids[row, : len(pairs)] = [label for label, _ in pairs]
    return Row(top_ids, predict=ended - trained, train=trained - begun + vectorized)


def run_svm(dataset: Dataset, test: Split) -> Row:
    """Train one linear SVM per label."""
    from sklearn.svm import LinearSVC

    start = Time.now()
    train_vectors, test_vectors = omikuji.tfidf(dataset.train.texts, test.texts)
    relevance = dataset.train.relevance.tocsc()
    scores = np.full((len(test), dataset.num_labels), -np.inf, dtype=np.float32)
    predicting = Time(0.0, 0.0)
    for label in np.flatnonzero(np.diff(relevance.indptr)).tolist():
        positive = np.zeros(len(dataset.train), dtype=np.int64)
        positive[relevance.indices[relevance.indptr[label] : relevance.indptr[label + 1]]] = 1
        if positive.all():
            scores[:, label] = np.inf
            continue
        model = LinearSVC(C=1.0).fit(train_vectors, positive)
        fitted = Time.now()
        scores[:, label] = model.decision_function(test_vectors)
        predicting += Time.now() - fitted
    trained = Time.now() - start - predicting
    top_ids = np.argsort(-scores, axis=1, kind="stable")[:, : num_places(test)]
    return Row(top_ids, predict=predicting, train=trained)


class Results:
    """Rows by method and seed, kept in a folder where there is one so that a stopped run goes on."""

    def __init__(self, dataset: Dataset, test: Split, folder: Path | None) -> None:
        self.test, self.folder = test, folder
        self.train_relevance = dataset.train.relevance
        self.inverse_propensity = inverse_propensity(self.train_relevance)
        self.rows: dict[str, dict[int, Row]] = {}

    def has(self, name: str, seed: int) -> bool:
        """Whether a row is there; reads it from the folder."""
        path = self._path(name, seed)
        if path is not None and path.exists():
            with np.load(path) as file:
                times = file["times"]
                self.rows.setdefault(name, {})[seed] = Row(file["top_ids"], Time(*times[0]), Time(*times[1]))
        return seed in self.rows.get(name, {})

    def add(self, name: str, seed: int, row: Row) -> None:
        """Keep a row."""
        self.rows.setdefault(name, {})[seed] = row
        path = self._path(name, seed)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial.npz")
            times = [(time.cpu, time.wall) for time in (row.predict, row.train)]
            np.savez(partial, top_ids=row.top_ids.astype(np.int32), times=np.array(times))
            os.replace(partial, path)

    def _path(self, name: str, seed: int) -> Path | None:
        return self.folder and self.folder / f"{name.replace(' ', '_')}-{seed}.npz"

    def metrics(self, name: str) -> dict[str, list[float]]:
        """Return each column of a method, one value per seed."""
        scores = [
            score(self._kept(row), self.test.relevance, self.train_relevance, ks=(1, 3, 5, 10, 100))
            for row in self.rows[name].values()
        ]
        return {column: [values[column] for values in scores] for column in COLUMNS}

    def ratios(self, name: str) -> dict[str, Ratio]:
        """Return the metrics per query, as means over the seeds."""
        seeds = [
            per_query(self._kept(row), self.test.relevance, self.inverse_propensity) for row in self.rows[name].values()
        ]
        return {
            column: Ratio(np.mean([seed[column].numerator for seed in seeds], axis=0), seeds[0][column].denominator)
            for column in COLUMNS[:6]
        }

    def _kept(self, row: Row) -> NDArray[np.int64]:
        return remove_filtered(row.top_ids, np.zeros(row.top_ids.shape), self.test.filtered, NUM_PLACES).ids

    def print_row(self, name: str) -> None:
        """Print a line of the table, and the seeds' largest distance from it where there are several."""
        rows, metrics = list(self.rows[name].values()), self.metrics(name)
        train_cpu, train_wall = (np.mean([getattr(row.train, clock) for row in rows]) for clock in ("cpu", "wall"))
        predict_cpu = 1e3 * np.mean([row.predict.cpu for row in rows]) / len(self.test)
        means = {column: float(np.mean(values)) for column, values in metrics.items()}
        print(
            f"{name:26s}"
            + "".join(f"{means[column]:8.2f}" for column in COLUMNS)
            + f"{train_cpu:11.1f}{train_wall:8.1f}{predict_cpu:14.2f}",
            flush=True,
        )
        if len(rows) > 1:
            spread = {column: max(abs(value - means[column]) for value in metrics[column]) for column in COLUMNS}
            print(f"{f'  {len(rows)} seeds, +-':26s}" + "".join(f"{spread[column]:8.2f}" for column in COLUMNS))

    def print_differences(self, ours: str, peers: Sequence[str]) -> None:
        """Print what a method is ahead of others, with 95% intervals, and the ratio of training times."""
        mine = self.ratios(ours)
        for peer in peers:
            differences = paired_bootstrap(self.ratios(peer), mine)
            cells = [f"{name} {d.value:+.2f} [{d.low:+.2f}, {d.high:+.2f}]" for name, d in differences.items()]
            cost = np.mean([row.train.cpu for row in self.rows[ours].values()])
            cost /= np.mean([row.train.cpu for row in self.rows[peer].values()])
            print(f"{ours} - {peer}: " + ", ".join(cells) + f"; training time x {cost:.2f}")


def has_package(interpreter: str, package: str) -> bool:
    """Whether an interpreter has a package; says so where not."""
    if subprocess.run([interpreter, "-c", f"import {package}"], capture_output=True, check=False).returncode:
        print(f"{package}: left out, {interpreter} does not have it (see --help)")
        return False
    return True


def run_methods(dataset: Dataset, test: Split, arguments: argparse.Namespace, settings: Mapping[str, Any]) -> Results:
    """Run every method that is asked for, and print a line for each."""
    results = Results(dataset, test, arguments.work and arguments.work / dataset_name(arguments.data))
    seeds, threads = range(arguments.seeds), arguments.threads
    for recipe in arguments.recipes:
        for seed in seeds:
            for head in HEAD_NAMES:
                results.has(f"{recipe} {head}", seed)
            if not results.has(recipe, seed):
                chosen = {"seed": seed, **settings} if arguments.seeds > 1 else settings
                for name, row in run_recipe(dataset, test, recipe, threads=threads, settings=chosen):
                    results.add(name, seed, row)
        for name in [name for name in results.rows if name.split()[0] == recipe]:
            results.print_row(name)
    peers: dict[str, tuple[range, Callable[[int], Row]]] = {}
    if has_package(arguments.omikuji, "omikuji"):
        peers["omikuji"] = seeds, lambda seed: run_omikuji(dataset, test, arguments.omikuji, threads=threads)
    if has_package(arguments.pecos, "pecos"):
        peers["PECOS XR-Linear"] = (
            seeds,
            lambda seed: run_pecos(dataset, test, arguments.pecos, threads=threads, seed=seed),
        )
    if arguments.svm:
        peers["linear SVMs"] = range(1), lambda seed: run_svm(dataset, test)
    peers["TF-IDF kNN"] = range(1), lambda seed: run_neighbours(dataset, test)
    for name, (its_seeds, run) in peers.items():
        for seed in its_seeds:
            if not results.has(name, seed):
                results.add(name, seed, run(seed))
        results.print_row(name)
    results.print_differences(arguments.recipes[0], list(peers))
    return results


def dataset_name(data: str) -> str:
    """Return the last part of a data set's path, or its name."""
    return Path(data).name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="stackexchange4", help="the name of a shared data set, or a path")
    parser.add_argument("--recipes", nargs="+", default=["dexter", "dexml"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every recipe")
    parser.add_argument("--seeds", type=int, default=1, help="how often whatever draws random numbers runs")
    parser.add_argument("--omikuji", default=sys.executable, metavar="PYTHON", help="an interpreter that has omikuji")
    parser.add_argument("--pecos", default=sys.executable, metavar="PYTHON", help="an interpreter that has libpecos")
    parser.add_argument("--svm", action="store_true", help="also one linear SVM per label, where labels are few")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep finished rows here, and go on from them")
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
        f"{dataset_name(arguments.data)}: {len(dataset.train):,} training and {len(test):,} test queries, "
        f"{dataset.num_labels:,} labels, {arguments.threads} threads"
    )
    print(f"{'':26s}{''.join(f'{c:>8s}' for c in COLUMNS)}{'train CPU':>11s}{'wall s':>8s}{'CPU ms/query':>14s}")
    run_methods(dataset, test, arguments, settings)


if __name__ == "__main__":
    main()
