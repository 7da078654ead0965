"""The folder of the DEXML code: texts in `raw/*.txt`, one per line, and relevance in `Y.trn.npz` and `Y.tst.npz`.

Queries and labels have no ids of their own: their row numbers stand for them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.assemble import assemble
from dexter.data.formats.format import Format
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import find_file, need_file
from dexter.data.formats.npz import read_csr
from dexter.data.formats.problems import BadRecord
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows
from dexter.data.formats.writing import Writing
from dexter.errors import DataError


def _detect(path: Path) -> bool:
    return path.is_dir() and find_file(path / "raw", ["trn_X"], [".txt"]) is not None


def _read(path: Path, reading: Reading) -> Dataset:
    if not path.is_dir():
        raise DataError("expected a folder with raw/trn_X.txt, raw/Y.txt and Y.trn.npz", path=path)
    labels = reading.labels(need_file(path / "raw", ["Y"], [".txt"]), _add_label, keep_blank=True)
    train = _read_split(path, reading, labels, stem="trn")
    has_test = find_file(path / "raw", ["tst_X"], [".txt"]) is not None
    test = _read_split(path, reading, labels, stem="tst") if has_test else None
    return assemble(path, reading, labels=labels, train=train, test=test)


def _add_label(labels: LabelTable, line: str) -> None:
    labels.add(str(len(labels)), line)


def _read_split(path: Path, reading: Reading, labels: LabelTable, *, stem: str) -> Rows:
    matrix_path = reading.use(path / f"Y.{stem}.npz")
    if not matrix_path.is_file():
        raise DataError(f"no {matrix_path.name} in this folder: it holds the relevance of raw/{stem}_X.txt", path=path)
    matrix = read_csr(matrix_path)
    if matrix.shape[1] != len(labels):
        raise DataError(
            f"the matrix has {matrix.shape[1]:,} columns, raw/Y.txt {len(labels):,} labels: they must agree",
            path=matrix_path,
        )
    text_path = need_file(path / "raw", [f"{stem}_X"], [".txt"])
    add_row = partial(_add_row, matrix, _bad_rows(matrix))
    rows = reading.rows(text_path, add_row, keep_blank=True)
    if rows.num_seen != matrix.shape[0]:
        raise DataError(
            f"the matrix has {matrix.shape[0]:,} rows, {text_path.name} {rows.num_seen:,} lines: they must agree",
            path=matrix_path,
        )
    return rows


def _bad_rows(matrix: csr_matrix) -> dict[int, float]:
    """The rows with a weight that is negative or not finite, and that weight."""
    with np.errstate(over="ignore"):
        values = matrix.data.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    rows = np.searchsorted(matrix.indptr, bad, side="right") - 1
    return dict(zip(rows.tolist(), values[bad].tolist(), strict=True))


def _add_row(matrix: csr_matrix, bad_rows: dict[int, float], rows: Rows, line: str) -> None:
    row = rows.num_seen
    if row in bad_rows:
        raise BadRecord(
            "bad weight",
            f"weight {bad_rows[row]} of this text in the npz must be finite and not negative: correct it there",
        )
    if row >= matrix.shape[0]:
        rows.skip()  # counted only, so that the error about differing sizes can say how many there are
        return
    here = slice(matrix.indptr[row], matrix.indptr[row + 1])
    rows.add(line, matrix.indices[here].tolist(), weights=matrix.data[here].tolist())


def _write(dataset: Dataset, writing: Writing) -> None:
    writing.lines("raw/Y.txt", map(writing.one_line, dataset.label_texts))
    _write_split(dataset.train, writing, stem="trn")
    if dataset.test is not None:
        _write_split(dataset.test, writing, stem="tst")
    writing.filters(dataset)


def _write_split(split: Split, writing: Writing, *, stem: str) -> None:
    writing.lines(f"raw/{stem}_X.txt", map(writing.one_line, split.texts))
    save_npz(writing.folder / f"Y.{stem}.npz", split.relevance)


DEXML = Format(
    name="dexml",
    description="a folder with raw/trn_X.txt, raw/tst_X.txt, raw/Y.txt, Y.trn.npz and Y.tst.npz",
    detect=_detect,
    read=_read,
    write=_write,
    loses="query ids and label ids (row numbers stand for them)",
)
