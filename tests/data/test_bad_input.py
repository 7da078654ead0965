"""Bad input of every kind: one error that names file, line and remedy; repeats grouped; skipped lines counted."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix, save_npz

from dexter.data.formats import lines as lines_module
from dexter.data.formats import load_dataset
from dexter.data.formats.lines import MAX_BAD_RECORDS
from dexter.errors import DataError, UsageError

LABELS = '{"uid": "a", "text": "A"}\n{"uid": "b", "text": "B"}\n'
GOOD = '{"uid": "1", "text": "fine", "labels": ["a"]}'


def write_jsonl(folder: Path, *rows: str | bytes, labels: str = LABELS) -> Path:
    (folder / "lbl.jsonl").write_text(labels)
    lines = [row if isinstance(row, bytes) else row.encode() for row in (GOOD, *rows)]
    (folder / "trn.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def failure(path: Path, **options: object) -> DataError:
    with pytest.raises(DataError) as caught:
        load_dataset(path, **options)  # type: ignore[arg-type]
    assert caught.value.exit_code == 3
    return caught.value


BAD_ROWS: dict[str, tuple[str | bytes, str]] = {
    "malformed JSON": ('{"uid": "2", "text": ', "not a JSON object"),
    "not an object": ("[1, 2]", "expected a JSON object"),
    "deep nesting": ("[" * 100_000, "nesting too deep"),
    "long number": ('{"text": ' + "1" * 5000 + "}", "number too long"),
    "no text": ('{"uid": "2", "labels": []}', "\"text\" is missing: the line has 'uid', 'labels'"),
    "no labels": ('{"uid": "2", "text": "x"}', '"labels" is missing'),
    "text of wrong type": ('{"text": 3, "labels": []}', '"text" must be a string, got 3'),
    "labels of wrong type": ('{"text": "x", "labels": "a"}', "must be a list of labels, got 'a'"),
    "label of wrong type": ('{"text": "x", "labels": [1.5]}', "label ids (strings) or indices"),
    "truth as label": ('{"text": "x", "labels": [true]}', "label ids (strings) or indices"),
    "ids and indices": ('{"text": "x", "labels": ["a", 1]}', "label ids (strings) or indices"),
    "uid of wrong type": ('{"uid": [], "text": "x", "labels": []}', '"uid" must be a string'),
    "unknown label": ('{"text": "x", "labels": ["zz"]}', "label id 'zz' is not in lbl.jsonl: add it there"),
    "index out of range": ('{"text": "x", "labels": [0, 2]}', "label index 2 is out of range: lbl.jsonl has 2 labels"),
    "negative index": ('{"text": "x", "labels": [-1]}', "label index -1 is out of range"),
    "huge index": ('{"text": "x", "labels": [' + "9" * 400 + "]}", "is out of range"),
    "NaN weight": ('{"text": "x", "labels": [0], "weights": [NaN]}', "weight nan must be finite"),
    "infinite weight": ('{"text": "x", "labels": [0], "weights": [1e999]}', "weight inf must be finite"),
    "weight beyond float32": ('{"text": "x", "labels": [0], "weights": [1e300]}', "weight 1e+300 must be finite"),
    "negative weight": (
        '{"text": "x", "labels": [0], "weights": [-0.5]}',
        "weight -0.5 must be finite and not negative",
    ),
    "weight of wrong type": ('{"text": "x", "labels": [0], "weights": ["1"]}', "must be a list of numbers"),
    "weight count": ('{"text": "x", "labels": [0, 1], "weights": [1]}', "got 1 weights for 2 labels"),
    "invalid UTF-8": (b'{"text": "caf\xe9", "labels": []}', "byte 14 of the line (0xe9) is not UTF-8"),
    "NUL": (b'{"text": "a\x00b", "labels": []}', "NUL byte"),
    "lone surrogate": ('{"text": "\\ud800", "labels": []}', "half a surrogate pair"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_jsonl_row(tmp_path: Path, kind: str) -> None:
    row, says = BAD_ROWS[kind]
    error = failure(write_jsonl(tmp_path, row, GOOD))
    assert str(error).startswith(f"{tmp_path / 'trn.jsonl'}:2: ")
    assert says in str(error)
    assert "\n" not in str(error)
    assert len(str(error)) < len(str(tmp_path)) + 250


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_jsonl_row_is_skipped_and_counted(tmp_path: Path, kind: str, logged: list[str]) -> None:
    data = load_dataset(write_jsonl(tmp_path, BAD_ROWS[kind][0], GOOD), on_error="skip")
    assert len(data.train) == 2
    assert "skipped 1 line" in logged
    assert data.source["skipped"] == "1"


def test_repeats_are_grouped_by_kind(tmp_path: Path) -> None:
    unknown = '{"text": "x", "labels": ["zz"]}'
    error = failure(write_jsonl(tmp_path, "{", *[unknown] * 413, "{"))
    first, second = str(error).split("\n")
    assert first.startswith(f"{tmp_path / 'trn.jsonl'}:2: not a JSON object")
    assert first.endswith("(and 1 more like it)")
    assert second.startswith(f"{tmp_path / 'trn.jsonl'}:3: label id 'zz'")
    assert second.endswith("(and 412 more like it)")
    assert (error.path, error.line) == (tmp_path / "trn.jsonl", 2)


def test_reading_stops_after_many_problems(tmp_path: Path) -> None:
    error = failure(write_jsonl(tmp_path, *["{"] * (3 * MAX_BAD_RECORDS)))
    assert f"(and {MAX_BAD_RECORDS - 1:,} more like it)" in str(error)


def test_skip_logs_counts_and_lines(tmp_path: Path, logged: list[str]) -> None:
    load_dataset(write_jsonl(tmp_path, "{", "{", "[]"), on_error="skip")
    assert "skipped 3 lines" in logged
    assert any(line.startswith(f"  {tmp_path / 'trn.jsonl'}:2: ") and "1 more like it" in line for line in logged)


def test_nothing_left_after_skipping(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "trn.jsonl").write_text("{\n{\n")
    assert "no training rows (2 were read)" in str(failure(tmp_path, on_error="skip"))
    (tmp_path / "trn.jsonl").write_text("")
    assert "no training rows (0 were read)" in str(failure(tmp_path))


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_bad_labels_fail_under_either_policy(tmp_path: Path, policy: str) -> None:
    """A label that was left out would shift the indices of all that follow."""
    twice = failure(write_jsonl(tmp_path, labels=LABELS + '{"uid": "a", "text": "again"}\n'), on_error=policy)
    assert str(twice).startswith(f"{tmp_path / 'lbl.jsonl'}:3: label id 'a' was given before (as label 1)")
    broken = failure(write_jsonl(tmp_path, labels=LABELS + "{\n"), on_error=policy)
    assert str(broken).startswith(f"{tmp_path / 'lbl.jsonl'}:3: not a JSON object")


def test_indices_need_a_labels_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "x", "labels": [0]}\n')
    assert "needs a labels file" in str(failure(tmp_path / "data.jsonl"))


def test_error_text_shows_no_more_than_an_excerpt(tmp_path: Path) -> None:
    secret = "s" * 500
    error = failure(write_jsonl(tmp_path, json.dumps({"text": "x", "labels": [secret]})))
    assert "s" * 50 not in str(error)


# Files that are damaged as a whole: an error under either policy.


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize("cut", [5, 40, -9, -4])
def test_truncated_gzip(tmp_path: Path, cut: int, policy: str) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "trn.jsonl").unlink()
    whole = gzip.compress("\n".join([GOOD] * 50).encode())
    (tmp_path / "trn.jsonl.gz").write_bytes(whole[:cut])
    error = failure(tmp_path, on_error=policy)
    assert "truncated or damaged" in str(error)
    assert error.line is not None


def test_damaged_gzip(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "trn.jsonl").unlink()
    whole = bytearray(gzip.compress("\n".join([GOOD] * 50).encode()))
    whole[-6] ^= 0xFF  # its checksum
    (tmp_path / "trn.jsonl.gz").write_bytes(bytes(whole))
    assert "truncated or damaged" in str(failure(tmp_path))


def test_gzip_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "trn.jsonl").unlink()
    (tmp_path / "trn.jsonl.gz").write_bytes(gzip.compress(b"\n".join([GOOD.encode()] * 500)))
    monkeypatch.setenv("DEXTER_MAX_BYTES", "1000")
    error = failure(tmp_path)
    assert "more than 1,000 bytes" in str(error)
    assert "DEXTER_MAX_BYTES" in str(error)
    for wrong in ("many", "-1", "9" * 40):
        monkeypatch.setenv("DEXTER_MAX_BYTES", wrong)
        with pytest.raises(UsageError, match="DEXTER_MAX_BYTES"):
            load_dataset(tmp_path)


@pytest.mark.parametrize("newline", [b"", b"\n"])
def test_gzip_bomb_stops_early_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newline: bytes
) -> None:
    """Thirty megabytes from thirty kilobytes: refused by the ratio, with limits scaled down to keep the test short."""
    monkeypatch.setattr(lines_module, "_RATIO_FREE_BYTES", 1024**2)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 256 * 1024)
    write_jsonl(tmp_path)
    (tmp_path / "trn.jsonl").unlink()
    (tmp_path / "trn.jsonl.gz").write_bytes(gzip.compress((b" " * 1023 + (newline or b" ")) * 30_000))
    tracemalloc.start()
    error = failure(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "decompresses to more than" in str(error)
    assert peak < 8 * 1024**2


def test_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1000)
    long = json.dumps({"text": "x" * 5000, "labels": []})
    error = failure(write_jsonl(tmp_path, long, GOOD, "{"))
    first, second = str(error).split("\n")
    assert "trn.jsonl:2: the line is longer than 1,000 bytes" in first
    assert "trn.jsonl:4: " in second
    write_jsonl(tmp_path, long, GOOD)
    assert len(load_dataset(tmp_path, on_error="skip").train) == 2


def test_unreadable_path(tmp_path: Path) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "trn.jsonl").unlink()
    (tmp_path / "trn.jsonl").symlink_to(tmp_path / "trn.jsonl")
    failure(tmp_path)


# Filter pairs.


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1 0", "row number 1 is out of range: expected less than 1"),
        ("0 2", "label index 2 is out of range: expected less than 2"),
        ("0", 'expected "row label"'),
        ("0 -1", "expected a label index"),
        ("0 x", "expected a label index"),
        ("0 " + "9" * 30, "expected a label index"),
    ],
)
def test_bad_filter_pair(tmp_path: Path, line: str, says: str) -> None:
    write_jsonl(tmp_path)
    (tmp_path / "filter_labels_train.txt").write_text(f"0 1\n{line}\n")
    error = failure(tmp_path)
    assert str(error).startswith(f"{tmp_path / 'filter_labels_train.txt'}:2: ")
    assert says in str(error)
    filtered = load_dataset(tmp_path, on_error="skip").train.filtered
    assert filtered is not None
    assert filtered.toarray().tolist() == [[0, 1]]


def test_filter_pairs_follow_their_rows_when_others_are_skipped(tmp_path: Path) -> None:
    write_jsonl(tmp_path, "{", '{"text": "third", "labels": ["b"]}')
    (tmp_path / "filter_labels_train.txt").write_text("1 0\n2 0\n")
    data = load_dataset(tmp_path, on_error="skip")
    assert data.train.texts == ("fine", "third")
    assert data.train.filtered is not None
    assert data.train.filtered.toarray().tolist() == [[0, 0], [1, 0]]


# Tables.


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("id,words,labels\n1,x,a\n", 1, "no text column among 'id', 'words', 'labels': name it with --text-column"),
        ("id,text,words\n1,x,a\n", 1, "no column of labels among 'id', 'text', 'words': name it with --label-column"),
        ("", None, "the file is empty: expected a line of column names"),
        ('text,labels\nx,a\n"y,a\nz,b\n', 3, "is a quote not closed"),
        ('text,labels\nx,a\n"y"z,a\n', 3, "is a quote not closed, or not doubled"),
        ("text,labels\nx,a\ny\n", 3, "got 1 cells, the header has 2"),
        ("text,labels\nx,a\ny,a,b\n", 3, "got 3 cells, the header has 2"),
        ('text,labels\n"two\nlines",a\ny,a,b\n', 4, "got 3 cells"),
        ("text,labels,weights\nx,a;b,1;2\ny,a;b,1;nan\n", 3, "weight nan must be finite"),
        ("text,labels,weights\nx,a;b,1;2\ny,a;b,1;-2\n", 3, "weight -2.0 must be finite and not negative"),
        ("text,labels,weights\nx,a;b,1;2\ny,a;b,1;two\n", 3, "expected a number as weight, got 'two'"),
        ("text,labels,weights\nx,a;b,1;2\ny,a;b,1\n", 3, "got 1 weights for 2 labels"),
        (b"text,labels\nx,a\ncaf\xe9,a\n", 3, "is not UTF-8"),
        (b"text,labels\nx,a\n\x00,a\n", 3, "NUL"),
    ],
)
def test_bad_csv(tmp_path: Path, content: str | bytes, line: int | None, says: str, logged: list[str]) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    error = failure(path)
    assert error.line == line
    assert says in str(error)
    if line is not None and line > 1:
        assert len(load_dataset(path, on_error="skip").train) == 1
        assert "skipped 1 line" in logged


def test_csv_with_a_named_column_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("text,labels\nx,a\n")
    assert "no column 'body' among 'text', 'labels'" in str(failure(path, text_column="body"))
    assert "no column 'tags' among 'text', 'labels'" in str(failure(path, label_column="tags"))


def test_csv_unknown_label(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,labels\nx,a\ny,c\n")
    (tmp_path / "lbl.csv").write_text("uid,text\na,A\nb,B\n")
    error = failure(tmp_path)
    assert str(error).startswith(f"{tmp_path / 'train.csv'}:3: label id 'c' is not in lbl.csv")
    (tmp_path / "lbl.csv").write_text("uid,text\na,A\n,B\n")
    assert f"{tmp_path / 'lbl.csv'}:3: the label has no id" in str(failure(tmp_path))


def test_parquet_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing PAR1")
    assert "not a readable Parquet file" in str(failure(tmp_path / "x.parquet"))


# The DEXML folder and its matrices.


def write_dexml(folder: Path, matrix: csr_matrix | None = None) -> Path:
    (folder / "raw").mkdir()
    (folder / "raw/trn_X.txt").write_text("one\ntwo\n")
    (folder / "raw/Y.txt").write_text("A\nB\nC\n")
    save_npz(folder / "Y.trn.npz", csr_matrix(np.eye(2, 3)) if matrix is None else matrix)
    return folder


def npz_bytes(**arrays: np.ndarray | bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            if isinstance(array, bytes):
                archive.writestr(f"{name}.npy", array)
                continue
            one = io.BytesIO()
            np.lib.format.write_array(one, array, allow_pickle=True)
            archive.writestr(f"{name}.npy", one.getvalue())
    return buffer.getvalue()


def csr_parts(**changes: np.ndarray | bytes) -> dict[str, np.ndarray | bytes]:
    matrix = csr_matrix(np.eye(2, 3))
    parts = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr}
    return {"format": np.array(b"csr"), "shape": np.array(matrix.shape), **parts, **changes}


def declared(count: int) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (count,)})
    return header.getvalue() + b"\0" * 16


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (csr_parts(indices=np.array([0, 3], dtype=np.int32)), "not a usable CSR matrix"),
        (csr_parts(indices=np.array([0, -1], dtype=np.int32)), "not a usable CSR matrix"),
        (csr_parts(indptr=np.array([0, 5, 2], dtype=np.int32)), "not a usable CSR matrix"),
        (csr_parts(shape=np.array([10**12, 3])), "not a usable CSR matrix"),
        (csr_parts(shape=np.array([2, 3, 4])), "not a usable CSR matrix"),
        (csr_parts(format=np.array(b"csc")), "holds a 'csc' matrix, expected 'csr'"),
        (csr_parts(data=np.array([1, "x"], dtype=object)), "element type object"),
        (csr_parts(data=declared(10**15)), "declares 1,000,000,000,000,000 elements, but holds 16 bytes"),
        (csr_parts(data=b"no header"), "not a usable CSR matrix"),
        (csr_parts(other=np.zeros(1)), "holds 'other.npy'"),
        ({"data": np.zeros(2)}, "lacks format.npy"),
        (csr_parts(data=np.zeros(9_000_000)), "declares 72,000,"),
    ],
)
def test_bad_npz(tmp_path: Path, parts: dict[str, np.ndarray | bytes], says: str) -> None:
    (write_dexml(tmp_path) / "Y.trn.npz").write_bytes(npz_bytes(**parts))
    error = failure(tmp_path, on_error="skip")
    assert str(error).startswith(f"{tmp_path / 'Y.trn.npz'}: ")
    assert says in str(error)


def test_bad_weight_in_npz(tmp_path: Path) -> None:
    write_dexml(tmp_path, csr_matrix(np.array([[1, 0, 0], [0, np.nan, 0]])))
    error = failure(tmp_path)
    assert str(error).startswith(f"{tmp_path / 'raw/trn_X.txt'}:2: weight nan of this text")
    assert load_dataset(tmp_path, on_error="skip").train.texts == ("one",)


def test_dexml_sizes_must_agree(tmp_path: Path) -> None:
    write_dexml(tmp_path)
    (tmp_path / "raw/trn_X.txt").write_text("one\ntwo\nthree\n")
    assert "the matrix has 2 rows, trn_X.txt 3 lines" in str(failure(tmp_path))
    (tmp_path / "raw/Y.txt").write_text("A\n")
    assert "the matrix has 3 columns, raw/Y.txt 1 labels" in str(failure(tmp_path))
    (tmp_path / "Y.trn.npz").unlink()
    assert "no Y.trn.npz" in str(failure(tmp_path))


# Texts with rows of labels.


def write_xmc_text(folder: Path, rows: str | bytes = "2 3\n0:1 2:0.5\n1:1.0\n", texts: bytes = b"one\ntwo\n") -> Path:
    (folder / "trn_X.txt").write_bytes(texts)
    (folder / "Y.txt").write_text("A\nB\nC\n")
    (folder / "trn_X_Y.txt").write_bytes(rows.encode() if isinstance(rows, str) else rows)
    return folder


@pytest.mark.parametrize("raw", [False, True])
def test_texts_with_rows_of_labels(tmp_path: Path, raw: bool) -> None:
    """Beside the rows or in raw/; filter files and a row without labels; values are weights."""
    write_xmc_text(tmp_path, "3 3\n0:1 2:0.5\n\n1:1.00000\n\n", b"one\ntwo\nthree\n")
    if raw:
        (tmp_path / "raw").mkdir()
        for name in ("trn_X.txt", "Y.txt"):
            (tmp_path / name).rename(tmp_path / "raw" / name)
    (tmp_path / "filter_labels_train.txt").write_text("2 0\n")
    data = load_dataset(tmp_path)
    assert (data.train.texts, data.label_texts) == (("one", "two", "three"), ("A", "B", "C"))
    np.testing.assert_array_equal(data.train.relevance.toarray(), [[1, 0, 0.5], [0, 0, 0], [0, 1, 0]])
    assert data.train.filtered is not None
    assert data.train.filtered.nonzero()[0].tolist() == [2]
    assert data.source["format"] == "xmc-text"


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        ("", 1, "expected a header \"N L\" (rows, labels), got ''"),
        ("0:1\n1:1\n", 1, "expected a header \"N L\" (rows, labels), got '0:1'"),
        ("2 4\n0:1\n1:1\n", 1, "the header declares 4 labels, Y.txt has 3: they must agree"),
        ("3 3\n0:1\n1:1\n", 1, "2 rows, the header declares 3: they must agree"),
        ("3 3\n0:1\n1:1\n2:1\n", 1, "3 rows, trn_X.txt has 2: they must agree"),
        ("1 3\n0:1\n", 1, "1 rows, trn_X.txt has 2: they must agree"),
        ("2 3\n0:1\n3:1\n", 3, "label index 3 is out of range: expected less than 3"),
        ("2 3\n0:1\n-1:1\n", 3, "expected a label index (a whole number from 0), got '-1'"),
        ("2 3\n0:1\n1\n", 3, "expected label:value with a number, got '1'"),
        ("2 3\n0:1\n1:x\n", 3, "expected label:value with a number, got '1:x'"),
        ("2 3\n0:1\n1:nan\n", 3, "weight nan must be finite"),
        ("2 3\n0:1\n1:-2\n", 3, "weight -2.0 must be finite and not negative"),
        (b"2 3\n0:1\n1:\xff\n", 3, "is not UTF-8"),
    ],
)
def test_bad_rows_of_labels(tmp_path: Path, rows: str | bytes, line: int, says: str) -> None:
    error = failure(write_xmc_text(tmp_path, rows))
    assert str(error).startswith(f"{tmp_path / 'trn_X_Y.txt'}:{line}: ")
    assert says in str(error)
    if line > 1:
        assert load_dataset(tmp_path, on_error="skip").train.texts == ("one",)
    else:
        failure(tmp_path, on_error="skip")


def test_a_bad_text_skips_its_row_of_labels(tmp_path: Path) -> None:
    error = failure(write_xmc_text(tmp_path, texts=b"caf\xe9\ntwo\n"))
    assert str(error).startswith(f"{tmp_path / 'trn_X.txt'}:1: ")
    data = load_dataset(tmp_path, on_error="skip")
    assert (data.train.texts, data.train.relevance.indices.tolist()) == (("two",), [1])


def test_missing_files_beside_rows_of_labels(tmp_path: Path) -> None:
    write_xmc_text(tmp_path)
    (tmp_path / "tst_X.txt").write_text("three\n")
    assert "no tst_X_Y.txt[.gz] in this folder" in str(failure(tmp_path))
    (tmp_path / "Y.txt").unlink()
    assert "no Y.txt[.gz] or lbl.txt[.gz]" in str(failure(tmp_path))
    (tmp_path / "lbl.txt").write_text("A\nB\nC\n")
    (tmp_path / "trn_X.txt").unlink()
    assert "no trn_X.txt[.gz] in this folder" in str(failure(tmp_path))


# The other text formats.


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("3 4 2\n0 1:1\n1 2:1\n", 1, "the header declares 3 rows, the file has 2"),
        ("1 4 2\n0 1:1\n1 2:1\n", 1, "the header declares 1 rows, the file has 2"),
        ("2 4 2\n0 1:1\n2 1:1\n", 3, "label index 2 is out of range: expected less than 2"),
        ("2 4 2\n0 1:1\n1 4:1\n", 3, "feature index 4 is out of range: expected less than 4"),
        ("2 4 2\n0 1:1\n1 2:nan\n", 3, "finite value, got '2:nan'"),
        ("2 4 2\n0 1:1\n1 2\n", 3, "expected feature:value"),
        ("2 4 2\n0 1:1\n-1 2:1\n", 3, "expected a label index (a whole number from 0), got '-1'"),
        ("2 4 2\n0 1:1\nx 2:1\n", 3, "expected a label index"),
        ("2 4 999999999999\n0 1:1\n1 2:1\n", 1, "declares 999,999,999,999 labels, too many"),
    ],
)
def test_bad_svmlight(tmp_path: Path, content: str, line: int, says: str) -> None:
    (tmp_path / "train.txt").write_text(content)
    error = failure(tmp_path)
    assert error.line == line
    assert says in str(error)


def test_svmlight_without_header(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("0 1:1\n")
    assert 'expected a header "N D L"' in str(failure(tmp_path, format="svmlight"))


def test_bad_fasttext_and_annif(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("__label__a x\n__label__ y\n")
    assert str(failure(tmp_path / "a.txt")).startswith(f"{tmp_path / 'a.txt'}:2: a label has no name")
    (tmp_path / "b.tsv").write_text("x\t<u>\nno tab\n")
    assert str(failure(tmp_path / "b.tsv", format="annif")).startswith(f"{tmp_path / 'b.tsv'}:2: expected text<TAB>")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/train.tsv").write_text("x\t<u>\ny\t<v>\n")
    (tmp_path / "c/vocab.tsv").write_text("<u>\tU\n<w>\n")
    assert str(failure(tmp_path / "c")).startswith(f"{tmp_path / 'c/vocab.tsv'}:2: expected uri<TAB>label")
    (tmp_path / "c/vocab.tsv").write_text("<u>\tU\n")
    assert str(failure(tmp_path / "c")).startswith(f"{tmp_path / 'c/train.tsv'}:2: label id 'v' is not in vocab.tsv")


def test_bad_xmc_json(tmp_path: Path) -> None:
    (tmp_path / "lbl.json").write_text('{"uid": "a", "title": "A"}\n')
    (tmp_path / "trn.json").write_text('{"uid": "1", "title": "x", "target_ind": [1], "target_rel": [1.0]}\n')
    assert "trn.json:1: label index 1 is out of range" in str(failure(tmp_path))
    (tmp_path / "trn.json").write_text('{"uid": "1", "content": "x", "target_ind": [0]}\n')
    assert '"title" is missing' in str(failure(tmp_path))
    (tmp_path / "lbl.json").unlink()
    assert "no lbl.json[.gz] in this folder" in str(failure(tmp_path))


@pytest.mark.parametrize("kind", ["one string for many rows", "one long list", "one string for many items"])
def test_parquet_bombs_stop_early_in_little_memory(tmp_path: Path, kind: str) -> None:
    """Five hundred bytes stand for gigabytes: refused before they are expanded."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    if kind == "one string for many rows":
        same = pa.DictionaryArray.from_arrays(pa.array([0] * 2_500, pa.int32()), pa.array(["a" * 1_000_000]))
        table = pa.table({"text": same, "labels": pa.array(["x"] * 2_500)})
    else:
        count, text = (20_000_000, "x") if kind == "one long list" else (2_500, "a" * 1_000_000)
        same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text]))
        table = pa.table({"text": ["t"], "labels": pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), same)})
    path = tmp_path / "train.parquet"
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 600
    del table, same
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pid = os.fork()
    if pid == 0:
        refused = "holds more than" in str(failure(path))
        os._exit(not (refused and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024))
    assert os.waitpid(pid, 0)[1] == 0


def test_parquet_strings_and_lists_are_read_as_they_were_written(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    labels = [["a", "b"], [], None, ["b"]]
    table = pa.table(
        {"id": [1, 2, 3, 4], "text": ["x", None, "", "x"], "labels": pa.array(labels, pa.list_(pa.string()))}
    )
    parquet.write_table(table, tmp_path / "train.parquet", row_group_size=2)
    table = table.set_column(2, "labels", pa.array(labels, pa.large_list(pa.large_string())))
    parquet.write_table(table, tmp_path / "test.parquet")
    data = load_dataset(tmp_path, on_error="skip")
    for split in (data.train, data.test):
        assert list(split.texts) == ["x", "", "", "x"] and split.relevance.toarray().tolist() == [
            [1, 1],
            [0, 0],
            [0, 0],
            [0, 1],
        ]
