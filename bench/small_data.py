"""Small data: what the votes of training queries and words give, by how much better they must be on validation.

    python bench/small_data.py --threads 1
    python bench/small_data.py --data npm-deps --sizes 2000 --seeds 1     a quick look

Of each data set a random sample of the training queries is taken, with the labels that these have and up to 4,000 test
queries that have one of them. The recipe `dexter` is trained once a seed, and chooses its ranking anew for each number
of standard errors that a choice must be better by than the model as trained. Rows are means over samples and seeds, of
metrics on the test queries.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import shared_data
from dexter.data import Dataset, Split
from dexter.data.own_labels import find_own_labels
from dexter.index import ExactIndex
from dexter.metrics import score
from dexter.model.model import Model
from dexter.predict.rank import RankingChoice
from dexter.predict.windows import encode_texts, rank_texts
from dexter.training import train, tuning
from dexter.training.run import make_splits, read_run
from dexter.training.tuning import Trial, choose_scoring, keep_training_queries

DATA = ("stackexchange4", "debian-related", "npm-deps", "yso-finna-en")
COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@5", "nDCG@5")
TEST_QUERIES = 4_000


def sample(dataset: Dataset, size: int) -> Dataset:
    """Return a data set of some training queries, the labels that these have, and test queries that have one."""
    generator = np.random.default_rng(size)
    assert dataset.test is not None
    train_rows, test_rows = (
        np.sort(generator.permutation(len(split))[:count])
        for split, count in ((dataset.train, size), (dataset.test, TEST_QUERIES))
    )
    labels = np.unique(dataset.train.select(train_rows).relevance.indices)

    def restrict(split: Split) -> Split:
        relevance = split.relevance[:, labels].tocsr()
        restricted = Split(split.texts, split.uids, relevance)
        return restricted.select(np.flatnonzero(relevance.getnnz(axis=1)))

    texts, ids = ([values[label] for label in labels.tolist()] for values in (dataset.label_texts, dataset.label_ids))
    splits = [restrict(split.select(rows)) for split, rows in ((dataset.train, train_rows), (dataset.test, test_rows))]
    name = f"{dataset.name}-{size}"
    return replace(
        dataset, name=name, label_texts=texts, label_ids=ids, train=splits[0], test=splits[1], names=None, source={}
    )


def try_choices(dataset: Dataset, seed: int, threads: int, errors: list[float]) -> Iterator[tuple[str, list[float]]]:
    """Yield the metrics of the model as trained, and of what is chosen at each number of standard errors."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"train.threads": threads, "seed": seed}
        run = train(dataset, recipe="dexter", out=Path(folder) / "run", overrides=settings)
        config, model = read_run(run.path).config, Model.load(run.path / "model")
    own_labels = find_own_labels(dataset, config.data.own_labels)
    filtered = own_labels.filter_test(own_labels.filter_train(dataset))
    queries, validation = make_splits(filtered, config)
    assert validation is not None
    kept = keep_training_queries(model, queries, model.encoder.tokenize(queries.texts, side="query"), config)
    model = replace(model, training_queries=kept)
    metric = config.validation.metric
    trial = Trial(model, queries, validation, metric=metric, propensity=dataset.propensity)
    as_trained = RankingChoice(head=model.default_head, dial=model.default_dial)
    yield "as trained", rank_test(model, filtered, as_trained)
    for number in errors:
        tuning.STANDARD_ERRORS = number
        choice = choose_scoring(trial, learn=True).choice or as_trained
        yield f"{number:g}", rank_test(replace(model, training_queries=trial.model.training_queries), filtered, choice)


def rank_test(model: Model, dataset: Dataset, choice: RankingChoice) -> list[float]:
    """Return the metrics of a ranking on the test queries."""
    split = dataset.test
    assert split is not None
    index = ExactIndex(model.label_vectors(head=choice.head, dial=choice.dial))
    encoded = encode_texts(model, split.texts, choice)
    found = rank_texts(model, index, encoded, choice, 5, exclude=split.filtered)
    metrics = score(found.ids, split.relevance, dataset.train.relevance, propensity=dataset.propensity)
    return [metrics[name] for name in COLUMNS]


def main() -> None:
    """Print a line for each sample and number of standard errors, then their means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=DATA, help="names of shared data sets, or paths")
    parser.add_argument("--sizes", nargs="+", type=int, default=[2_000, 8_000], help="training queries of a sample")
    parser.add_argument("--errors", nargs="+", type=float, default=[0.0, 0.5, 1.0, 1.5], help="standard errors")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    logging.getLogger("dexter").setLevel(logging.ERROR)
    print(f"{'':32}" + "".join(f"{name:>8}" for name in COLUMNS))
    rows: dict[str, list[list[float]]] = {}
    for name in arguments.data:
        dataset = shared_data.load(name)
        for size in arguments.sizes:
            small, found = sample(dataset, size), {}
            for seed in range(arguments.seeds):
                for label, metrics in try_choices(small, seed, arguments.threads, arguments.errors):
                    found.setdefault(label, []).append(metrics)
            for label, metrics_of_seeds in found.items():
                print(
                    f"{small.name:22}{label:>10}" + "".join(f"{value:8.2f}" for value in np.mean(metrics_of_seeds, 0))
                )
                rows.setdefault(label, []).append(list(np.mean(metrics_of_seeds, axis=0)))
    for label, means in rows.items():
        print(f"{'mean':22}{label:>10}" + "".join(f"{value:8.2f}" for value in np.mean(means, axis=0)))


if __name__ == "__main__":
    main()
