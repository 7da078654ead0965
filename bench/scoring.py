"""After training: what neighbours, dial, probabilities and unseen labels give on test queries, one run per data set.

    python bench/scoring.py --threads 1 --data stackexchange4 pydocs --out runs/scoring

Each data set is trained once by the recipe `dexter` (a run that is in --out already is used as it is), and once more
without a tenth of its labels for the last table (--no-unseen leaves that out). Everything was chosen on validation
queries; the test split is only scored.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import numpy as np

import shared_data
from dexter.data import Dataset
from dexter.data.sources import build
from dexter.evaluation.runs import dial_curve, evaluate
from dexter.evaluation.unseen import evaluate_unseen
from dexter.predict.predictor import Predictor
from dexter.training import train

COLUMNS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100")


def load(name: str) -> Dataset:
    """A shared data set, or pydocs made on this machine."""
    return build(name) if name == "pydocs" else shared_data.load(name)


def print_neighbours(run: Path, dataset: Dataset) -> None:
    """Test metrics with and without the neighbours, and the calibration of what the run was tuned to."""
    tuned = Predictor.load(run)
    print(f"tuned: {tuned.scoring.describe()}")
    print(f"{'':12s}" + "".join(f"{name:>8s}" for name in COLUMNS))
    for neighbours in (False, True):
        report = evaluate(Predictor.load(run, neighbours=neighbours), dataset, num_resamples=0)
        print(
            f"{'neighbours' if neighbours else 'model':12s}"
            + "".join(f"{report.metrics[name]:8.2f}" for name in COLUMNS)
        )
    errors = evaluate(tuned, dataset, num_resamples=0).calibration
    print(f"calibration error, first 5 places: softmax {errors['softmax']:.2f}, calibrated {errors['calibrated']:.2f}")


def print_thresholds(run: Path, dataset: Dataset) -> None:
    """Precision, recall and number of labels at thresholds that were chosen on validation."""
    predictor, test = Predictor.load(run), dataset.test
    assert test is not None
    wanted = [set(test.relevance[row].indices) for row in range(len(test))]
    columns = {label_id: column for column, label_id in enumerate(dataset.label_ids)}
    filtered = [set() if test.filtered is None else set(test.filtered[row].indices) for row in range(len(test))]
    for title, threshold in (
        ("precision 0.8", predictor.find_threshold(precision=0.8)),
        ("precision 0.6", predictor.find_threshold(precision=0.6)),
        ("best F1", predictor.find_threshold()),
    ):
        found = [
            {columns[label.id] for label in labels} - filtered[row]
            for row, labels in enumerate(predictor.predict_stream(test.texts, threshold=threshold))
        ]
        right = sum(len(a & b) for a, b in zip(found, wanted, strict=True))
        num_found, num_wanted = sum(map(len, found)), sum(map(len, wanted))
        precision, recall = right / max(num_found, 1), right / num_wanted
        print(
            f"{title:14s} threshold {threshold:.2f}: on test precision {precision:.3f}, recall {recall:.3f}, "
            f"F1 {2 * precision * recall / max(precision + recall, 1e-9):.3f}, "
            f"{num_found / len(test):.2f} labels a query"
        )
    print(f"(a query has {np.mean([len(labels) for labels in wanted]):.2f} labels)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["stackexchange4", "pydocs"])
    parser.add_argument("--out", type=Path, default=Path("runs/scoring"), help="where the runs are or will be")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-unseen", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    for name in arguments.data:
        dataset, run = load(name), arguments.out / name
        train(dataset, recipe="dexter", out=run, overrides={"train.threads": arguments.threads}, resume=True)
        print(f"\n## {name}: {len(dataset.train):,} training queries, {dataset.num_labels:,} labels")
        print_neighbours(run, dataset)
        print_thresholds(run, dataset)
        print(dial_curve(Predictor.load(run), dataset).render())
        if not arguments.no_unseen:
            print(evaluate_unseen(run, dataset, share=0.1).render(), flush=True)


if __name__ == "__main__":
    main()
