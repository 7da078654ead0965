"""Runs on test queries: labels matched by id, filter pairs removed, a record that tells all, runs held side by side."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from tests.conftest import SMALL

import dexter
from dexter import Predictor
from dexter.data import Dataset, Split
from dexter.errors import DataError, ModelError, UsageError
from dexter.evaluation import unseen
from dexter.evaluation.plots import save_dial_plot
from dexter.evaluation.records import read_misses
from dexter.evaluation.runs import compare_runs, dial_curve, evaluate, evaluate_run, predict_columns
from dexter.model.model import Model


@pytest.fixture(scope="module")
def other(world, tmp_path_factory):
    """A worse run to compare with."""
    out = tmp_path_factory.mktemp("other") / "run"
    dexter.train(world, recipe="dexml", out=out, overrides={**SMALL, "train.epochs": 1, "train.learning_rate": 1e-5})
    return out


def reordered(world, order):
    """The same data set with its labels in another order."""

    def split(one):
        return Split(one.texts, one.uids, one.relevance[:, order])

    texts, ids = ([values[column] for column in order] for values in (world.label_texts, world.label_ids))
    return Dataset("reordered", texts, ids, split(world.train), split(world.test))


def with_filter(world, filtered):
    return dataclasses.replace(world, test=dataclasses.replace(world.test, filtered=filtered))


def test_metrics_are_those_of_a_slow_loop(trained, world):
    report = evaluate(trained, world, ks=(1, 3), num_resamples=0)
    ranked = Predictor.load(trained).predict(world.test.texts, k=3)
    hits = [
        [label.id in {world.label_ids[c] for c in world.test.relevance[row].indices} for label in labels]
        for row, labels in enumerate(ranked)
    ]
    assert report.metrics["P@1"] == pytest.approx(100 * np.mean([row[0] for row in hits]))
    assert report.metrics["P@3"] == pytest.approx(100 * np.mean(hits))


def test_labels_are_matched_by_id(trained, world):
    order = np.random.default_rng(0).permutation(world.num_labels)
    usual, other_order = (evaluate(trained, data, num_resamples=0) for data in (world, reordered(world, order)))
    assert other_order.metrics == pytest.approx(usual.metrics)


def test_labels_that_the_data_does_not_have_are_misses(trained, world, caplog):
    predictor = Predictor.load(trained)
    predictor.add_labels([(f"new {text}", text) for text in world.label_texts])
    assert (predict_columns(predictor, world, world.test, 10) == -1).any()
    assert "37 of the model's labels are not in world" in caplog.text
    assert evaluate(predictor, world, ks=(3,)).metrics["P@3"] < evaluate(trained, world, ks=(3,)).metrics["P@3"]


def test_data_of_other_labels_is_refused(trained, world):
    other_ids = dataclasses.replace(world, label_ids=[f"other {i}" for i in range(world.num_labels)])
    with pytest.raises(ModelError, match="none of the model's 37 label ids is in world"):
        evaluate(trained, other_ids)


def test_filter_pairs_are_removed_and_the_gap_closed(trained, world):
    """Forbid each query's best two labels: what was third comes first."""
    top = predict_columns(Predictor.load(trained), world, world.test, 3)
    rows = np.repeat(np.arange(len(world.test)), 2)
    filtered = csr_matrix((np.ones(len(rows)), (rows, top[:, :2].ravel())), shape=world.test.relevance.shape)
    report = evaluate(trained, with_filter(world, filtered), ks=(1,), num_resamples=0)
    third = [top[row, 2] in world.test.relevance[row].indices for row in range(len(top))]
    assert report.metrics["P@1"] == pytest.approx(100 * np.mean(third))
    assert report.settings["num_predictions_removed"] == 2 * len(world.test)


def test_cut_offs_fit_the_data_unless_asked_for(trained, world):
    assert evaluate(trained, world, num_resamples=0).settings["ks"] == [1, 3, 5, 10]
    asked = evaluate(trained, world, ks=(1, 50), num_resamples=0)
    assert asked.metrics["R@50"] == pytest.approx(100)
    assert asked.num_short == len(world.test)


def test_a_missing_test_split_is_an_error(trained, world):
    with pytest.raises(DataError, match="no test split"):
        evaluate(trained, dataclasses.replace(world, test=None))


def test_the_record_has_what_a_repeat_needs(trained, world, tmp_path):
    path = tmp_path / "deep" / "record.json"
    result = evaluate_run(trained, world, record=path)
    record = json.loads(path.read_text())
    assert record == result.record
    assert record["metrics"]["P@1"] == result.report.metrics["P@1"]
    assert record["num_queries"] == len(world.test)
    assert record["data"]["name"] == "world" and record["data"]["num_labels"] == 37
    assert len(record["data"]["relevance_sha256"]) == 64 and record["data"]["filter_sha256"] is None
    assert record["settings"]["propensity"] == {"a": 0.55, "b": 1.5, "num_train": 400}
    assert record["model"]["sha256"] == Predictor.load(trained).fingerprint
    assert (record["model"]["seed"], record["model"]["head"]) == (0, "encoder")
    assert record["search"] == {"k": 10, "index": "exact", "recall": 1.0}
    assert record["environment"]["packages"]["torch"] and record["command"] and record["seconds"] > 0
    assert set(record["by_frequency"]) == {"frequent", "torso", "tail", "unseen"}
    assert list(record["by_decile"]) == list(record["decile_sizes"]) == [str(number) for number in range(1, 11)]
    assert record["intervals"]["P@1"]["low"] <= record["metrics"]["P@1"] <= record["intervals"]["P@1"]["high"]


def test_every_test_text_is_encoded_once(trained, world, tmp_path, monkeypatch):
    """The misses come from the predictions that were scored."""
    encoded, encode = [], Model.encode_queries
    monkeypatch.setattr(Model, "encode_queries", lambda self, texts: (encoded.extend(texts), encode(self, texts))[1])
    evaluate_run(trained, world, record=tmp_path / "record.json")
    assert sorted(encoded) == sorted(world.test.texts)
    ranked = Predictor.load(trained).predict(world.test.texts, k=5)
    missed = {(miss.label, miss.text) for miss in read_misses(tmp_path / "record.misses.jsonl")}
    assert missed
    for row, (text, labels) in enumerate(zip(world.test.texts, ranked, strict=True)):
        found = {world.label_ids[c] for c in world.test.relevance[row].indices} & {label.id for label in labels}
        assert not missed & {(label_id, text) for label_id in found}


def test_runs_are_compared_on_the_same_queries(trained, other, world):
    found = compare_runs([other, trained], world, num_resamples=200)
    better = evaluate(trained, world, ks=(1,), num_resamples=0).metrics["P@1"]
    assert found.reports[str(trained)].metrics["P@1"] == better
    difference = found.differences[str(trained)].differences["P@1"]
    assert difference.value == pytest.approx(better - found.reports[str(other)].metrics["P@1"])
    assert difference.excludes_zero and difference.low > 0
    table = found.render()
    assert str(trained) in table and "paired resamples" in table
    described = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert described["against"] == str(other)
    assert described["differences"][str(trained)]["P@1"]["value"] == pytest.approx(difference.value)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_two_runs_cannot_be_compared(trained, world, count):
    with pytest.raises(UsageError, match="two different runs"):
        compare_runs([trained] * count, world)


def test_reports_and_baselines_need_no_torch():
    code = "import sys, dexter, dexter.evaluation.baselines\nprint('torch' in sys.modules, callable(dexter.evaluate))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_each_point_is_an_evaluation(trained, world):
    curve = dial_curve(Predictor.load(trained, neighbours=False), world, dials=(0.0, 0.5))
    assert list(curve.points) == [0.0, 0.5, 1.0]
    assert curve.current == 1.0
    for dial, metrics in curve.points.items():
        expected = evaluate(Predictor.load(trained, neighbours=False, dial=dial), world, ks=(1, 3, 5), num_resamples=0)
        assert metrics == pytest.approx(expected.metrics, nan_ok=True)
    lines = curve.render().splitlines()
    assert lines[0].split() == ["dial", "P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "0.5", "1*"]


def test_a_curve_is_drawn(trained, world, tmp_path):
    pytest.importorskip("matplotlib")
    save_dial_plot(dial_curve(Predictor.load(trained), world).points, tmp_path / "dial.png")
    assert (tmp_path / "dial.png").read_bytes().startswith(b"\x89PNG")


def test_no_values_no_curve(trained, world):
    with pytest.raises(UsageError, match="at least one value"):
        dial_curve(Predictor.load(trained), world, dials=())


@pytest.mark.parametrize("place", ["evaluate", "record", "compare", "dial", "unseen"])
def test_propensity_constants_are_those_of_the_data_unless_asked_for(trained, other, world, tmp_path, place):
    """PSP changes with the constants that a data set carries, and does not where the caller gives his own."""

    def psp(data, **asked):
        if place == "evaluate":
            return evaluate(trained, data, num_resamples=0, **asked).metrics["PSP@3"]
        if place == "record":
            found = evaluate_run(trained, data, record=tmp_path / "r.json", **asked).record
            a, b = asked.get("propensity", data.propensity)
            assert (found["settings"]["propensity"]["a"], found["settings"]["propensity"]["b"]) == (a, b)
            return found["metrics"]["PSP@3"]
        if place == "compare":
            return (
                compare_runs([trained, other], data, num_resamples=10, **asked).reports[str(trained)].metrics["PSP@3"]
            )
        if place == "dial":
            return dial_curve(Predictor.load(trained), data, dials=[0.0], **asked).points[0.0]["PSP@3"]
        return unseen._score(Predictor.load(trained), data, data.test)["PSP@3"]

    amazon = dataclasses.replace(world, propensity=(0.6, 2.6))
    assert psp(amazon) != psp(world)
    if place != "unseen":
        assert psp(amazon, propensity=(0.55, 1.5)) == psp(world)


def test_training_without_some_labels_keeps_the_constants(world):
    amazon = dataclasses.replace(world, propensity=(0.6, 2.6))
    held_out = np.arange(world.num_labels) < 3
    assert unseen.without_labels(amazon, held_out).propensity == (0.6, 2.6)
