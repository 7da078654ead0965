"""Tables as people save them: lists in cells, semicolons between columns."""

import pytest

from dexter.data.formats import load_dataset
from dexter.data.formats.columns import choose_delimiter, parse_list
from dexter.errors import DataError


@pytest.mark.parametrize(
    ("cell", "items"),
    [
        ('["a", "b"]', ["a", "b"]),
        ("['a', 'b']", ["a", "b"]),
        ("['a' 'b']", ["a", "b"]),
        ("['a'\n 'b']", ["a", "b"]),
        ("[\"it's\", 'b, c']", ["it's", "b, c"]),
        (r"['it\'s']", ["it's"]),
        (r'["caf\u00e9"]', ["café"]),
        ("[1, 2.5, -3]", ["1", "2.5", "-3"]),
        (" [] ", []),
        ("[a, b]", None),
        ("['a', b]", None),
        ("['a'x]", None),
        ("a, b", None),
        ("['a", None),
    ],
)
def test_lists_of_json_python_and_numpy(cell, items):
    assert parse_list(cell) == items


@pytest.mark.parametrize(
    ("header", "usual", "expected"),
    [
        ("id,text,labels", ",", ","),
        ("id;text;labels", ",", ";"),
        ('"id";"text";"labels"', ",", ";"),
        ("a;b;c", ",", ";"),
        ("a,b;c", ",", ","),
        ("Nr;Title, long;Tags", ",", ";"),
        ("text", ",", ","),
        ("id\ttext\tlabels", ",", "\t"),
        ("id,text,labels", "\t", ","),
        ("text,labels|other", ",", ","),
    ],
)
def test_the_delimiter_is_what_gives_known_names(header, usual, expected):
    assert choose_delimiter(header, usual) == expected


@pytest.mark.parametrize("form", ['["a","b"]', "['a', 'b']", "['a' 'b']"])
def test_cells_with_lists_are_labels(tmp_path, caplog, form):
    caplog.set_level("INFO", logger="dexter")
    quoted = form.replace('"', '""')
    (tmp_path / "x.csv").write_text(f'id,text,labels\n1,one,"{quoted}"\n2,two,[]\n3,three,\n', encoding="utf-8")
    data = load_dataset(tmp_path / "x.csv")
    assert data.label_ids == ("a", "b")
    assert data.train.relevance.toarray().tolist() == [[1, 1], [0, 0], [0, 0]]
    assert "a list of labels in each cell" in caplog.text


def test_a_cell_that_is_no_list_among_lists_is_a_bad_record(tmp_path):
    rows = "".join(f"{number},one,\"['a']\"\n" for number in range(300))
    (tmp_path / "x.csv").write_text(f"id,text,labels\n{rows}300,last,a|b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"x\.csv:302: expected a list such as"):
        load_dataset(tmp_path / "x.csv")
    assert len(load_dataset(tmp_path / "x.csv", on_error="skip").train) == 300


def test_labels_in_brackets_stay_labels(tmp_path):
    (tmp_path / "train.csv").write_text("text,labels\none,[1]\n", encoding="utf-8")
    (tmp_path / "labels.csv").write_text("id,text\n[1],first\n", encoding="utf-8")
    assert load_dataset(tmp_path).train.relevance.nnz == 1


def test_semicolons_between_columns_are_found_and_logged(tmp_path, caplog):
    caplog.set_level("INFO", logger="dexter")
    (tmp_path / "x.csv").write_text('id;text;labels\n1;"one; two, three";a,b\n2;four;b\n', encoding="utf-8")
    data = load_dataset(tmp_path / "x.csv")
    assert data.train.texts == ("one; two, three", "four")
    assert data.label_ids == ("a", "b")
    assert "x.csv: columns separated by ';'" in caplog.text
