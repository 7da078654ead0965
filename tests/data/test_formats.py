"""Every format: written and read back, detected; guesses and what a format cannot hold are logged."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split
from dexter.data.formats import FORMATS, detect, load_dataset, save_dataset
from dexter.data.formats.reader import SplitBuilder
from dexter.errors import DataError, UsageError

WRITABLE = [name for name, one in FORMATS.items() if one.write is not None]
KEEPS_IDS = ("jsonl", "csv", "tsv", "parquet", "xmc-json")
KEEPS_WEIGHTS = (*KEEPS_IDS, "dexml", "xmc-text")
KEEPS_ANY_TEXT = ("jsonl", "parquet", "xmc-json")


def sample(*, weights: bool = True, filtered: bool = True, test: bool = True) -> Dataset:
    """Three labels, one of them never used in train; a row without labels; graded weights; filter pairs."""
    values = [0.5, 1.0, 0.1] if weights else [1.0, 1.0, 1.0]
    train = csr_matrix((np.array(values, dtype=np.float32), ([0, 0, 2], [0, 1, 1])), shape=(3, 3))
    other = csr_matrix((np.ones(2, dtype=np.float32), ([0, 1], [2, 0])), shape=(2, 3))
    pairs = csr_matrix((np.ones(2), ([0, 1], [1, 2])), shape=(2, 3)) if filtered else None
    return Dataset(
        name="sample",
        label_ids=["http://x/a", "http://x/b", "http://x/c"],
        label_texts=["alpha, first", "beta", "gamma δ"],
        train=Split(texts=["one two", "no labels", 'three "quoted", cell'], uids=["q1", "q2", "q3"], relevance=train),
        test=Split(texts=["five", "six 語"], uids=["t1", "t2"], relevance=other, filtered=pairs) if test else None,
    )


def assert_same(got: Dataset, want: Dataset, *, kind: str) -> None:
    assert list(got.splits) == list(want.splits)
    for name, split in want.splits.items():
        assert got.splits[name].texts == split.texts
        dense, wanted = got.splits[name].relevance, split.relevance
        if kind not in KEEPS_WEIGHTS:
            wanted = wanted > 0
        if kind == "fasttext":  # labels in order of appearance
            dense = dense[:, [got.label_ids.index(one) for one in want.label_ids]]
        np.testing.assert_array_equal(dense.toarray(), wanted.toarray())
        if split.filtered is not None and kind != "fasttext":
            np.testing.assert_array_equal(got.splits[name].filtered.toarray(), split.filtered.toarray())
        if kind in KEEPS_IDS:
            assert got.splits[name].uids == split.uids
    if kind != "fasttext":
        assert got.label_texts == want.label_texts
    if kind not in ("dexml", "xmc-text"):
        assert sorted(got.label_ids) == sorted(want.label_ids)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("kind", WRITABLE)
def test_round_trip(tmp_path: Path, kind: str, compress: bool, logged: list[str]) -> None:
    data, folder = sample(), tmp_path / "out"
    save_dataset(data, folder, format=kind, gzip=compress)
    assert detect(folder) == kind
    logged.clear()
    back = load_dataset(folder)
    assert logged[0] == f"read as {kind}"
    assert_same(back, data, kind=kind)


@pytest.mark.parametrize("kind", WRITABLE)
def test_train_only(tmp_path: Path, kind: str) -> None:
    data = sample(test=False)
    if kind == "fasttext":  # it knows only labels that occur
        data = Dataset(
            name="x", label_ids=data.label_ids[:2], label_texts=data.label_texts[:2],
            train=Split(texts=data.train.texts, uids=data.train.uids, relevance=data.train.relevance[:, :2]),
        )  # fmt: skip
    save_dataset(data, tmp_path / "out", format=kind)
    back = load_dataset(tmp_path / "out")
    assert back.test is None
    assert_same(back, data, kind=kind)


TEXT = st.text(max_size=20)
IDS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True)


def build(texts: list[str], ids: list[str], rows: list[list[int]], uids: list[str] | None = None) -> Dataset:
    matrix = csr_matrix((len(texts), len(ids)), dtype=np.float32).tolil()
    for row, columns in enumerate(rows):
        for column in columns:
            matrix[row, column % len(ids)] = 1 + column / 4
    uids = uids or [str(row) for row in range(len(texts))]
    split = Split(texts=texts, uids=uids, relevance=matrix.tocsr())
    return Dataset(name="x", label_ids=ids, label_texts=[f"text of {one}" for one in ids], train=split)


def fits_a_cell(ids: Sequence[str]) -> bool:
    return "\0" not in "".join(ids) and not all(any(one in label for label in ids) for one in "|;, ")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "parquet", "xmc-json"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_unicode_round_trip(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    """Formats with ids: any Unicode text and ids come back the same (CSV and TSV: NUL as a space)."""
    texts = data.draw(st.lists(TEXT, min_size=1, max_size=4))
    rows = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=len(texts), max_size=len(texts)))
    want = build(texts, data.draw(IDS), rows)
    if kind in ("csv", "tsv") and not fits_a_cell(want.label_ids):
        with pytest.raises(DataError, match="label id"):
            save_dataset(want, tmp_path / "out", format=kind, replace=True)
        return
    save_dataset(want, tmp_path / "out", format=kind, replace=True)
    got = load_dataset(tmp_path / "out")
    expected = want.train.texts if kind in KEEPS_ANY_TEXT else tuple(t.replace("\0", " ") for t in want.train.texts)
    assert got.train.texts == expected
    assert got.label_ids == want.label_ids
    np.testing.assert_array_equal(got.train.relevance.toarray(), want.train.relevance.toarray())


@pytest.mark.parametrize("kind", ["dexml", "xmc-text", "fasttext", "annif"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
def test_line_formats_write_breaks_as_spaces(tmp_path: Path, kind: str, logged: list[str], texts: list[str]) -> None:
    """One line per text: line breaks, tabs, NULs and byte order marks become spaces, and that is logged."""
    want = build(texts, ["a", "b"], [[row] for row in range(len(texts))])
    logged.clear()
    save_dataset(want, tmp_path / "out", format=kind, replace=True)
    flat = tuple(text.translate(str.maketrans(dict.fromkeys("\0\t\n\r\ufeff", " "))) for text in texts)
    assert load_dataset(tmp_path / "out").train.texts == flat
    assert any("now spaces" in line for line in logged) == (flat != tuple(texts))
    assert any("does not keep query ids" in line for line in logged)


@pytest.mark.parametrize(
    ("kind", "label_id", "text", "says"),
    [
        ("fasttext", "two words", "x", "white space"),
        ("fasttext", "a", "in __label__b text", "starts with __label__"),
        ("fasttext", "", "x", "empty"),
        ("annif", "two words", "x", "white space"),
        ("annif", "<a>", "x", "angle brackets"),
        ("csv", "a|b;c,d e", "x", "none can separate"),
        ("csv", "", "x", "empty"),
        ("parquet", "", "x", "empty"),
        ("jsonl", "a", "half \ud800", "surrogate"),
        ("parquet", "a", "half \ud800", "surrogate"),
    ],
)
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, kind: str, label_id: str, text: str, says: str
) -> None:
    with pytest.raises(DataError, match=says):
        save_dataset(build([text], [label_id], [[0]]), tmp_path / "out", format=kind)
    assert list(tmp_path.iterdir()) == []


def test_same_data_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_dataset(sample(), tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_save_refuses_an_existing_folder(tmp_path: Path) -> None:
    save_dataset(sample(), tmp_path / "out")
    before = (tmp_path / "out" / "trn.jsonl.gz").read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        save_dataset(build(["x"], ["a"], [[0]]), tmp_path / "out")
    assert (tmp_path / "out" / "trn.jsonl.gz").read_bytes() == before
    save_dataset(build(["x"], ["a"], [[0]]), tmp_path / "out", replace=True)
    assert len(load_dataset(tmp_path / "out").train) == 1


def test_read_only_and_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"svmlight is read only: .* jsonl, csv"):
        save_dataset(sample(), tmp_path / "out", format="svmlight")
    with pytest.raises(UsageError, match="choose one of jsonl"):
        save_dataset(sample(), tmp_path / "out", format="xml")
    save_dataset(sample(), tmp_path / "out")
    with pytest.raises(UsageError, match="choose one of jsonl"):
        load_dataset(tmp_path / "out", format="xml")
    with pytest.raises(UsageError, match="on_error"):
        load_dataset(tmp_path / "out", on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="apply to csv, tsv, parquet, not to jsonl"):
        load_dataset(tmp_path / "out", text_column="x")


def test_detection_names_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        detect(tmp_path)
    assert all(f"\n  {name}: " in str(caught.value) for name in FORMATS)
    with pytest.raises(DataError, match="no such file"):
        detect(tmp_path / "absent")
    with pytest.raises(DataError, match="pydocs"):
        load_dataset(tmp_path / "absent")
    (tmp_path / "train.csv").write_text("text,labels\n")
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="looks like jsonl and like csv"):
        detect(tmp_path)
    (tmp_path / "trn.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"both trn.jsonl and train.jsonl"):
        detect(tmp_path)


def test_source_names_the_format_and_the_files(tmp_path: Path) -> None:
    save_dataset(sample(), tmp_path / "out", format="dexml")
    data = load_dataset(tmp_path / "out")
    assert data.name == "out"
    assert data.source["format"] == "dexml"
    digest = hashlib.sha256((tmp_path / "out/raw/trn_X.txt").read_bytes()).hexdigest()
    assert data.source["raw/trn_X.txt"] == digest
    assert {"Y.trn.npz", "Y.tst.npz", "raw/Y.txt", "raw/tst_X.txt", "filter_labels_test.txt"} <= set(data.source)


def test_convert(tmp_path: Path) -> None:
    save_dataset(sample(), tmp_path / "a", format="csv")
    save_dataset(load_dataset(tmp_path / "a"), tmp_path / "b", format="xmc-json")
    save_dataset(load_dataset(tmp_path / "b"), tmp_path / "c", format="parquet")
    assert_same(load_dataset(tmp_path / "c"), sample(), kind="parquet")


def test_built_in_source_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = pytest.importorskip("dexter.data.sources")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "build", lambda name: sample())
    assert load_dataset("pydocs").name == "sample"


# What each format accepts, beyond what its writer writes.


def test_jsonl_ids_or_indices_and_id_for_uid(tmp_path: Path) -> None:
    (tmp_path / "lbl.jsonl").write_text('{"id": "a", "text": "A"}\n{"id": "b", "text": "B"}\n')
    rows = ['{"id": 7, "text": "x", "labels": ["b", "a"], "weights": [2, 0.5]}', "", '{"text": "y", "labels": [1, 1]}']
    (tmp_path / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    data = load_dataset(tmp_path)
    assert data.train.uids == ("7", "1")
    assert data.train.relevance.toarray().tolist() == [[0.5, 2], [0, 1]]


def test_jsonl_single_file_takes_up_string_labels(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x", "labels": ["b", "a"]}\n{"text": "y", "labels": []}\n'))
    data = load_dataset(path)
    assert (data.name, data.label_ids, data.label_texts, data.test) == ("data", ("b", "a"), ("b", "a"), None)
    assert list(data.source) == ["format", "data.jsonl.gz"]


def test_gzip_is_recognised_by_content_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(gzip.compress(b'{"text": "x", "labels": ["b"]}\n'))
    assert load_dataset(tmp_path / "data.jsonl").label_ids == ("b",)


def test_repeated_query_ids_are_made_unique_and_logged(tmp_path: Path, logged: list[str]) -> None:
    lines = [json.dumps({"uid": uid, "text": "x", "labels": ["a"]}) for uid in ("u", "u", "u#2", "u")]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    uids = load_dataset(tmp_path / "data.jsonl").train.uids
    assert uids[:2] == ("u", "u#2")
    assert len(set(uids)) == 4
    assert any(line.startswith("3 query ids were used before") for line in logged)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0, 2.0])), max_size=6)))
def test_split_builder_equals_a_loop(rows: list[list[tuple[int, float]]]) -> None:
    """A label repeated within a row counts once, with its largest weight; weight 0 is not relevant."""
    builder = SplitBuilder()
    expected = np.zeros((len(rows), 4), dtype=np.float32)
    for number, pairs in enumerate(rows):
        builder.add(f"text {number}", [column for column, _ in pairs], weights=[weight for _, weight in pairs])
        for column, weight in pairs:
            expected[number, column] = max(expected[number, column], weight)
    relevance = builder.build(4, filtered=None).relevance
    np.testing.assert_array_equal(relevance.toarray(), expected)
    assert relevance.nnz == np.count_nonzero(expected)


def test_xmc_json_joins_title_and_content(tmp_path: Path) -> None:
    row = {"uid": "B0", "title": "t", "content": "c", "target_ind": [1], "target_rel": [1.0]}
    (tmp_path / "trn.json.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (tmp_path / "lbl.json").write_text('{"uid": "L0", "title": "zero"}\n{"uid": "L1", "title": "one", "content": ""}\n')
    (tmp_path / "filter_labels_train.txt").write_text("0 1\n")
    data = load_dataset(tmp_path)
    assert data.train.texts == ("t c",)
    assert data.label_texts == ("zero", "one")
    assert data.train.filtered is not None
    assert data.train.filtered.toarray().tolist() == [[0, 1]]


def test_csv_guesses_are_logged(tmp_path: Path, logged: list[str]) -> None:
    path = tmp_path / "posts.csv"
    path.write_bytes(b'\xef\xbb\xbfId,Title,Body,Tags\r\n1,hello,"two\r\nlines",a; b\r\n2,bye,,b\r\n')
    data = load_dataset(path)
    assert data.train.texts == ("hello two\r\nlines", "bye")
    assert data.train.uids == ("1", "2")
    assert data.label_ids == ("a", "b")
    assert logged[:2] == [
        "read as csv",
        "posts.csv: text from 'Title' + 'Body', labels from 'Tags', ids from 'Id', labels split at ';'",
    ]


def test_csv_options(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("q,extra,y\nhello,world,a/b\n")
    data = load_dataset(path, text_column="q+extra", label_column="y", label_separator="/")
    assert (data.train.texts, data.label_ids) == (("hello world",), ("a", "b"))
    with pytest.raises(UsageError, match="empty"):
        load_dataset(path, label_separator="")


def test_csv_separator_is_what_the_labels_file_confirms(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text('id,label\n"a;b",A\nc, C\n')
    (tmp_path / "train.csv").write_text('text,labels\nx,"a;b"\ny,"a;b,c"\n')
    data = load_dataset(tmp_path)
    assert data.label_texts == ("A", " C")
    assert data.train.relevance.toarray().tolist() == [[1, 0], [1, 1]]


def test_parquet_with_other_columns(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"blob": [b"\0", b"1"], "text": ["x", None], "tags": [["a", "b"], None], "id": [5, 6]})
    parquet.write_table(table, tmp_path / "x.parquet")
    data = load_dataset(tmp_path / "x.parquet")
    assert (data.train.texts, data.train.uids, data.label_ids) == (("x", ""), ("5", "6"), ("a", "b"))


def test_svmlight_features_become_words(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "train.txt").write_text("3 4 3\n0,2 1:0.5 3:1\n 0:1\n1 2:2\n\n")
    (tmp_path / "test.txt").write_text("1 4 3\n2 0:1\n")
    data = load_dataset(tmp_path)
    assert data.train.texts == ("f1 f3", "f0", "f2")
    assert data.train.relevance.toarray().tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert data.label_ids == ("0", "1", "2")
    assert any("values are dropped" in line for line in logged)
    (tmp_path / "features.txt").write_text("red\ngreen\nblue\nblack\n")
    (tmp_path / "labels.txt").write_text("A\nB\nC\n")
    named = load_dataset(tmp_path)
    assert named.train.texts[0] == "green black"
    assert named.label_texts == ("A", "B", "C")


def test_fasttext_labels_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "cooking.train"
    path.write_text("__label__a __label__b  two  spaces\n\nplain text\nstart __label__c\tend\n")
    data = load_dataset(path)
    assert data.train.texts == (" two  spaces", "plain text", "start end")
    assert data.label_ids == ("a", "b", "c")


def test_annif_vocabulary(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "train.tsv").write_text("first text\t<http://x/1> <http://x/2>\nsecond\t<http://x/2>\n\n")
    assert load_dataset(tmp_path).label_texts == ("http://x/1", "http://x/2")
    assert any("no vocabulary" in line for line in logged)
    (tmp_path / "yso-vocab.tsv").write_text("<http://x/2>\ttwo\t2.2\n<http://x/1>\tone\n")
    data = load_dataset(tmp_path)
    assert (data.label_ids, data.label_texts) == (("http://x/2", "http://x/1"), ("two", "one"))
    assert detect(tmp_path / "train.tsv") == "annif"


def shared_folder() -> Path:
    default = Path(__file__).resolve().parents[2].parent / "shared"
    return Path(os.environ.get("DEXTER_SHARED", default)) / "data"


def test_two_million_pairs() -> None:
    folder = shared_folder() / "moby-thesaurus"
    if not folder.is_dir():
        pytest.skip("the folder moby-thesaurus is not on this machine (DEXTER_SHARED names where data lies)")
    assert load_dataset(folder).train.relevance.nnz == 2_003_972
