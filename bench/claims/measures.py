"""What a trial does: train a recipe and score its heads, or run a baseline; each returns `Measured`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.claims.trial import ENCODERS, Trial
from numpy.typing import NDArray

from dexter.data import Dataset
from dexter.data.own_labels import OwnLabels, find_own_labels
from dexter.data.tokens import Tokens
from dexter.encoders.static_arrays import StaticArrays
from dexter.evaluation.baselines import TfidfNeighbours
from dexter.evaluation.report import Report, restrict_to_labels, score_report, test_split
from dexter.evaluation.runs import as_columns, evaluate
from dexter.evaluation.unseen import choose_labels, without_labels
from dexter.index import search
from dexter.metrics import overfetch
from dexter.model.model import Model
from dexter.predict.predictor import Predictor
from dexter.predict.rank import RankingChoice
from dexter.types import HeadName, Side

KS = (1, 3, 5, 10, 100)
OVERALL = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@5", "R@10", "R@100")
ENCODER_PARAMETERS = 66_362_880
"""Of DistilBERT, the encoder of both papers."""
PAIRS = 64
SHARED = {"validation.fraction": 0.0, "scoring.neighbours": 0, "train.threads": 1}
"""The last model counts, scored as it was trained: nothing is chosen afterwards, and no neighbours vote."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measure found."""

    metrics: Mapping[str, Mapping[str, float]]
    cpu_seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)


def train_recipe(dataset: Dataset, trial: Trial) -> Measured:
    """Train a recipe and score every head of the last model."""
    from dexter.training import train

    overrides = {**SHARED, **ENCODERS[trial.encoder], **trial.settings, "seed": trial.seed}
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        finished = train(dataset, recipe=trial.recipe, out=Path(folder) / "run", overrides=overrides)
        cpu_seconds = time.process_time() - started
        model = Predictor.load(finished.path).model
        metrics = {head: _evaluate_head(model, dataset, head) for head in model.heads}
        metrics |= _unnormalised(model, dataset) | _words_alone(model, dataset)
        facts = _sizes(dataset) | _pool(finished.path / "metrics.jsonl")
    return Measured(metrics=metrics, cpu_seconds=cpu_seconds, facts=facts)


def _evaluate_head(model: Model, dataset: Dataset, head: HeadName) -> dict[str, float]:
    predictor = Predictor(model, RankingChoice(head=head, dial=model.default_dial))
    return summarise(evaluate(predictor, dataset, ks=_ks(dataset), num_resamples=0))


def _unnormalised(model: Model, dataset: Dataset) -> dict[str, dict[str, float]]:
    """Score a classifier that is searched by cosines with its vectors as they were trained, alone and with the encoder.

    A label prior is trained and searched with unnormalised vectors in any case.
    """
    if model.classifier is None or model.has_prior:
        return {}
    test = test_split(OwnLabels.from_json(model.facts["own_labels"]).filter_test(dataset))
    representations = model.encode_queries(test.texts)
    queries, rows = model.classifier.project(representations), model.classifier.rows()
    dual = model.search_vectors(representations, head="encoder"), model.label_vectors(head="encoder")
    joined = (np.concatenate([dual[0], queries], axis=1), np.concatenate([dual[1], rows], axis=1))
    places = min(dataset.num_labels, max(_ks(dataset)) + overfetch(test.filtered))
    found = {}
    for name, (ours, theirs) in {"classifier, unnormalised": (queries, rows), "unified, unnormalised": joined}.items():
        ids = search(np.ascontiguousarray(ours), np.ascontiguousarray(theirs), places).ids
        found[name] = summarise(
            score_report(ids, test, dataset.train.relevance, ks=_ks(dataset), num_resamples=0), groups=False
        )
    return found


def _words_alone(model: Model, dataset: Dataset) -> dict[str, dict[str, float]]:
    """Score an encoder whose labels share vectors (DEXA) without these: labels by their words, as new ones are."""
    encoder = model.encoder
    if not isinstance(encoder, StaticArrays) or len(set(encoder.tokens.label_rows)) == len(encoder.tokens.known_labels):
        return {}
    features = encoder.tokenize(model.labels.texts, side="label")
    is_word = features.ids % encoder.tokens.num_rows < encoder.tokens.first_label_row
    ends = np.concatenate([[0], np.cumsum(is_word)])
    words = Tokens(ids=features.ids[is_word], offsets=ends[features.offsets])
    bare = replace(model, representations_LD=encoder.embed(words))
    return {"encoder, words alone": _evaluate_head(bare, dataset, "encoder")}


def hold_labels_out(dataset: Dataset, trial: Trial) -> Measured:
    """Train without a share of the labels, add them by their texts, and score them apart from the others."""
    from dexter.training import train

    settings = dict(trial.settings)
    held_out = choose_labels(dataset.label_ids, settings.pop("share"), seed=trial.seed)
    overrides = {**SHARED, **ENCODERS[trial.encoder], **settings, "seed": trial.seed}
    known = without_labels(dataset, held_out)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        finished = train(known, recipe=trial.recipe, out=Path(folder) / "run", overrides=overrides)
        cpu_seconds = time.process_time() - started
        loaded = Predictor.load(finished.path)
    metrics = {}
    for head in loaded.model.heads:
        predictor = Predictor(loaded.model, RankingChoice(head=head, dial=loaded.model.default_dial))
        predictor.add_labels(
            [(dataset.label_ids[n], dataset.label_texts[n]) for n in np.flatnonzero(held_out).tolist()]
        )
        metrics[head] = _score_apart(predictor, loaded.own_labels.filter_test(dataset), held_out)
    return Measured(metrics=metrics, cpu_seconds=cpu_seconds, facts=_sizes(dataset) | {"held_out": int(held_out.sum())})


def _score_apart(predictor: Predictor, dataset: Dataset, held_out: NDArray[np.bool_]) -> dict[str, float]:
    """Score a ranking of all labels, of the held-out and of the other labels; and one of the held-out labels alone."""
    test = test_split(dataset)
    new_ids = {dataset.label_ids[label] for label in np.flatnonzero(held_out).tolist()}
    found = predictor.top(test.texts, max(_ks(dataset)) + overfetch(test.filtered))
    columns = as_columns(predictor, dataset, found.ids)
    report = score_report(columns, test, dataset.train.relevance, ks=_ks(dataset), num_resamples=0)
    figures = {"P@1": report.metrics["P@1"]}
    for name, members in (("new", held_out), ("known", ~held_out)):
        part = replace(test, relevance=restrict_to_labels(test.relevance, members))
        rows = np.flatnonzero(part.relevance.getnnz(axis=1))
        scored = score_report(columns[rows], part.select(rows), dataset.train.relevance, ks=(10,), num_resamples=0)
        figures[f"{name} R@10"] = scored.metrics["R@10"]
    rows = np.array([row for row, label in enumerate(predictor.labels.ids) if label in new_ids], dtype=np.int64)
    alone = predictor.variant(model=predictor.model.select_labels(rows))
    wanting = replace(test, relevance=restrict_to_labels(test.relevance, held_out))
    wanting = wanting.select(np.flatnonzero(wanting.relevance.getnnz(axis=1)))
    found = alone.top(wanting.texts, min(len(rows), 10 + overfetch(wanting.filtered)))
    columns = as_columns(alone, dataset, found.ids)
    scored = score_report(columns, wanting, dataset.train.relevance, ks=(1, 10), num_resamples=0)
    figures |= {"new alone P@1": scored.metrics["P@1"], "new alone R@10": scored.metrics["R@10"]}
    return figures


def fine_tune_pairs(dataset: Dataset, trial: Trial) -> Measured:
    """Fine-tune MiniLM by sentence-transformers on (query, label) pairs for a given processor time.

    MultipleNegativesRankingLoss, batches of 64 pairs, AdamW at 2e-5 with a linear warm-up of 10% of the time.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    from dexter.encoders.pretrained import locate_minilm

    torch.manual_seed(trial.seed)
    budget, random = float(trial.settings["cpu_seconds"]), np.random.default_rng(trial.seed)
    model = SentenceTransformer(str(locate_minilm()), device="cpu")
    model.max_seq_length = int((ENCODERS["MiniLM"] | dict(trial.settings))["encoder.max_length_query"])
    loss, optimizer = MultipleNegativesRankingLoss(model), torch.optim.AdamW(model.parameters(), lr=2e-5)
    rows, columns = dataset.train.relevance.nonzero()
    model.train()
    started, num_steps, order = time.process_time(), 0, np.empty(0, dtype=np.int64)
    while (spent := time.process_time() - started) < budget:
        if len(order) < PAIRS:
            order = random.permutation(len(rows))
        batch, order = order[:PAIRS], order[PAIRS:]
        texts = [dataset.train.texts[row] for row in rows[batch]], [dataset.label_texts[n] for n in columns[batch]]
        for group in optimizer.param_groups:
            group["lr"] = 2e-5 * min(1.0, 10 * (spent + 1) / budget)
        optimizer.zero_grad()
        loss([model.tokenize(list(side)) for side in texts], None).backward()
        optimizer.step()
        num_steps += 1
    cpu_seconds = time.process_time() - started
    test = test_split(dataset)
    queries, labels = (
        model.encode(list(texts), convert_to_numpy=True, normalize_embeddings=True)
        for texts in (test.texts, dataset.label_texts)
    )
    found = search(queries, labels, max(_ks(dataset)) + overfetch(test.filtered))
    measured = _scored(dataset, found.ids, started)
    return Measured(
        metrics=measured.metrics, cpu_seconds=cpu_seconds, facts=dict(measured.facts) | {"steps": num_steps}
    )


def run_untrained(dataset: Dataset, trial: Trial) -> Measured:
    """Score MiniLM as it was published."""
    from dexter.config import load_config
    from dexter.encoders import build_encoder

    encoder = build_encoder(load_config("dexml", ENCODERS["MiniLM"] | dict(trial.settings)).encoder, [], [])
    started, test = time.process_time(), test_split(dataset)
    sides: dict[Side, list[str]] = {"query": list(test.texts), "label": list(dataset.label_texts)}
    queries, labels = (encoder.embed(encoder.tokenize(texts, side=side)) for side, texts in sides.items())
    return _scored(dataset, search(queries, labels, max(_ks(dataset)) + overfetch(test.filtered)).ids, started)


def plan_step(dataset: Dataset, trial: Trial) -> Measured:
    """Plan a step of a paper's run from published counts: parameters, memory, operations. Nothing is trained."""
    from dexter.planning.plan import plan_counts

    settings = dict(trial.settings)
    plan = plan_counts(recipe=trial.recipe, overrides=settings.pop("overrides", {}), **settings)
    classifier = settings["num_labels"] * plan.config.head.projection if plan.config.head.classifier else 0
    figures = {
        "million parameters": (ENCODER_PARAMETERS + classifier) / 1e6,
        "GiB": plan.peak_memory / 2**30,
        "TFLOP/query": plan.operations * settings["world_size"] / plan.config.batch.size / 1e12,
        "PFLOP/epoch": plan.operations * settings["world_size"] * plan.num_steps / 1e15,
    }
    return Measured(metrics={"all": figures}, cpu_seconds=0.0, facts={"steps": plan.num_steps})


def run_neighbours(dataset: Dataset, trial: Trial) -> Measured:
    """Run TF-IDF nearest neighbours."""
    dataset = find_own_labels(dataset, "auto").filter_test(dataset)
    started = time.process_time()
    model = TfidfNeighbours.fit(dataset.train.texts, dataset.train.relevance)
    test = test_split(dataset)
    top_ids = model.predict(test.texts, max(_ks(dataset)) + overfetch(test.filtered)).ids
    return _scored(dataset, top_ids, started)


def run_one_vs_all(dataset: Dataset, trial: Trial) -> Measured:
    """Train one linear SVM per label on TF-IDF vectors."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.svm import LinearSVC

    dataset = find_own_labels(dataset, "auto").filter_test(dataset)
    started = time.process_time()
    vectorizer: Any = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    train, test = vectorizer.fit_transform(dataset.train.texts), vectorizer.transform(test_split(dataset).texts)
    relevance = dataset.train.relevance.tocsc()
    scores = np.full((test.shape[0], dataset.num_labels), -np.inf, dtype=np.float32)
    for label in range(dataset.num_labels):
        wanted = np.zeros(len(dataset.train), dtype=np.int64)
        wanted[relevance.indices[relevance.indptr[label] : relevance.indptr[label + 1]]] = 1
        if 0 < wanted.sum() < len(wanted):
            scores[:, label] = LinearSVC(C=1.0, random_state=trial.seed).fit(train, wanted).decision_function(test)
    places = max(_ks(dataset)) + overfetch(test_split(dataset).filtered)
    return _scored(dataset, np.argsort(-scores, axis=1, kind="stable")[:, :places], started)


def summarise(report: Report, *, groups: bool = True) -> dict[str, float]:
    """Return the metrics that are kept: overall and, with `groups`, some of bands and deciles of label frequency."""
    kept = {name: report.metrics[name] for name in OVERALL if name in report.metrics}
    if not groups:
        return kept
    for band, metrics in report.by_frequency.items():
        if report.band_sizes[band]["queries"]:
            kept |= {f"{band} {name}": metrics[name] for name in ("P@1", "R@10") if name in metrics}
    for decile, metrics in report.by_decile.items():
        if report.decile_sizes[decile]["queries"]:
            kept[f"decile {decile} R@10"] = metrics["R@10"]
    return kept


def _scored(dataset: Dataset, top_ids: Any, started: float) -> Measured:
    cpu_seconds = time.process_time() - started
    report = score_report(top_ids, test_split(dataset), dataset.train.relevance, ks=_ks(dataset), num_resamples=0)
    return Measured(metrics={"all": summarise(report)}, cpu_seconds=cpu_seconds, facts=_sizes(dataset))


def _ks(dataset: Dataset) -> tuple[int, ...]:
    return tuple(k for k in KS if k <= dataset.num_labels)


def _sizes(dataset: Dataset) -> dict[str, Any]:
    test = test_split(dataset)
    return {"train_queries": len(dataset.train), "test_queries": len(test), "labels": dataset.num_labels}


def _pool(path: Path) -> dict[str, float]:
    """Return the steps of a run, and the labels and positives per query of a pool in its last epoch."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last = next(line for line in reversed(lines) if "pool_labels" in line)
    return {"steps": last["step"]} | {name: round(last[name], 2) for name in ("pool_labels", "positives_per_query")}


MEASURES: dict[str, Callable[[Dataset, Trial], Measured]] = {
    "recipe": train_recipe,
    "held-out labels": hold_labels_out,
    "sentence-transformers": fine_tune_pairs,
    "untrained": run_untrained,
    "plan": plan_step,
    "neighbours": run_neighbours,
    "one-vs-all": run_one_vs_all,
}
"""The measures by name."""
