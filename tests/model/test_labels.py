"""Looking at labels: search by id and text, likeness, the warning about duplicates; the verbs of the command line."""

import json

import numpy as np
import pytest

from dexter import Predictor
from dexter.errors import UsageError
from dexter.model.labels import Labels
from dexter.model.similar import normal_text
from tests.cli.test_main import error_line, run  # noqa: F401 - fixtures

NAMES = [("t1", "Linear algebra"), ("t2", "Algebra"), ("alg-3", "numbers"), ("t4", "ALGEBRAIC geometry"), ("t5", "x")]
LABELS = Labels([name for name, _ in NAMES], [text for _, text in NAMES], np.arange(5))


@pytest.fixture
def place(trained, tmp_path):
    import shutil

    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(
    ("query", "found"),
    [("alg", ["t2", "alg-3", "t4", "t1"]), ("ALGEBRA", ["t2", "t4", "t1"]), ("zz", []), ("  t5 ", ["t5"])],
)
def test_what_begins_with_the_query_comes_first(query, found):
    page = LABELS.search(query)
    assert [label.id for label in page.labels] == found
    assert page.total == len(found)


def test_pages(trained):
    predictor = Predictor.load(trained)
    everything = predictor.search_labels("", limit=None)
    assert everything.total == len(everything.labels) == len(predictor.labels.ids)
    pages = [predictor.search_labels("", limit=10, offset=start).labels for start in range(0, 40, 10)]
    assert [len(page) for page in pages] == [10, 10, 10, 7]
    assert [label for page in pages for label in page] == everything.labels
    with pytest.raises(UsageError, match="0 or more"):
        predictor.search_labels("", offset=-1)


@pytest.mark.parametrize(
    ("one", "other"), [("C++ basics", "c basics"), ("Ｒｉｖｅｒ  stone", "river-stone"), ("straße", "STRASSE")]
)
def test_texts_that_are_the_same(one, other):
    assert normal_text(one) == normal_text(other)


def test_texts_of_punctuation_only_differ():
    assert normal_text("+++") != normal_text("---")


def test_similar_labels_of_a_labels_own_text(trained, world):
    predictor = Predictor.load(trained)
    for row in (0, 17, 36):
        found = predictor.similar_labels(world.label_texts[row].upper(), k=3)
        assert found[0].id == world.label_ids[row] and found[0].same_text and len(found) == 3
    with pytest.raises(UsageError, match="k must be 1 or more"):
        predictor.similar_labels("x", k=0)


def test_a_duplicate_is_added_with_a_warning_that_names_the_others(trained, world):
    predictor = Predictor.load(trained)
    text = world.label_texts[5]
    result = predictor.add_labels([("copy", f"  {text.upper()}!"), ("fine", "about some very small")])
    [duplicate] = result.duplicates
    assert duplicate.id == "copy" and duplicate.resembles[0].id == "L5" and duplicate.resembles[0].same_text
    assert str(duplicate).startswith("label 'copy' (") and f"looks like 'L5' ({text!r}, " in str(duplicate)
    assert "copy" in predictor.labels.ids


def test_duplicates_within_one_edit_and_by_a_new_text(trained, world):
    predictor = Predictor.load(trained)
    twins = predictor.add_labels([("one", "meadow of falcons"), ("two", "Meadow of falcons")]).duplicates
    assert {duplicate.id for duplicate in twins} == {"one", "two"}
    [renamed] = predictor.rename_labels([("L1", world.label_texts[2])]).duplicates
    assert renamed.id == "L1" and renamed.resembles[0].id == "L2"


def test_words_in_another_order_are_alike_by_vector(trained, world):
    predictor = Predictor.load(trained)
    first = predictor.add_labels([("a", "orchid of lanterns needle")]).version
    result = predictor.add_labels([("b", "needle of lanterns orchid")])
    assert result.version == first + 1
    assert "a" in [label.id for duplicate in result.duplicates for label in duplicate.resembles]


def test_the_verbs(run, place, tmp_path):  # noqa: F811
    code, shown, said = run("labels", "add", place, "mine", "river of stones")
    assert code == 0 and shown == f"{place}: 1 added; now 38 labels, version 1\n"
    (tmp_path / "more.jsonl").write_text('{"id": "a", "text": "River of stones"}\n{"uid": 7, "text": "b"}\n')
    code, shown, said = run("labels", "add", place, "--input", tmp_path / "more.jsonl")
    assert shown.endswith("2 added; now 40 labels, version 2\n")
    assert said.startswith("warning: label 'a' ('River of stones') looks like 'mine' ('river of stones', 1.00)")
    (tmp_path / "more.csv").write_text('id,text\nc,"one, two"\n')
    assert run("labels", "add", place, "--input", tmp_path / "more.csv")[0] == 0
    assert run("labels", "rename", place, "mine", "river of pebbles")[1].endswith("version 4\n")
    assert json.loads(run("labels", "remove", place, "a", "7", "--json")[1]) == {
        "run": str(place),
        "version": 5,
        "num_labels": 39,
        "duplicates": [],
    }
    assert run("labels", "compact", place)[1] == f"{place}: version 5, compacted\n"
    assert run("labels", "search", place, "RIVER OF")[1] == "mine\t0\triver of pebbles\n"
    listed = run("labels", "list", place, "--offset", 37)
    assert listed[1:] == ("mine\t0\triver of pebbles\nc\t0\tone, two\n", "2 of 39 labels\n")
    page = json.loads(run("labels", "search", place, "one", "--json", "--limit", 1)[1])
    assert page["labels"][0]["id"] == "c"
    assert run("predict", place, "some old river of pebbles", "-k", 1)[1].split()[-4:] == [
        "mine",
        "river",
        "of",
        "pebbles",
    ]


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (["add", "RUN"], "give ID and TEXT", 2),
        (["add", "RUN", "x"], "give ID and TEXT", 2),
        (["add", "RUN", "x", "y", "--input", "z.jsonl"], "give ID and TEXT", 2),
        (["add", "RUN", "L1", "y"], "'L1' is in use already", 2),
        (["add", "RUN", "", "y"], "an id must not be empty", 2),
        (["add", "RUN", "x", "  "], "label 'x' has no text", 2),
        (["rename", "RUN", "L1", ""], "label 'L1' has no text", 2),
        (["remove", "RUN", "nobody"], "no label has the id 'nobody'", 2),
        (["rename", "RUN", "nobody", "x"], "no label has the id 'nobody'", 2),
        (["search", "RUN", "x", "--limit", "-1"], "must be 0 or more", 2),
        (["add", "RUN", "--input", "missing.jsonl"], "cannot be read", 3),
        (["add", "RUN", "--input", "labels.xml"], "ends in .jsonl, .csv", 3),
        (["add", "missing", "x", "y"], "no such run folder", 4),
    ],
)
def test_bad_input_is_one_line(run, trained, arguments, says, code):  # noqa: F811
    given = [str(trained) if argument == "RUN" else argument for argument in arguments]
    assert says in error_line(run("labels", *given), code)
    assert not (trained / "model" / "labels.sqlite").exists()


def test_bad_lines_of_a_file_of_labels(run, place, tmp_path):  # noqa: F811
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": "x", "text": "fine"}\n{"text": "no id"}\n')
    assert f"{bad}:2: the label has no id" in error_line(run("labels", "add", place, "--input", bad), 3)
    bad.write_text('{"id": "x", "text": "fine"}\n{"id": "x", "text": "twice"}\n')
    assert f"{bad}:2: label id 'x' was given before" in error_line(run("labels", "add", place, "--input", bad), 3)
    assert not (place / "model" / "labels.sqlite").exists()


def test_a_second_writer_is_one_line(run, place):  # noqa: F811
    from dexter.model.published import fingerprint
    from dexter.model.store import LabelStore

    assert run("labels", "add", place, "w", "x")[0] == 0
    with LabelStore(place / "model", fingerprint=fingerprint(place / "model"), dimension=32, num_priors=1).writing():
        assert "another process is changing the labels" in error_line(run("labels", "add", place, "x", "y"), 5)


def test_the_verbs_of_the_history(run, place, tmp_path):  # noqa: F811
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(
        "".join(json.dumps({"id": f"w{number}", "text": f"wrong {number}"}) + "\n" for number in range(120))
    )
    code, out, err = run("labels", "add", place, "--input", wrong, "--dry-run")
    assert code == 0 and "nothing is written: 120 added" in out and "w4  wrong 4" in err and "and 115 more" in err
    assert run("labels", "history", place)[1] == ""
    assert run("labels", "add", place, "--input", wrong)[0] == 0
    assert run("labels", "backup", place, tmp_path / "copy.sqlite")[0] == 0
    code, out, _ = run("labels", "undo", place)
    assert code == 0 and "120 removed (undoes 1); now 37 labels, version 2" in out
    newest, oldest = run("labels", "history", place)[1].splitlines()
    assert "120 removed (undoes 1)" in newest and "120 added, undone" in oldest
    assert json.loads(run("labels", "history", place, "--label", "w3", "--json")[1])[-1]["added"] == 120
    assert "now 157 labels, version 3" in run("labels", "restore", place, tmp_path / "copy.sqlite")[1]
    assert "whole; 157 labels, 120 changed since training" in run("labels", "verify", place)[1]
    (place / "model" / "labels.sqlite").write_bytes(b"x" * 5_000)
    error_line(run("labels", "verify", place), 4)
    assert run("labels", "restore", place, tmp_path / "copy.sqlite")[0] == 0
    assert len(Predictor.load(place).labels.ids) == 157
