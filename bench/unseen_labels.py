"""Labels that were never trained, beside labels that were: their half of the classifier, and their prior.

    python bench/unseen_labels.py --threads 1                               both data sets, both recipes
    python bench/unseen_labels.py --data stackexchange4 --recipes unidec    a quick look
    python bench/unseen_labels.py --learned --share 0.1 --threads 1         what is learned about new labels

A share of the labels is taken out of training (texts, pairs, everything), a dual encoder with a classifier is trained,
and the labels are added as a user would add them. All labels then compete for the test queries. The rows differ in what
the classifier says of the added ones:

    nothing       zero: they have the dual encoder's half only
    scaled        the dual encoder's half, times one plus the slope of classifier scores over dual ones on known labels
    own text      the label's text through the classifier's projection, at the mean length of trained rows
    borrowed K    mean direction of the rows of the K known labels that mean most nearly the same, at the mean length
    text + K      the mean direction of the two above
    the model's   what `Predictor.add_labels` does: text + 10, at the mean length of the ten
    encoder only  for comparison: nobody has a classifier half

With `--learned` the recipe `dexter` is trained with validation, labels are ranked as the run has chosen, and the rows
differ in how the new ones are made:

    rare prior    from their texts, with the prior of rare labels
    learned       with the prior and the weight of words that were learned by hiding trained labels
    5 examples    the same, and five training queries that have each
    5 that vote   these vote too (`Predictor.add_examples`)

Columns: P@1 and P@5 over all queries and labels; then, for the added ("new") and the known labels apart, the share of
the relevant labels of that kind that are among the first 1, 5, 10 and 100 places. "both" is the harmonic mean of new
and known R@10: a choice that pushes one kind up by pushing the other down does not gain there.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

import shared_data
from dexter.data import Dataset
from dexter.encoders.head_arrays import unit_rows
from dexter.evaluation.runs import predict_columns
from dexter.evaluation.unseen import choose_labels, without_labels
from dexter.index import search
from dexter.metrics import overfetch, remove_filtered
from dexter.model.model import Model
from dexter.predict.predictor import Predictor
from dexter.training import train

Vectors = NDArray[np.float32]
PLACES = (1, 5, 10, 100)
NUM_EXAMPLES, MAX_QUERIES = 5, 2_500
"""Texts that each new label is given, and test queries, with `--learned`."""
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dexter": ("dexter", {}),
    "unidec": ("unidec", {"train.epochs": 6, "batch.start": 2, "batch.refresh": 2}),
}
"""Name: a recipe and what differs from it; with and without a label prior, few epochs."""


def first_lines(dataset: Dataset, count: int) -> Dataset:
    """The data set with its first training queries and their labels; test queries that have none of these are gone."""
    assert dataset.test is not None
    lines = dataset.train.select(np.arange(count))
    kept = np.flatnonzero(lines.relevance.getnnz(axis=0))
    wanting = np.flatnonzero(dataset.test.relevance[:, kept].getnnz(axis=1))
    train_split, test_split = (
        replace(
            split,
            relevance=csr_matrix(split.relevance[:, kept]),
            filtered=None if split.filtered is None else csr_matrix(split.filtered[:, kept]),
        )
        for split in (lines, dataset.test.select(wanting))
    )
    texts, ids = ([values[label] for label in kept] for values in (dataset.label_texts, dataset.label_ids))
    name = f"{dataset.name}-{count}"
    return replace(dataset, name=name, label_texts=texts, label_ids=ids, train=train_split, test=test_split, source={})


def classifier_halves(model: Model, representations_ND: Vectors) -> Iterator[tuple[str, Vectors]]:
    """Each choice with the vectors of all labels, for a search with both heads."""
    assert model.classifier is not None
    head, new_L = model.classifier, model.labels.counts == 0
    dual_LD = np.concatenate(model.head.labels(model.representations_LD), axis=1)
    meanings_LD, rows_LC = model.label_embeddings(), head.rows().copy()

    def joined(rows_LC: Vectors, dual_LD: Vectors = dual_LD) -> Vectors:
        return np.concatenate([dual_LD, *head.labels(rows_LC)], axis=1)

    rows_LC[new_L] = 0.0
    yield "nothing", joined(rows_LC)
    scaled_LD = dual_LD.copy()
    scaled_LD[new_L] *= 1.0 + _slope(model, representations_ND)
    yield "scaled", joined(rows_LC, scaled_LD)
    known_SC, known_SD = (unit_rows(values[~new_L]) for values in (rows_LC, meanings_LD))
    length = np.linalg.norm(rows_LC[~new_L], axis=1).mean()
    own_UC = unit_rows(head.project(model.representations_LD[new_L]))
    nearest_UK = search(unit_rows(meanings_LD[new_L]), known_SD, 30).ids

    def with_new(new_UC: Vectors) -> Vectors:
        filled_LC = rows_LC.copy()
        filled_LC[new_L] = unit_rows(new_UC) * length
        return joined(filled_LC)

    yield "own text", with_new(own_UC)
    for num_neighbours in (1, 3, 10, 30):
        borrowed_UC = unit_rows(known_SC[nearest_UK[:, :num_neighbours]].mean(axis=1))
        yield f"borrowed {num_neighbours}", with_new(borrowed_UC)
        yield f"text + {num_neighbours}", with_new(borrowed_UC + own_UC)
    yield "the model's", model.label_vectors(head="unified")


def _slope(model: Model, representations_ND: Vectors) -> float:
    """How much the classifier's score of a known label grows with the dual encoder's, over the best ones."""
    dual_ND, known = model.search_vectors(representations_ND[:500], head="encoder"), model.labels.counts > 0
    labels_LD, rows_LC = model.label_vectors(head="encoder")[known], model.label_vectors(head="classifier")[known]
    found = search(dual_ND, labels_LD, 20).ids
    queries_NC = model.search_vectors(representations_ND[:500], head="classifier")
    dual = np.einsum("nd,nkd->nk", dual_ND, labels_LD[found]).ravel()
    scores = np.einsum("nd,nkd->nk", queries_NC, rows_LC[found]).ravel()
    return float(np.cov(np.stack([dual, scores]))[0, 1] / dual.var(ddof=1))


def measure(top_ids: NDArray[np.int64], relevance: csr_matrix, new_L: NDArray[np.bool_]) -> list[float]:
    """The columns of the table, in percent."""
    rows = np.repeat(np.arange(len(top_ids)), top_ids.shape[1]).reshape(top_ids.shape)
    hits = np.asarray(relevance[rows.ravel(), top_ids.ravel()]).reshape(top_ids.shape) > 0
    figures = [100 * hits[:, :k].sum() / (k * len(top_ids)) for k in (1, 5)]
    for kind in (new_L, ~new_L):
        total = (relevance[:, np.flatnonzero(kind)] > 0).sum(axis=1).A1
        of_kind = np.cumsum(hits & kind[top_ids], axis=1)[total > 0]
        figures += [100 * float((of_kind[:, k - 1] / total[total > 0]).mean()) for k in PLACES]
    new, known = figures[4], figures[8]
    return [*figures, 2 * new * known / (new + known)]


def compare(dataset: Dataset, recipe: str, *, share: float, seed: int, threads: int, runs: Path) -> None:
    """Train without some labels, add them, print one line per choice."""
    generator, num_labels = np.random.default_rng(seed), dataset.num_labels
    order = generator.permutation(num_labels)
    kept, held = np.sort(order[int(share * num_labels) :]), np.sort(order[: int(share * num_labels)])
    assert dataset.test is not None
    known = without_labels(dataset, np.isin(np.arange(num_labels), held))
    base, differences = RECIPES[recipe]
    overrides = {"seed": seed, "train.threads": threads, "validation.fraction": 0.0, **differences}
    started, folder = time.process_time(), runs / f"{dataset.name}-{base}-{seed}-{share:g}"
    if not (folder / "run.json").exists():
        train(known, recipe=base, out=folder, overrides=overrides, resume=True)
    seconds = time.process_time() - started
    predictor = Predictor.load(folder)
    predictor.add_labels([(dataset.label_ids[label], dataset.label_texts[label]) for label in held])
    columns = np.concatenate([kept, held])
    relevance, new_L = csr_matrix(dataset.test.relevance[:, columns]), predictor.labels.counts == 0
    filtered = None if dataset.test.filtered is None else csr_matrix(dataset.test.filtered[:, columns])
    model, k = predictor.model, max(PLACES) + overfetch(filtered)
    representations_ND = model.encode_queries(dataset.test.texts)
    print(f"\n{dataset.name}, {recipe}: {len(held):,} of {num_labels:,} labels new, trained in {seconds:.0f} CPU s")
    print(f"{'':14}" + "".join(f"{name:>8}" for name in _column_names()))
    choices = [(name, "unified", vectors) for name, vectors in classifier_halves(model, representations_ND)]
    choices.append(("encoder only", "encoder", model.label_vectors(head="encoder")))
    for name, head, labels_LD in choices:
        queries_ND = model.search_vectors(representations_ND, head=head)
        found = search(queries_ND, labels_LD, k)
        top_ids = remove_filtered(found.ids, found.scores, filtered, max(PLACES)).ids
        print(f"{name:14}" + "".join(f"{value:8.2f}" for value in measure(top_ids, relevance, new_L)), flush=True)


def compare_learned(dataset: Dataset, *, share: float, seed: int, threads: int, runs: Path) -> None:
    """Train with validation and without some labels, add them in different ways, print one line for each."""
    held_L = choose_labels(dataset.label_ids, share, seed=seed)
    overrides = {"seed": seed, "train.threads": threads}
    folder = runs / f"{dataset.name}-learned-{seed}-{share:g}"
    started = time.process_time()
    if not (folder / "run.json").exists():
        train(without_labels(dataset, held_L), recipe="dexter", out=folder, overrides=overrides, resume=True)
    seconds = time.process_time() - started
    dataset = Predictor.load(folder).own_labels.filter_test(dataset)
    assert dataset.test is not None
    split = dataset.test.select(np.sort(np.random.default_rng(0).permutation(len(dataset.test))[:MAX_QUERIES]))
    held = np.flatnonzero(held_L).tolist()
    new = [(dataset.label_ids[label], dataset.label_texts[label]) for label in held]
    having = dataset.train.relevance[:, held].tocsc()
    examples = {
        label_id: [dataset.train.texts[row] for row in having[:, [k]].indices[:NUM_EXAMPLES]]
        for k, (label_id, _) in enumerate(new)
    }
    print(
        f"\n{dataset.name}: {len(held):,} of {dataset.num_labels:,} labels new, {len(split):,} test queries, ", end=""
    )
    print(f"trained in {seconds:.0f} CPU s\n{'':14}" + "".join(f"{name:>8}" for name in _column_names()))
    for name in ("rare prior", "learned", f"{NUM_EXAMPLES} examples", f"{NUM_EXAMPLES} that vote"):
        predictor = Predictor.load(folder)
        if name == "rare prior":
            predictor = predictor.variant(model=replace(predictor.model, generator=None))
        predictor.add_labels(new, examples=examples if name[0].isdigit() else None)
        if name.endswith("vote"):
            predictor.add_examples([(text, [label]) for label, texts in examples.items() for text in texts])
        columns_NK = predict_columns(predictor, dataset, split, max(PLACES))
        falling = np.broadcast_to(-np.arange(columns_NK.shape[1], dtype=np.float32), columns_NK.shape)
        top_ids = remove_filtered(columns_NK, falling, split.filtered, max(PLACES)).ids
        print(f"{name:14}" + "".join(f"{x:8.2f}" for x in measure(top_ids, split.relevance, held_L)), flush=True)


def _column_names() -> list[str]:
    kinds = [f"{kind} R{k}" for kind in ("new", "old") for k in PLACES]
    return ["P@1", "P@5", *kinds, "both"]


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["stackexchange4", "debian-related"], help="data sets by name")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--share", type=float, default=0.2, help="share of the labels that are held out of training")
    parser.add_argument("--lines", type=int, default=0, help="only so many training queries and their labels; 0: all")
    parser.add_argument("--learned", action="store_true", help="compare what is learned about new labels")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--runs", type=Path, help="where to keep the runs, and to find them again")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        settings = {"share": arguments.share, "threads": arguments.threads, "runs": arguments.runs or Path(temporary)}
        for name in arguments.data:
            dataset = shared_data.load(name)
            dataset = first_lines(dataset, arguments.lines) if arguments.lines else dataset
            for seed in arguments.seeds:
                if arguments.learned:
                    compare_learned(dataset, seed=seed, **settings)
                    continue
                for recipe in arguments.recipes:
                    compare(dataset, recipe, seed=seed, **settings)


if __name__ == "__main__":
    main()
