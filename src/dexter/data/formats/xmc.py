"""Folders of the public extreme classification benchmarks: lines of text with matrices, and bags of words.

- `dexml`: texts in `raw/*.txt`, one per line, and relevance in `Y.trn.npz` and `Y.tst.npz`. Queries and labels have no
  ids of their own: their row numbers are used.
- `xmc-text`: the same texts, in `raw/` or beside, and relevance in `trn_X_Y.txt` and `tst_X_Y.txt`, the text format of
  pyxclib: a header `rows labels`, then `label:value label:value` per line.
- `svmlight`: a header `N D L`, then `label,label feature:value ...` per line. The features are a bag of words without
  the words. Each feature that is present becomes one word: its name, if there is a file of feature names, else `f` and
  its number; the values are dropped. That is enough to train on, but not what published results on such files use, so
  reading logs it. Read only: a data set of texts has no features to write.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.lines import BadRecord, decompressed_limit, excerpt, first_lines, limit_advice
from dexter.data.formats.reader import (
    LABELS,
    TRAIN,
    LabelTable,
    Reader,
    SplitBuilder,
    check_weights,
    find_file,
    log,
    need_file,
    parse_index,
    plain_suffix,
    split_files,
)
from dexter.data.formats.writer import Writer, labels_of_rows
from dexter.errors import DataError

_SVMLIGHT_SUFFIXES = (".txt", ".svm", ".svmlight", ".libsvm")
_FEATURE_NAMES = ("features", "feature_names", "Xf")
_LABEL_NAMES = (*LABELS, "label_names", "Yf")
_TEXT_LABEL_NAMES = ("Y", *_LABEL_NAMES)
_LEAST_LABEL_LIMIT = 100_000
_MEMBERS = ("format.npy", "shape.npy", "data.npy", "indices.npy", "indptr.npy")
_OPTIONAL_MEMBERS = ("_is_array.npy",)
_READ_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, TypeError, KeyError,
    NotImplementedError, RuntimeError, SyntaxError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip


# The DEXML folder


def detect_dexml(path: Path) -> bool:
    """Whether a path is a folder with `raw/trn_X.txt`, and relevance that is not in text files."""
    return find_file(path / "raw", ["trn_X"], [".txt"]) is not None and not detect_xmc_text(path)


def read_dexml(reader: Reader) -> Dataset:
    """Read texts, labels and relevance matrices."""
    if not reader.root.is_dir():
        raise DataError("expected a folder with raw/trn_X.txt, raw/Y.txt and Y.trn.npz", path=reader.root)
    raw = reader.root / "raw"
    labels = reader.labels(need_file(raw, ["Y"], [".txt"]), lambda table, line: table.add(None, line), keep_blank=True)
    files = (need_file(raw, ["trn_X"], [".txt"]), find_file(raw, ["tst_X"], [".txt"]))
    return reader.dataset(labels, partial(_read_dexml_split, reader, labels), files)


def write_dexml(dataset: Dataset, writer: Writer) -> None:
    """Write texts, labels and relevance matrices."""
    _write_texts(dataset, writer)
    for stem, split in zip(("trn", "tst"), dataset.splits.values(), strict=False):
        save_npz(writer.folder / f"Y.{stem}.npz", split.relevance)


def _write_texts(dataset: Dataset, writer: Writer) -> None:
    writer.lines("raw/Y.txt", map(writer.one_line, dataset.label_texts))
    writer.splits(dataset, ("raw/trn_X.txt", "raw/tst_X.txt"), lambda split: map(writer.one_line, split.texts))


def _read_dexml_split(reader: Reader, labels: LabelTable, text_path: Path) -> SplitBuilder:
    matrix_path = reader.use(reader.root / f"Y.{text_path.name[:3]}.npz")
    if not matrix_path.is_file():
        raise DataError(
            f"no {matrix_path.name} in this folder: it holds the relevance of raw/{text_path.name}", path=reader.root
        )
    matrix = read_csr(matrix_path)
    if matrix.shape[1] != len(labels):
        raise DataError(
            f"the matrix has {matrix.shape[1]:,} columns, raw/Y.txt {len(labels):,} labels: they must agree",
            path=matrix_path,
        )
    bad_weights = _bad_weights(matrix)

    def add_query(split: SplitBuilder, line: str) -> None:
        row = split.num_seen
        if row in bad_weights:
            raise BadRecord(
                "bad weight",
                f"weight {bad_weights[row]} of this text in the npz must be finite and not negative: correct it there",
            )
        if row >= matrix.shape[0]:
            split.skip()  # counted only, so that the error about differing sizes can say how many there are
            return
        here = slice(matrix.indptr[row], matrix.indptr[row + 1])
        split.add(line, matrix.indices[here].tolist(), weights=matrix.data[here].tolist())

    split = reader.queries(text_path, add_query, keep_blank=True)
    if split.num_seen != matrix.shape[0]:
        raise DataError(
            f"the matrix has {matrix.shape[0]:,} rows, {text_path.name} {split.num_seen:,} lines: they must agree",
            path=matrix_path,
        )
    return split


def _bad_weights(matrix: csr_matrix) -> dict[int, float]:
    """Find the rows with a weight that is negative or not finite, and that weight."""
    with np.errstate(over="ignore"):
        values = matrix.data.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    rows = np.searchsorted(matrix.indptr, bad, side="right") - 1
    return dict(zip(rows.tolist(), values[bad].tolist(), strict=True))


# The same texts with relevance in text files


def detect_xmc_text(path: Path) -> bool:
    """Whether a path is a folder with `trn_X_Y.txt`, and without the matrix of `dexml`, which is the same relevance."""
    return find_file(path, ["trn_X_Y"], [".txt"]) is not None and not (path / "Y.trn.npz").is_file()


def read_xmc_text(reader: Reader) -> Dataset:
    """Read texts, labels and rows of relevant labels."""
    raw = reader.root / "raw"
    folder = raw if find_file(raw, ["trn_X"], [".txt"]) is not None else reader.root
    labels_file = find_file(folder, _TEXT_LABEL_NAMES, [".txt"]) or need_file(reader.root, _TEXT_LABEL_NAMES, [".txt"])
    labels = reader.labels(labels_file, lambda table, line: table.add(None, line), keep_blank=True)
    files = (need_file(folder, ["trn_X"], [".txt"]), find_file(folder, ["tst_X"], [".txt"]))
    return reader.dataset(labels, partial(_read_text_split, reader, labels), files)


def write_xmc_text(dataset: Dataset, writer: Writer) -> None:
    """Write texts, labels and rows of relevant labels."""
    _write_texts(dataset, writer)
    writer.splits(dataset, ("trn_X_Y.txt", "tst_X_Y.txt"), _label_lines)


def _read_text_split(reader: Reader, labels: LabelTable, text_path: Path) -> SplitBuilder:
    """Read the texts of a split, then its rows of labels; a row is bad if its text or its labels are."""
    texts: list[str | None] = []
    reader.for_each_line(text_path, texts.append, on_bad=lambda: texts.append(None), keep_blank=True)
    path = need_file(reader.root, [f"{text_path.name[:3]}_X_Y"], [".txt"])
    num_rows, num_labels = _read_header(path, '"N L" (rows, labels)', 2)
    if num_labels != len(labels):
        raise DataError(
            f"the header declares {num_labels:,} labels, {labels.file_name} has {len(labels):,}: they must agree",
            path=path,
            line=1,
        )

    def add_query(split: SplitBuilder, line: str) -> None:
        row = split.num_seen
        if row >= num_rows and not line.strip():
            return  # blank lines after the last row
        columns, weights = _parse_label_row(line, num_labels)
        text = texts[row] if row < len(texts) else None
        if text is None:
            split.skip()  # a bad text, or one too few, which is an error below
        else:
            split.add(text, columns, weights=weights)

    split = reader.queries(path, add_query, first_line=2, keep_blank=True)
    for name, number in (("the header declares", num_rows), (f"{text_path.name} has", len(texts))):
        if number != split.num_seen:
            raise DataError(f"{split.num_seen:,} rows, {name} {number:,}: they must agree", path=path, line=1)
    return split


def _parse_label_row(line: str, num_labels: int) -> tuple[list[int], list[float]]:
    """Return the labels of a row and their weights."""
    columns, values = [], []
    for token in line.split():
        index, _, value = token.partition(":")
        columns.append(parse_index(index, num_labels, what="label index"))
        try:
            values.append(float(value))
        except ValueError:
            raise BadRecord("label value", f"expected label:value with a number, got {excerpt(token)}") from None
    return columns, check_weights(values, count=len(columns))


def _label_lines(split: Split) -> Iterator[str]:
    yield f"{len(split)} {split.num_labels}"
    for columns, weights in labels_of_rows(split):
        values = weights or [1.0] * len(columns)
        yield " ".join(f"{column}:{value}" for column, value in zip(columns, values, strict=True))


# Sparse matrices of untrusted origin. `scipy.sparse.load_npz` believes what the file declares: two megabytes can ask
# for two gigabytes, and column indices out of range load silently. Here the zip directory and each array's header are
# checked before anything is allocated, and no pickle is ever opened.


def read_csr(path: Path) -> csr_matrix:
    """Read a CSR matrix written by `scipy.sparse.save_npz`, fully checked."""
    try:
        return _read_checked_csr(path)
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise DataError(
            f"not a usable CSR matrix ({type(error).__name__}: {str(error)[:120]}): "
            "write it with scipy.sparse.save_npz(path, matrix.tocsr())",
            path=path,
        ) from None


def _read_checked_csr(path: Path) -> csr_matrix:
    with zipfile.ZipFile(path) as archive:
        members = _checked_members(path, archive)
        arrays = {name: _read_array(archive, members[name]) for name in _MEMBERS}
    kind = str(arrays["format.npy"].astype("U8"))
    if kind != "csr":
        raise DataError(f"holds a {kind[:8]!r} matrix, expected 'csr': save matrix.tocsr() instead", path=path)
    num_rows, num_columns = (int(size) for size in arrays["shape.npy"])
    triple = (arrays["data.npy"], arrays["indices.npy"], arrays["indptr.npy"])
    matrix = csr_matrix(triple, shape=(num_rows, num_columns))
    matrix.check_format(full_check=True)
    return matrix


def _checked_members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the arrays of the archive by name, after checking that they are the expected ones and not too large."""
    members = {info.filename: info for info in archive.infolist()}
    unknown = sorted(set(members) - set(_MEMBERS) - set(_OPTIONAL_MEMBERS))
    missing = sorted(set(_MEMBERS) - set(members))
    if unknown or missing:
        wrong = f"lacks {missing[0]}" if missing else f"holds {unknown[0][:40]!r}"
        raise DataError(f"not a CSR matrix of scipy.sparse.save_npz: it {wrong}", path=path)
    declared, limit = sum(info.file_size for info in members.values()), decompressed_limit(path)
    if declared > limit:
        raise DataError(f"declares {declared:,} bytes, more than the limit of {limit:,}: {limit_advice()}", path=path)
    return members


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Read one `.npy` member, only if its header declares exactly the bytes that the archive holds."""
    with archive.open(info) as member:
        shape, fortran_order, dtype = _read_array_header(member)
        if dtype.hasobject or dtype.kind not in "biufSU":
            raise ValueError(f"{info.filename} has element type {dtype}, expected numbers")
        count = math.prod(shape)
        body = member.read(info.file_size)
        if count < 0 or len(body) != count * dtype.itemsize:
            raise ValueError(f"{info.filename} declares {count:,} elements, but holds {len(body):,} bytes")
        if fortran_order and len(shape) > 1:
            raise ValueError(f"{info.filename} is not a flat array")
        return np.frombuffer(body, dtype=dtype, count=count).reshape(shape)


def _read_array_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(f"npy version {version} is not supported")


# Bags of words


class _Header(NamedTuple):
    num_rows: int
    num_features: int
    num_labels: int

    @classmethod
    def read(cls, path: Path) -> _Header:
        return cls(*_read_header(path, '"N D L" (rows, features, labels)', 3))


def detect_svmlight(path: Path) -> bool:
    """Whether the first line of a file is a header of three numbers."""
    train = find_file(path, TRAIN, _SVMLIGHT_SUFFIXES) if path.is_dir() else path
    if train is None or plain_suffix(train) not in ("", *_SVMLIGHT_SUFFIXES):
        return False
    lines = first_lines(train, count=1)
    parts = lines[0].split() if lines else []
    return len(parts) == 3 and all(part.isascii() and part.isdecimal() for part in parts)


def read_svmlight(reader: Reader) -> Dataset:
    """Read bags of words; each feature present becomes one word."""
    files = split_files(reader.root, _SVMLIGHT_SUFFIXES)
    header = _Header.read(files[0])
    # One entry per label is allocated: a header may not ask for more of them than such a file could ever use.
    if header.num_labels > max(_LEAST_LABEL_LIMIT, 4 * files[0].stat().st_size):
        raise DataError(
            f"the header declares {header.num_labels:,} labels, too many for a file of this size: correct the header",
            path=files[0],
            line=1,
        )
    labels = _read_svmlight_labels(reader, header, files[0])
    words = _read_names(reader, find_file(reader.root, _FEATURE_NAMES, [".txt"]), header.num_features)
    log.info(
        "features have no text: each feature present becomes one word, "
        + ("by its name" if words else '"f" and its number')
        + "; values are dropped"
    )
    return reader.dataset(labels, partial(_read_svmlight_split, reader, header, words), files)


def _read_header(path: Path, form: str, count: int) -> list[int]:
    """Return the numbers of the first line, or raise `DataError` that says what form was expected."""
    lines = first_lines(path, count=1)
    try:
        parts = [parse_index(part, 10**18, what="header number") for part in (lines[0].split() if lines else [])]
    except BadRecord:
        parts = []
    if len(parts) != count:
        got = excerpt(lines[0]) if lines else "nothing"
        raise DataError(f"expected a header {form}, got {got}", path=path, line=1)
    return parts


def _read_svmlight_labels(reader: Reader, header: _Header, train_path: Path) -> LabelTable:
    found = find_file(reader.root, _LABEL_NAMES, [".txt"])
    names = _read_names(reader, found, header.num_labels)
    labels = LabelTable(found or train_path)
    for index in range(header.num_labels):
        labels.add(None, names[index] if names else str(index))
    return labels


def _read_names(reader: Reader, path: Path | None, count: int) -> list[str]:
    """Read one name per line, as many as the header declares; nothing without a file."""
    if path is None:
        return []
    names: list[str] = []
    reader.for_each_line(path, lambda line: names.append(line.strip()), skippable=False, keep_blank=True)
    reader.errors.check()
    if len(names) != count:
        raise DataError(
            f"got {len(names):,} names, the header of the data declares {count:,}: they must agree", path=path
        )
    return names


def _read_svmlight_split(reader: Reader, train_header: _Header, words: Sequence[str], path: Path) -> SplitBuilder:
    header = _Header.read(path)
    if header[1:] != train_header[1:]:
        raise DataError(
            "the header differs from that of the training file in D or L: they must agree", path=path, line=1
        )
    split = reader.queries(path, partial(_add_svmlight_query, header, words), first_line=2, keep_blank=True)
    if split.num_seen != header.num_rows:
        raise DataError(
            f"the header declares {header.num_rows:,} rows, the file has {split.num_seen:,}: one is wrong",
            path=path,
            line=1,
        )
    return split


def _add_svmlight_query(header: _Header, words: Sequence[str], split: SplitBuilder, line: str) -> None:
    if split.num_seen >= header.num_rows and not line.strip():
        return  # blank lines after the last row
    labels, _, features = line.partition(" ")
    if ":" in labels:  # a row without labels that also lacks the space before its features
        labels, features = "", line
    columns = [parse_index(token, header.num_labels, what="label index") for token in labels.split(",") if token]
    split.add(" ".join(_word(token, header, words) for token in features.split()), columns)


def _word(token: str, header: _Header, words: Sequence[str]) -> str:
    """Return the word of one `feature:value`."""
    index_text, colon, value_text = token.partition(":")
    index = parse_index(index_text, header.num_features, what="feature index")
    try:
        finite = bool(colon) and math.isfinite(float(value_text))
    except ValueError:
        finite = False
    if not finite:
        raise BadRecord("feature value", f"expected feature:value with a finite value, got {excerpt(token)}")
    return words[index] if words else f"f{index}"
