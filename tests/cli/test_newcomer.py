# ruff: noqa: F811 - fixtures of another file
"""What a newcomer tries first: one CSV file, a typing mistake, few data. Each ends well, or says what to do."""

import csv
import json

import pytest
import typer

from dexter.cli.main import app
from tests.cli.test_main import SETTINGS, data, error_line, run  # noqa: F401 - fixtures
from tests.conftest import make_world

READ_OPTIONS = {
    "--on-error",
    "--text-column",
    "--label-column",
    "--label-separator",
    "--text-fields",
    "--vocabulary",
    "--language",
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A data set as one file, with unusual column names."""
    world = make_world()
    path = tmp_path_factory.mktemp("table") / "articles.csv"
    with path.open("w", encoding="utf-8", newline="") as handle:
        cells = csv.writer(handle, delimiter=";")
        cells.writerow(["Nr", "Inhalt", "Schlagworte", "year"])
        for row, text in enumerate(world.train.texts):
            labels = [world.label_ids[column] for column in world.train.relevance[row].indices]
            cells.writerow([row, text, json.dumps(labels), 2000 + row % 10])
    return path


COLUMNS = ("--text-column", "Inhalt", "--label-column", "Schlagworte")


def verbs_with_data():
    """Every verb that has an argument or option for a data set, with its options."""
    for name, command in typer.main.get_command(app).commands.items():
        for inner in getattr(command, "commands", {"": command}).values():
            options = {option for one in inner.params for option in one.opts}
            if (options & {"data", "--data", "source"} and name != "labels") or (name, inner.name) == ("data", "check"):
                yield pytest.param(options, id=f"{name} {inner.name}")


@pytest.mark.parametrize("options", verbs_with_data())
def test_every_verb_that_reads_data_has_the_same_options(options):
    assert options >= READ_OPTIONS


def test_the_verbs_with_data_are_found():
    assert len(list(verbs_with_data())) >= 9


def test_one_file_from_split_to_predictions(run, table, tmp_path):
    code, shown, said = run("data", "split", table, tmp_path / "data", *COLUMNS, "--fraction", "0.2")
    assert code == 0 and " train queries, " in shown and " test queries, " in shown
    assert "columns separated by ';'" in said and "a list of labels in each cell" in said
    code, _, _ = run("train", tmp_path / "data", "--out", tmp_path / "run", *SETTINGS)
    assert code == 0
    assert "P@1" in run("evaluate", tmp_path / "run", tmp_path / "data")[1]
    output = tmp_path / "found.csv"
    code, _, said = run(
        "predict", tmp_path / "run", "--input", table, "--text-column", "Inhalt", "--output", output, "-k", 2
    )
    assert code == 0 and "text from 'Inhalt'" in said
    with output.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 2 * 400 and {row["rank"] for row in rows} == {"1", "2"}
    assert all(row["label_id"].startswith("L") for row in rows)


def test_a_table_without_a_text_column_is_an_error(run, table, trained):
    assert "no text column among 'Nr', 'Inhalt'" in error_line(run("--quiet", "predict", trained, "--input", table), 3)


def test_split_by_a_column(run, table, tmp_path):
    code, shown, _ = run("data", "split", table, tmp_path / "data", *COLUMNS, "--by", "year", "--fraction", "0.3")
    assert code == 0
    sizes = [int(part.split()[0]) for part in shown.split(": ")[1].split(", ")[:2]]
    assert sum(sizes) == 400 and sizes[1] % 40 == 0, "ten years of forty queries each stay together"
    line = error_line(run("--quiet", "data", "split", table, tmp_path / "other", *COLUMNS, "--by", "month"), 3)
    assert "no column 'month' among" in line


def test_evaluate_says_how_to_get_a_test_split(run, table, trained):
    assert "dexter data split DATA FOLDER" in error_line(run("--quiet", "evaluate", trained, table, *COLUMNS), 3)


def test_an_empty_input_is_reported(run, trained, tmp_path):
    (tmp_path / "none.txt").write_text("")
    code, out, said = run("predict", trained, "--input", tmp_path / "none.txt")
    assert (code, out) == (0, "") and "the input has no texts" in said


def test_an_unknown_suffix_of_the_output_is_refused(run, trained, tmp_path):
    line = error_line(run("predict", trained, "river", "--output", tmp_path / "x.xlsx"), 2)
    assert ".csv" in line and not (tmp_path / "x.xlsx").exists()


# What fails says so, and leaves nothing in the way


def test_a_run_that_fails_before_its_first_step_leaves_nothing(run, tmp_path):
    rows = "".join(f"{number},text {number},a\n" for number in range(3))
    (tmp_path / "few.csv").write_text(f"id,text,labels\n{rows}", encoding="utf-8")
    few = ("--quiet", "train", tmp_path / "few.csv", "--out", tmp_path / "run", *SETTINGS)
    line = error_line(run(*few), 3)
    assert "too few to hold out" in line and not (tmp_path / "run").exists()
    assert run(*few, "--set", "validation.fraction=0")[0] == 0, "the same folder is free for the next attempt"


@pytest.mark.parametrize("verb", ["predict", "evaluate", "tune", "labels list", "serve"])
def test_a_folder_that_is_no_run_is_an_error_that_says_so(run, data, verb):
    extra = {"predict": ["text"], "evaluate": [data], "tune": [data]}.get(verb, [])
    line = error_line(run("--quiet", *verb.split(), data, *extra), 4)
    assert f"{data}: not a run folder: give one that `dexter train DATA --out FOLDER` made" in line


def test_an_unfinished_run_is_not_tuned(run, data, trained, tmp_path):
    (tmp_path / "config.toml").write_text((trained / "config.toml").read_text())
    assert "the run is not finished: continue it" in error_line(run("--quiet", "tune", tmp_path, data), 4)


def test_few_validation_queries_say_why_there_are_no_probabilities(run, data, tmp_path):
    settings = [*SETTINGS, "--set", "validation.fraction=0.005"]
    code, _, said = run("train", data, "--out", tmp_path / "run", *settings)
    assert code == 0 and "no probabilities: too few labels are right on the" in said
    line = error_line(run("--quiet", "predict", tmp_path / "run", "river", "--threshold", "0.5"), 2)
    assert "this run has no probabilities" in line and "head" not in line


def test_a_precision_says_what_it_means(run, data, tmp_path):
    run("train", data, "--out", tmp_path / "run", *SETTINGS, "--set", "train.epochs=5")
    code, _, said = run("predict", tmp_path / "run", "river", "--best-f1")
    assert code == 0 and "or more; together they had the best F1 on validation" in said


def test_reciprocal_pairs_can_be_left_out(run, tmp_path):
    """Items are queries and labels; every test pair but one is the reverse of a training pair."""
    folder = tmp_path / "items"
    folder.mkdir()
    items = [f"i{number}" for number in range(40)]

    def write(name, rows):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    write("lbl.jsonl", [{"id": item, "text": f"item {item}"} for item in items])
    train = [{"id": item, "text": f"item {item}", "labels": [f"i{(n + 20) % 40}"]} for n, item in enumerate(items[:20])]
    test = [{"id": f"i{n}", "text": f"item i{n}", "labels": [f"i{n - 20}"]} for n in range(20, 30)]
    test[0]["labels"].append("i39")
    write("trn.jsonl", train)
    write("tst.jsonl", test)
    assert run("train", folder, "--out", tmp_path / "run", *SETTINGS, "--set", "validation.fraction=0")[0] == 0
    assert json.loads(run("evaluate", tmp_path / "run", folder, "--json")[1])["num_queries"] == 10
    code, out, said = run("evaluate", tmp_path / "run", folder, "--without-reciprocal", "--json")
    assert code == 0 and "10 of 11 test pairs have their reverse in training" in said
    record = json.loads(out)
    assert record["num_queries"] == 1 and record["settings"]["num_filter_pairs"] >= 1
    assert "--without-reciprocal" in run("data", "check", folder)[1]


def test_a_preview_of_new_labels_adds_nothing(run, trained, tmp_path):
    (tmp_path / "wrong.csv").write_text("id,text\n" + "".join(f"n{n},new {n}\n" for n in range(120)))
    code, out, said = run("labels", "add", trained, "--input", tmp_path / "wrong.csv", "--dry-run")
    assert code == 0 and "dry run, nothing is written: 120 added" in out and "and 115 more" in said
    assert json.loads(run("labels", "list", trained, "--json")[1])["total"] == 37
