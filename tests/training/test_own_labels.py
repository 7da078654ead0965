"""Own labels in a run: ignored in training, resumed alike, left out of tuning, evaluation and predictions by id."""

import json
import logging

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import dexter
from dexter import Predictor
from dexter.config import load_config
from dexter.data import Dataset, Split
from dexter.errors import Interrupted
from dexter.evaluation.runs import compare_runs, dial_curve, evaluate, evaluate_run
from dexter.evaluation.tables import render_table
from dexter.training import trainer
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from dexter.training.tuning import tune
from tests.conftest import SMALL, WORDS


def make_related(*, filtered=False):
    """A thesaurus: each word is a query and a label, and the words in its row and column are related to it."""
    names = [f"{a} {b}" for a in WORDS[:12] for b in WORDS[:12] if a != b]
    relevance = np.array([[a != b and bool(set(a.split()[:1]) & set(b.split()[:1])) for b in names] for a in names])
    rows = np.random.default_rng(0).permutation(len(names))
    given = csr_matrix(np.eye(len(names), k=1)) if filtered else None

    def split(part):
        texts, uids = [f"{names[row]}: a word" for row in part], [names[row] for row in part]
        return Split(texts, uids, csr_matrix(relevance[part].astype(float)), None if given is None else given[part])

    return Dataset("related", names, names, split(rows[:110]), split(rows[110:]))


@pytest.fixture(scope="module")
def related():
    return make_related()


@pytest.fixture(scope="module")
def run(related, tmp_path_factory):
    out = tmp_path_factory.mktemp("own") / "run"
    dexter.train(related, out=out, overrides=SMALL)
    return out


def own_pairs(split, dataset):
    columns = {label_id: column for column, label_id in enumerate(dataset.label_ids)}
    return {(row, columns[uid]) for row, uid in enumerate(split.uids)}


def stored_pairs(matrix):
    return set(zip(*(numbers.tolist() for numbers in matrix.nonzero()), strict=True))


@pytest.mark.parametrize("pool", ["all", "in-batch", "sampled"])
def test_own_labels_are_ignored_in_every_pool(related, tmp_path, pool):
    settings = {**SMALL, "batch.pool": pool} | ({"batch.hard_negatives": 3} if pool == "sampled" else {})
    state = Trainer(resolve_presets(load_config("dexml", settings), related), related, tmp_path)
    assert stored_pairs(state.train_split.filtered) == own_pairs(state.train_split, related)
    assert stored_pairs(state.validation_split.filtered) == own_pairs(state.validation_split, related)
    state.take_step()
    rows = state.sampler.rows(state.step)
    chosen = state.sampler.pool(rows, state.step)
    own = {(place, related.label_ids.index(state.train_split.uids[row])) for place, row in enumerate(rows)}
    ignored = zip(chosen.ignore.rows.tolist(), chosen.ignore.columns.tolist(), strict=True)
    labels = range(related.num_labels) if chosen.labels is None else chosen.labels.tolist()
    assert {(row, labels[column]) for row, column in ignored} >= {pair for pair in own if pair[1] in labels}


def test_the_decision_is_logged_and_stored_with_the_model(related, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="dexter"):
        dexter.train(related, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    assert "110 of 110 queries have a label of their own; none is positive: left out of losses" in caplog.text
    stored = json.loads((tmp_path / "run" / "model" / "dexter" / "model.json").read_text())["facts"]["own_labels"]
    assert (stored["setting"], stored["by_id"], stored["num_with_own"]) == ("auto", True, 110)


def test_predictions_by_id_leave_the_own_label_out(run, related):
    predictor = Predictor.load(run)
    assert predictor.own_labels.excludes
    texts, ids = related.test.texts, related.test.uids
    ranked = predictor.predict(texts, 5, ids=ids)
    assert all(uid not in {label.id for label in labels} for uid, labels in zip(ids, ranked, strict=True))
    without = predictor.predict(texts, 5)
    assert any(uid in {label.id for label in labels} for uid, labels in zip(ids, without, strict=True))


def test_evaluation_tells_both_figures(run, related, tmp_path):
    report = evaluate(run, related)
    assert report.own_labels["num_queries"] == len(related.test) and report.own_labels["num_positive"] == 0
    predictor = Predictor.load(run)
    relevant = related.test.relevance.toarray()
    ranked = predictor.predict(related.test.texts, 1, ids=related.test.uids)
    hits = [relevant[row, related.label_ids.index(best.id)] for row, [best] in enumerate(ranked)]
    assert report.metrics["P@1"] == pytest.approx(100 * np.mean(hits))
    assert report.own_labels["metrics_with_own"]["P@1"] < report.metrics["P@1"]
    assert "which is left out (none is relevant). With own labels: P@1" in render_table({"run": report})
    record = evaluate_run(run, related, record=tmp_path / "record.json").record
    assert record["own_labels"]["metrics_with_own"]["P@1"] == report.own_labels["metrics_with_own"]["P@1"]
    assert record["settings"]["num_filter_pairs"] == len(related.test)
    curve = dial_curve(predictor, related)
    assert curve.points[curve.current]["P@1"] == pytest.approx(report.metrics["P@1"])


def test_kept_own_labels_are_labels_as_any_other(run, related, tmp_path):
    dexter.train(related, out=tmp_path / "kept", overrides={**SMALL, "data.own_labels": "keep"})
    kept = Predictor.load(tmp_path / "kept")
    assert not kept.own_labels.excludes
    assert evaluate(kept, related).own_labels == {}
    both = compare_runs([tmp_path / "kept", run], related)
    assert {report.settings["num_filter_pairs"] for report in both.reports.values()} == {len(related.test)}


def test_given_filter_pairs_are_merged(tmp_path):
    related = make_related(filtered=True)
    dexter.train(related, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    report = evaluate(tmp_path / "run", related)
    given = stored_pairs(related.test.filtered)
    assert report.settings["num_filter_pairs"] == len(given | own_pairs(related.test, related))
    assert report.own_labels["num_queries"] == len(related.test)


def test_tuning_again_leaves_own_labels_out(run, related):
    before = Predictor.load(run).scoring
    after = tune(run, related)
    assert after.validation["model"] == before.validation["model"]


def test_a_resumed_run_ignores_the_same_pairs(run, related, tmp_path, monkeypatch):
    out, steps = tmp_path / "resumed", []
    take_step = Trainer.take_step

    def stop_early(self):
        if len(steps) == 5:
            raise Interrupted("stop", signal_number=2)
        steps.append(self.step)
        return take_step(self)

    monkeypatch.setattr(trainer.Trainer, "take_step", stop_early)
    with pytest.raises(Interrupted):
        dexter.train(related, out=out, overrides={**SMALL, "train.checkpoint_steps": 1})
    monkeypatch.undo()
    dexter.train(related, out=out, resume=True)
    first, second = (Predictor.load(folder).model for folder in (run, out))
    assert first.facts["own_labels"] == second.facts["own_labels"]
    np.testing.assert_array_equal(first.representations_LD, second.representations_LD)
