"""Texts from files and pipes: two kinds of lines, ids and order kept, bad lines named, output whole or absent.

Many files are shared out among processes, resumed, and never mixed.
"""

import gzip
import io
import json
import os
import sys
import threading
from dataclasses import replace

import pytest

from dexter.errors import DataError, UsageError
from dexter.predict.files import Query, is_pattern, predict_files, predict_texts, write_lines
from dexter.predict.filters import LabelFilter
from dexter.predict.predictor import Prediction, Predictor
from dexter.predict.text_files import read_texts
from dexter.processes import Launch


class Echo:
    """Predicts a text's own words, so that what comes out shows what went in."""

    def predict_stream(self, texts, k, *, threshold=None, ids=(), exclude=(), only=None, bands=(), language=None):
        for text in texts:
            yield [Prediction(f"id-{word}", word, 1.0 / place) for place, word in enumerate(text.split()[:k], start=1)]


def read(tmp_path, content, name="q.txt"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(query.uid, query.text) for query in read_texts(path)]


def test_lines_are_texts_and_their_numbers_ids(tmp_path):
    content = "\ufefffirst\r\n\n  third  \n{not json\nlast\u2028one"
    assert read(tmp_path, content) == [("1", "first"), ("3", "  third  "), ("4", "{not json"), ("5", "last\u2028one")]


def test_json_lines_have_texts_and_ids(tmp_path):
    content = '{"text": "a", "uid": "x"}\n{"id": 7, "text": "b\\nc"}\n\n{"text": ""}\n'
    assert read(tmp_path, content) == [("x", "a"), ("7", "b\nc"), ("4", "")]
    assert read(tmp_path, content, "q.jsonl") == [("x", "a"), ("7", "b\nc"), ("4", "")]


def test_gzip_is_read_too(tmp_path):
    assert read(tmp_path, gzip.compress(b'{"text": "a"}\n'), "q.jsonl.gz") == [("1", "a")]


@pytest.mark.parametrize(
    ("content", "name", "line", "says"),
    [
        ('{"text": "a"}\nplain', "q.txt", 2, "not a JSON object"),
        ("plain", "q.jsonl", 1, "not a JSON object"),
        ('{"text": "a"}\n{"title": "b"}', "q.txt", 2, '"text" is missing'),
        ('{"text": 3}', "q.txt", 1, "must be a string"),
        ('{"text": "a", "uid": []}', "q.txt", 1, '"uid" must be a string'),
        ('{"text": "\\ud800"}', "q.txt", 1, "surrogate"),
        (b"fine\ncaf\xe9", "q.txt", 2, "not UTF-8"),
        (b"a\x00b", "q.txt", 1, "NUL"),
        (b"x" * (16 * 2**20 + 1), "q.txt", 1, "longer than"),
        (gzip.compress(b"fine\n" * 3)[:-9], "q.txt.gz", 1, "truncated or damaged"),
        (gzip.compress(b"fine\ncaf\xe9"), "q.txt.gz", 2, "not UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, name, line, says):
    with pytest.raises(DataError, match=says) as caught:
        read(tmp_path, content, name)
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith(f"{tmp_path / name}:")
    assert caught.value.line == line


def test_a_label_whose_id_is_its_text_is_printed_once():
    class Same:
        def predict_stream(self, texts, k, *, threshold=None, ids=(), exclude=(), only=None, bands=(), language=None):
            return ([Prediction("river", "river", 0.5), Prediction("L2", "river stone", 0.25)] for _ in texts)

    [block] = predict_texts(Same(), [Query("1", "old river")])
    assert block.splitlines() == ["old river", "   0.5000  river", "   0.2500  L2  river stone"]


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"missing\.txt: cannot be read"):
        list(read_texts(tmp_path / "missing.txt"))


def test_stdin_and_named_pipes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\nb")))
    assert list(read_texts(None)) == [Query("1", "a"), Query("2", "b")]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(DataError, match="stdin:1"):
        list(read_texts(None))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("c\n"))
    writer.start()
    assert list(read_texts(pipe)) == [Query("1", "c")]
    writer.join()


QUERIES = [Query("q1", "red  car"), Query("q2", "a\tb\x1b[31m " + "x" * 200)]


def test_text_is_readable_and_cannot_move_the_cursor():
    lines = list(predict_texts(Echo(), QUERIES, k=2))
    assert lines[0] == "red car\n   1.0000  id-red  red\n   0.5000  id-car  car"
    assert "\x1b" not in lines[1]
    assert len(lines[1].splitlines()[0]) < 102


def test_jsonl_and_tsv_keep_ids_and_order():
    objects = [json.loads(line) for line in predict_texts(Echo(), QUERIES, k=1, form="jsonl")]
    assert objects[0] == {"id": "q1", "labels": [{"id": "id-red", "text": "red", "score": 1.0, "rank": 1}]}
    assert [entry["id"] for entry in objects] == ["q1", "q2"]
    assert next(predict_texts(Echo(), QUERIES, k=2, form="tsv")) == "q1\tid-red\t1.000000\tid-car\t0.500000"


def test_empty_texts_are_told_once(caplog):
    queries = [Query("1", ""), Query("2", "red"), Query("3", " \t")]
    assert len(list(predict_texts(Echo(), queries, k=1))) == 3
    assert [record.message for record in caplog.records] == [
        "2 of the texts are empty: their labels say only what is common"
    ]
    caplog.clear()
    list(predict_texts(Echo(), QUERIES, k=1))
    assert not caplog.records


def test_an_unknown_form_is_named():
    with pytest.raises(UsageError, match="expected one of text, jsonl, tsv"):
        next(predict_texts(Echo(), QUERIES, k=1, form="xml"))


def test_a_file_is_whole_or_absent(tmp_path):
    def failing():
        yield "one"
        raise DataError("bad")

    with pytest.raises(DataError):
        write_lines(failing(), tmp_path / "out.txt")
    assert list(tmp_path.iterdir()) == []
    write_lines(iter(["one", "two"]), tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text() == "one\ntwo\n"


def test_stdout_gets_lines_as_they_come(capsys):
    write_lines(iter(["one", "two"]), None)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_the_name_of_the_output_decides_the_form():
    from pathlib import Path

    from dexter.predict.files import form_of

    forms = [form_of(path) for path in (None, Path("p.jsonl"), Path("p.tsv"), Path("p.CSV"), Path("p.txt"), Path("p"))]
    assert forms == ["text", "jsonl", "tsv", "csv", "text", "text"]
    with pytest.raises(UsageError, match=r"expected an ending of \.txt, \.jsonl, \.tsv or \.csv"):
        form_of(Path("p.xlsx"))


@pytest.fixture(scope="module")
def predictor(trained):
    return Predictor.load(trained)


@pytest.fixture
def parts(tmp_path):
    for number in range(5):
        lines = [json.dumps({"uid": f"{number}-{line}", "text": "river stone"}) for line in range(number + 1)]
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "part-*.jsonl")


def uids(folder):
    paths = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line)["id"] for path in paths for line in path.read_text().splitlines()]


def test_every_file_once_whatever_the_number_of_processes(predictor, parts, tmp_path):
    for size in (1, 2, 7):
        folder = tmp_path / f"out-{size}"
        shares = [predict_files(predictor, parts, folder, k=2, launch=Launch(rank, size)) for rank in range(size)]
        assert len([path for share in shares for path in share]) == 5
        assert uids(folder) == [f"{number}-{line}" for number in range(5) for line in range(number + 1)]


def test_finished_files_are_kept_and_leftovers_replaced(predictor, parts, tmp_path):
    folder = tmp_path / "out"
    predict_files(predictor, parts, folder, k=2)
    (folder / "part-3.jsonl").unlink()
    (folder / ".tmp-1-part-3.jsonl").write_text("half a")
    before = (folder / "part-1.jsonl").stat().st_mtime_ns
    assert predict_files(predictor, parts, folder, k=2, launch=Launch(0, 1)) == [folder / "part-3.jsonl"]
    assert (folder / "part-1.jsonl").stat().st_mtime_ns == before
    assert not list(folder.glob(".tmp-*"))


def test_other_settings_and_other_folders_are_refused(predictor, parts, tmp_path):
    predict_files(predictor, parts, tmp_path / "out", k=2)
    with pytest.raises(UsageError, match="choose another"):
        predict_files(predictor, parts, tmp_path / "out", k=3)
    with pytest.raises(UsageError, match="holds other files"):
        predict_files(predictor, parts, tmp_path, k=2, form="tsv")
    with pytest.raises(UsageError, match="would replace"):
        predict_files(predictor, parts, tmp_path, k=2)
    with pytest.raises(DataError, match="no file"):
        predict_files(predictor, str(tmp_path / "none-*"), tmp_path / "other", k=2)


def test_two_files_of_one_name_are_refused(predictor, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.txt").write_text("river\n")
    with pytest.raises(UsageError, match="one output"):
        predict_files(predictor, str(tmp_path / "*" / "texts.txt"), tmp_path / "out", k=1)


def test_a_file_with_magic_in_its_name_is_a_file(tmp_path):
    (tmp_path / "part[1].jsonl").write_text("")
    assert not is_pattern(str(tmp_path / "part[1].jsonl"))
    assert is_pattern(str(tmp_path / "part[2].jsonl"))


def test_tables_are_read_as_training_reads_them(tmp_path):
    table = tmp_path / "queries.csv"
    table.write_text('uid,title,body,labels\na1,"One, two",three,x|y\n,"Fo\nur",,\n', encoding="utf-8")
    assert list(read_texts(table)) == [Query("a1", "One, two three", has_id=True), Query("3", "Fo\nur")]
    assert [query.text for query in read_texts(table, text_column="body")] == ["three", ""]
    (tmp_path / "queries.tsv").write_text("id\ttext\n7\tseven\n", encoding="utf-8")
    assert list(read_texts(tmp_path / "queries.tsv")) == [Query("7", "seven", has_id=True)]
    table.write_text("text\nno ids here\n", encoding="utf-8")
    assert list(read_texts(table)) == [Query("2", "no ids here")]
    table.write_text("id;text\n1;semicolons, commas\n", encoding="utf-8")
    assert list(read_texts(table)) == [Query("1", "semicolons, commas", has_id=True)]
    table.write_text("the first text\nthe end\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no text column among 'the first text': name it with --text-column"):
        list(read_texts(table))
    table.write_text("uid,text\n1,2,3\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"queries\.csv:2: got 3 cells"):
        list(read_texts(table))
    with pytest.raises(UsageError, match="--text-column applies to tables"):
        list(read_texts(tmp_path / "queries.txt", text_column="text"))


def test_csv_has_a_header_and_a_row_per_label(caplog):
    lines = list(predict_texts(Echo(), QUERIES[:1], k=2, form="csv"))
    assert lines[0] == "id,rank,label_id,label_text,score,probability"
    assert lines[1].splitlines() == ["q1,1,id-red,red,1.0,", "q1,2,id-car,car,0.5,"]


def test_an_empty_input_is_reported(caplog):
    assert list(predict_texts(Echo(), [], k=2, form="jsonl")) == []
    assert "the input has no texts" in caplog.text


def test_own_labels_are_left_out_where_the_input_has_an_id(trained, world):
    predictor = Predictor.load(trained)
    facts = predictor.model.facts | {"own_labels": {"setting": "auto", "by_id": True}}
    predictor = Predictor(replace(predictor.model, facts=facts), predictor.choice)
    text = world.label_texts[4]
    lines = predict_texts(predictor, [Query("L4", text, has_id=True), Query("L4", text)], k=37, form="jsonl")
    with_id, without = ([label["id"] for label in json.loads(line)["labels"]] for line in lines)
    assert "L4" not in with_id and "L4" in without


def test_predictions_with_other_filters_go_to_another_folder(trained, tmp_path):
    predictor = Predictor.load(trained)
    (tmp_path / "part-1.txt").write_text("river\n", encoding="utf-8")
    out, pattern = tmp_path / "out", str(tmp_path / "part-*.txt")
    predict_files(predictor, pattern, out, labels=LabelFilter(only=("L1",)))
    assert [label["id"] for label in json.loads((out / "part-1.jsonl").read_text())["labels"]] == ["L1"]
    assert predict_files(predictor, pattern, out, labels=LabelFilter(only=("L1",))) == []
    with pytest.raises(UsageError, match="choose another"):
        predict_files(predictor, pattern, out, labels=LabelFilter(only=("L2",)))
