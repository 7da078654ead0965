"""The model card: figures of the run, metadata that the hub reads, and nothing of somebody else that is obeyed."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from dexter.cli import main as cli
from dexter.errors import UsageError
from dexter.evaluation.card import write_card
from dexter.evaluation.runs import evaluate_run
from dexter.files import verify_manifest
from dexter.predict.predictor import Predictor


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def card_of(run):
    return (run / "model" / "README.md").read_text(encoding="utf-8")


def test_an_evaluation_writes_the_card_with_its_figures(run, world):
    report = evaluate_run(run, world).report
    text, interval = card_of(run), report.intervals["P@1"]
    assert f"| P@1 | {report.metrics['P@1']:.2f} | {interval.low:.2f} to {interval.high:.2f} |" in text
    band = report.by_frequency["torso"]
    assert f"| torso | {band['P@1']:.2f} | {band['P@5']:.2f} | {band['R@10']:.2f} |" in text
    assert f"{report.calibration['calibrated']:.2f} (softmax: {report.calibration['softmax']:.2f})" in text
    assert "Ranks 37 labels" in text and "recipe `dexter`" in text and "encoder.dimension = 32" in text
    Predictor.load(run)
    verify_manifest(run / "model")


def test_the_hub_reads_the_metadata(run, world):
    cards = pytest.importorskip("huggingface_hub").ModelCard
    report = evaluate_run(run, world).report
    write_card(run, license_id="cc-by-4.0")
    data = cards.load(run / "model" / "README.md").data
    assert (data.license, data.library_name, data.pipeline_tag) == ("cc-by-4.0", "dexter", "text-classification")
    results = {each.metric_name: each for each in data.eval_results}
    assert results["P@1"].metric_value == round(report.metrics["P@1"], 2)
    assert (results["P@1"].dataset_name, results["P@1"].metric_type) == ("world", "p-at-1")


def test_a_card_without_an_evaluation_has_the_validation_figures(run):
    write_card(run)
    assert "No test queries were scored" in card_of(run) and "model-index" not in card_of(run)


def test_the_licence_stays(run, world):
    write_card(run)
    assert 'license: "unknown"' in card_of(run) and "None was stated" in card_of(run)
    write_card(run, license_id="apache-2.0")
    evaluate_run(run, world)
    assert 'license: "apache-2.0"' in card_of(run)
    with pytest.raises(UsageError, match="identifier"):
        write_card(run, license_id="a\nb: c")


def test_results_of_another_ranking_or_model_are_left_out(run, world):
    evaluate_run(run, world, dial=0.0)
    assert not (run / "model" / "README.md").exists()
    [path] = (run / "results").glob("*-test-*.json")
    write_card(run)
    assert "No test queries were scored" in card_of(run)
    evaluate_run(run, world)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"model": {"sha256": "another"}}))
    (run / "results" / "broken.json").write_text("{")
    (run / "results" / "foreign.json").write_text(json.dumps(record | {"metrics": {"P@1": "<script>"}}))
    write_card(run)
    assert "No test queries were scored" in card_of(run) and "<script>" not in card_of(run)


def test_markup_in_names_is_not_rendered(run, world):
    evaluate_run(run, world)
    [path] = (run / "results").glob("*-test-*.json")
    record = json.loads(path.read_text())
    record["data"]["name"] = "x\n---\nlicense: mit\n[a](javascript:b) <img src=x>\x1b[2J | `c`"
    path.write_text(json.dumps(record))
    write_card(run)
    front, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", card_of(run), re.DOTALL).groups()
    assert [line.partition(":")[0] for line in front.splitlines()] == [
        "library_name", "license", "pipeline_tag", "tags", "model-index",
    ]  # fmt: skip
    assert "<img" not in body and "](javascript" not in body and "\x1b" not in body


def test_a_card_from_elsewhere_is_neither_read_nor_followed_as_a_link(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('license: "stolen"\n')
    page = run / "model" / "README.md"
    page.symlink_to(secret)
    Predictor.load(run)
    write_card(run)
    assert not page.is_symlink() and secret.read_text() == 'license: "stolen"\n' and "stolen" not in card_of(run)
    os.truncate(page, 0)
    page.write_bytes(b'license: "x"\n' * 2**18)
    write_card(run)
    assert 'license: "unknown"' in card_of(run)


def test_the_verb_prints_the_path_of_the_card(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dexter", "card", str(run), "--license", "mit"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert Path(capsys.readouterr().out.strip()) == run / "model" / "README.md"
