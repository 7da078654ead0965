"""`dexter examples`: from a file or one text, listed, removed, exported, and read again by `train`."""

import json
import shutil

import pytest
from typer.testing import CliRunner

import dexter
from dexter.cli.main import app
from dexter.data.formats import load_dataset, save_dataset
from dexter.errors import UsageError
from tests.conftest import SMALL

TEXT = "the old ferry timetable of the harbor office"


@pytest.fixture
def run(trained, tmp_path):
    return str(shutil.copytree(trained, tmp_path / "run"))


def call(*arguments):
    result = CliRunner().invoke(app, ["examples", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_file_of_corrections_changes_the_next_prediction(run, tmp_path, kind):
    file = tmp_path / f"corrections.{kind}"
    lines = {"jsonl": json.dumps({"text": TEXT, "labels": ["L7", "L9"]}), "csv": f'text,labels\n"{TEXT}","L7;L9"'}
    file.write_text(lines[kind] + "\n")
    assert "1 added; 1 in all, version 1" in call("add", run, file)
    assert {each.id for each in dexter.Predictor.load(run).predict([TEXT], k=2)[0]} == {"L7", "L9"}
    [listed] = json.loads(call("list", run, "--json"))
    assert listed["text"] == TEXT and listed["labels"] == ["L7", "L9"]
    assert TEXT in call("list", run)
    assert json.loads(call("remove", run, listed["id"], "--json")) == {"version": 2, "examples": 0}


def test_one_text_and_a_label_that_is_not_there_yet(run):
    with pytest.raises(UsageError, match="--add-labels"):
        call("add", run, "--text", TEXT, "--label", "ferries")
    call("add", run, "--text", TEXT, "--label", "ferries", "--add-labels")
    assert dexter.Predictor.load(run).predict([TEXT], k=1)[0][0].id == "ferries"
    for wrong in ([], ["--text", TEXT], ["--label", "L1"]):
        with pytest.raises(UsageError, match="give a FILE"):
            call("add", run, *wrong)


def test_what_is_exported_is_trained_on(run, world, tmp_path):
    save_dataset(world, tmp_path / "world")
    call("add", run, "--text", TEXT, "--label", "ferries", "--add-labels")
    call("export", run, "--to", tmp_path / "more", "--with", tmp_path / "world")
    data = load_dataset(tmp_path / "more")
    assert len(data.train) == len(world.train) + 1 and data.num_labels == world.num_labels + 1
    dexter.train(data, out=tmp_path / "again", overrides=SMALL)
    assert "ferries" in dexter.Predictor.load(tmp_path / "again").labels.ids
