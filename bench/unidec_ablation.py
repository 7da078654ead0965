"""The ablations of UniDEC's appendix, one setting at a time: tables 6 and 7 of the paper on data of this machine.

    python bench/unidec_ablation.py --threads 1                                       # pydocs, some minutes of one core
    python bench/unidec_ablation.py --data debian-related --epochs 10 --seeds 0 1     # data sets: see shared_data.py
    python bench/unidec_ablation.py --rows UniDEC "eta 0" --set encoder.kind=transformer

The first row is the recipe `unidec`: beta = 3 drawn positives and eta = 6 hard negatives per query, lambda = 0.5
(the dual encoder's share of the loss), d = 384, PAL-N. Each other row differs in what its name says. PAL sums
over the positives of a query where PAL-N takes their mean; POS-CLF gives the classifier six more positives per query;
SupConDE has no classifier. Rows are scored by the dual encoder (DE), the classifier (CLF) and both (unified).

What the paper found (LF-Amazon-131K and LF-AmazonTitles-1.3M): PAL is worse than PAL-N everywhere; more positives raise
PSP and cost P where queries have many; hard negatives raise P and cost PSP, and eta = 3 is nearly as good as 6;
lambda = 0.3 is a little better than 0.5, d = 384 than 256; the classifier adds most of what UniDEC gains over SupConDE.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import trials
from dexter.config import parse_overrides

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "UniDEC": ("unidec", {}),
    "beta 1": ("unidec", {"batch.positives": 1}),
    "beta 2": ("unidec", {"batch.positives": 2}),
    "eta 3": ("unidec", {"batch.hard_negatives": 3}),
    "eta 0": ("unidec", {"batch.hard_negatives": 0}),
    "PAL": ("unidec", {"loss.reduction": "pal"}),
    "lambda 0.3": ("unidec", {"head.encoder_weight": 0.3}),
    "lambda 0.1": ("unidec", {"head.encoder_weight": 0.1}),
    "d 256": ("unidec", {"head.projection": 256}),
    "d 64": ("unidec", {"head.projection": 64}),
    "POS-CLF": ("unidec-pos-clf", {}),
    "SupConDE": ("supconde", {}),
    "SupConDE, beta 4": ("supconde", {"batch.positives": 4}),
    "SupConDE, eta 0": ("supconde", {"batch.hard_negatives": 0}),
    "SupConDE, PAL": ("supconde", {"loss.reduction": "pal"}),
}
"""The rows of the table: a recipe and what differs from it."""
WIDTH = 17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="pydocs", help="pydocs, a path, or the name of a shared data set")
    parser.add_argument("--queries", type=int, default=0, help="training queries, drawn at random; 0: all")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--start", type=int, default=2, help="first epoch with clusters and hard negatives")
    parser.add_argument("--refresh", type=int, default=2, help="epochs between two refreshes")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    dataset = trials.load(arguments.data, num_queries=arguments.queries)
    shared = {
        "train.epochs": arguments.epochs,
        "train.threads": arguments.threads,
        "batch.start": arguments.start,
        "batch.refresh": arguments.refresh,
    } | parse_overrides(arguments.set)
    print(
        f"{dataset.name}: {len(dataset.train):,} training queries, {dataset.num_labels:,} labels, {arguments.epochs} "
        f"epochs, mean of {len(arguments.seeds)} seed(s), test split, percent; CPU s of training"
    )
    print(trials.header("", width=WIDTH), flush=True)
    for name in arguments.rows:
        recipe, changes = ROWS[name]
        runs = [trials.run(dataset, recipe, shared | changes | {"seed": seed}) for seed in arguments.seeds]
        print(trials.lines(name, trials.mean(runs), width=WIDTH), flush=True)


if __name__ == "__main__":
    main()
