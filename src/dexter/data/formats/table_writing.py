"""Tables written out: CSV, TSV and Parquet, each with a labels file, so that the reader finds every label again."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.columns import SEPARATORS
from dexter.data.formats.table_rows import DELIMITERS
from dexter.data.formats.writing import Writing, row_columns
from dexter.errors import DataError, require


def write_delimited(suffix: str, dataset: Dataset, writing: Writing) -> None:
    """Write CSV or TSV, by suffix: `train`, `test` and `lbl`, the labels of a row in one cell."""
    _refuse_empty_ids(dataset)
    separator = _writable_separator(dataset)
    labels = map(list, zip(dataset.label_ids, dataset.label_texts, strict=True))
    _write_cells(suffix, "lbl", writing, [["uid", "text"], *labels])
    for stem, split in (("train", dataset.train), ("test", dataset.test)):
        if split is not None:
            _write_cells(suffix, stem, writing, _delimited_rows(split, dataset, separator))
    writing.filters(dataset)


def _write_cells(suffix: str, stem: str, writing: Writing, rows: Iterable[list[str]]) -> None:
    with writing.text_file(stem + suffix) as handle:
        # Every cell quoted: with fewer quotes, the csv module lets a carriage return through that it refuses to read.
        writer = csv.writer(handle, delimiter=DELIMITERS[suffix], lineterminator="\n", quoting=csv.QUOTE_ALL)
        writer.writerows(map(writing.without_nul, row) for row in rows)


def _delimited_rows(split: Split, dataset: Dataset, separator: str) -> Iterator[list[str]]:
    graded = bool((split.relevance.data != 1.0).any())
    yield ["uid", "text", "labels", *(["weights"] if graded else [])]
    for uid, text, (columns, weights) in zip(split.uids, split.texts, row_columns(split), strict=True):
        row = [uid, text, separator.join(dataset.label_ids[column] for column in columns)]
        yield [*row, separator.join(map(repr, weights or ()))] if graded else row


def _writable_separator(dataset: Dataset) -> str:
    """A separator that no label id contains, which the reader will find again with the help of the labels file."""
    if any("\0" in identifier for identifier in dataset.label_ids):
        raise DataError("a label id holds a NUL, which a text file cannot carry: write jsonl or parquet")
    for separator in SEPARATORS:
        if not any(separator in identifier for identifier in dataset.label_ids):
            return separator
    tried = " ".join(map(repr, SEPARATORS))
    raise DataError(f"each of {tried} occurs in some label id, so none can separate them: write jsonl or parquet")


def _refuse_empty_ids(dataset: Dataset) -> None:
    if "" in dataset.label_ids:
        raise DataError("a label id is empty, which a cell of labels cannot carry: give it a name or write jsonl")


def write_parquet(dataset: Dataset, writing: Writing) -> None:
    """Write Parquet: `train`, `test` and `lbl`, the labels of a row as a list."""
    arrow = require("pyarrow", extra="data", purpose="writing Parquet")
    parquet = require("pyarrow.parquet", extra="data", purpose="writing Parquet")
    _refuse_empty_ids(dataset)
    strings, numbers = arrow.list_(arrow.string()), arrow.list_(arrow.float32())
    labels = arrow.table(
        {
            "uid": arrow.array(dataset.label_ids, arrow.string()),
            "text": arrow.array(dataset.label_texts, arrow.string()),
        }
    )
    parquet.write_table(labels, writing.folder / "lbl.parquet")
    for stem, split in (("train", dataset.train), ("test", dataset.test)):
        if split is None:
            continue
        rows = list(row_columns(split))
        cells = {
            "uid": arrow.array(split.uids, arrow.string()),
            "text": arrow.array(split.texts, arrow.string()),
            "labels": arrow.array([[dataset.label_ids[column] for column in columns] for columns, _ in rows], strings),
        }
        if (split.relevance.data != 1.0).any():
            cells["weights"] = arrow.array([weights or [1.0] * len(columns) for columns, weights in rows], numbers)
        parquet.write_table(arrow.table(cells), writing.folder / f"{stem}.parquet")
    writing.filters(dataset)
