"""Every recipe on pydocs with the static encoder and with MiniLM, both trained for the same number of epochs.

    python bench/minilm_recipes.py --threads 1                      # about half an hour of one core
    python bench/minilm_recipes.py --recipes unidec --queries 0     # one recipe, all training queries

A short run that shows that the transformer path of each recipe works, not what the recipes can reach: by default one
epoch over 1,000 training queries, texts cut at 32 tokens. Both encoders have the same batches, lengths and epochs;
learning rates are their own. What would wait for later epochs (clusters, hard negatives) starts in the first one.
Recipes over all labels encode all 2,993 of them in a step, so their batches are larger. The rows before training rank
labels by the cosine of the pretrained vectors; for the static encoder these are weighted means of MiniLM's token
vectors.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import trials
from dexter.config import load_config, parse_overrides
from dexter.data import Dataset
from dexter.encoders import build_encoder
from dexter.encoders.static import StaticEncoder
from dexter.evaluation.report import score_report, test_split
from dexter.evaluation.runs import DEFAULT_KS
from dexter.index import search
from dexter.metrics import overfetch
from dexter.recipes import method_names
from dexter.types import HeadName

LENGTHS = {"encoder.max_length_query": 32, "encoder.max_length_label": 32}
ENCODERS: dict[str, dict[str, Any]] = {
    "static": {"encoder.kind": "static"},
    "MiniLM": {"encoder.kind": "transformer", "train.learning_rate": 1e-4},
}
ALL_LABELS = {"batch.size": 128}
SAMPLED = {"batch.size": 32}
SCORED: dict[str, tuple[HeadName, ...]] = {"renee": ("classifier",)}
"""The heads of a recipe that its loss trains, where these are not all."""
WIDTH = 24


def settings(recipe: str, encoder: str) -> dict[str, Any]:
    """What differs from the recipe in a short run with an encoder."""
    batch = load_config(recipe).batch
    common = {**LENGTHS, "validation.fraction": 0.0, "batch.start": 0}
    return common | (SAMPLED if batch.pool in ("in-batch", "sampled") else ALL_LABELS) | ENCODERS[encoder]


def untrained(dataset: Dataset, encoder: str) -> trials.Trial:
    """The pretrained vectors as they are."""
    split = test_split(dataset)
    config = load_config("dexml", LENGTHS | ENCODERS[encoder]).encoder
    module = build_encoder(config, dataset.train.texts, dataset.label_texts)
    if isinstance(module, StaticEncoder):
        module.weigh_tokens(module.tokenize(dataset.train.texts, side="query"))
    queries = module.embed(module.tokenize(split.texts, side="query"))
    labels = module.embed(module.tokenize(dataset.label_texts, side="label"))
    found = search(queries, labels, max(DEFAULT_KS) + overfetch(split.filtered))
    report = score_report(found.ids, split, dataset.train.relevance, ks=DEFAULT_KS, num_resamples=0)
    return trials.Trial({"encoder": report.metrics}, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=method_names(), default=method_names())
    parser.add_argument("--queries", type=int, default=1000, help="training queries, drawn at random; 0: all")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    dataset = trials.load("pydocs", num_queries=arguments.queries)
    print(f"pydocs, {len(dataset.train):,} training queries, {arguments.epochs} epoch(s), test split, percent")
    print(trials.header("recipe", width=WIDTH), flush=True)
    for encoder in ENCODERS:
        print(trials.lines(f"before training, {encoder}", untrained(dataset, encoder), width=WIDTH), flush=True)
    shared = {"train.epochs": arguments.epochs, "train.threads": arguments.threads, "seed": arguments.seed}
    for recipe in arguments.recipes:
        for encoder in ENCODERS:
            overrides = settings(recipe, encoder) | shared | parse_overrides(arguments.set)
            trial = trials.run(dataset, recipe, overrides, heads=SCORED.get(recipe, ()))
            print(trials.lines(f"{recipe}, {encoder}", trial, width=WIDTH), flush=True)


if __name__ == "__main__":
    main()
