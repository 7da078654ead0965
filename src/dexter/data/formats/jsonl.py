"""Our own folder: `trn.jsonl`, `tst.jsonl` and `lbl.jsonl`, one JSON object per line, gzip or not.

A query is `{"uid", "text", "labels"}` with label ids (strings) or label indices (whole numbers from 0, in the order of
`lbl.jsonl`), and `"weights"` where relevance is graded. A label is `{"uid", "text"}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.assemble import assemble
from dexter.data.formats.format import Format
from dexter.data.formats.json_records import identifier_field, label_columns, parse_object, text_field
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import LABELS, TRAIN, find_file, plain_suffix, split_files
from dexter.data.formats.problems import BadRecord
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows, check_weights
from dexter.data.formats.writing import Writing, row_columns

_SUFFIXES = (".jsonl",)


def _detect(path: Path) -> bool:
    return find_file(path, TRAIN, _SUFFIXES) is not None if path.is_dir() else plain_suffix(path) in _SUFFIXES


def _read(path: Path, reading: Reading) -> Dataset:
    train_path, test_path = split_files(path, _SUFFIXES)
    labels_path = find_file(path, LABELS, _SUFFIXES) if path.is_dir() else None
    labels = reading.labels(labels_path, _add_label) if labels_path else LabelTable()
    add_row = partial(_add_row, labels)
    train = reading.rows(train_path, add_row)
    test = reading.rows(test_path, add_row) if test_path else None
    return assemble(path, reading, labels=labels, train=train, test=test)


def _add_label(labels: LabelTable, line: str) -> None:
    record = parse_object(line)
    identifier = identifier_field(record)
    labels.add(str(len(labels)) if identifier is None else identifier, text_field(record, "text"))


def add_named_label(labels: LabelTable, line: str) -> None:
    """Take up a label that must have an id: there is no order that it could be numbered by."""
    record = parse_object(line)
    identifier = identifier_field(record)
    if not identifier:
        raise BadRecord("label without id", 'the label has no id: give it a field "id" or "uid"')
    labels.add(identifier, text_field(record, "text"))


def _add_row(labels: LabelTable, rows: Rows, line: str) -> None:
    record = parse_object(line)
    text, uid = text_field(record, "text"), identifier_field(record)
    weights = None
    if "weights" in record:
        given = record.get("labels")
        weights = check_weights(record["weights"], count=len(given) if type(given) is list else 0)
    # Last, because an open table takes up the labels of a row: a bad row must leave nothing behind.
    rows.add(text, label_columns(record, "labels", labels), uid=uid, weights=weights)


def _write(dataset: Dataset, writing: Writing) -> None:
    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writing.lines("lbl.jsonl", (_json({"uid": uid, "text": text}) for uid, text in labels))
    writing.lines("trn.jsonl", _lines(dataset.train))
    if dataset.test is not None:
        writing.lines("tst.jsonl", _lines(dataset.test))
    writing.filters(dataset)


def _lines(split: Split) -> Iterator[str]:
    for uid, text, (columns, weights) in zip(split.uids, split.texts, row_columns(split), strict=True):
        row: dict[str, object] = {"uid": uid, "text": text, "labels": columns}
        yield _json(row if weights is None else row | {"weights": weights})


def _json(record: dict[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


JSONL = Format(
    name="jsonl",
    description="a folder with trn.jsonl, and tst.jsonl and lbl.jsonl if there are any, or one .jsonl file",
    detect=_detect,
    read=_read,
    write=_write,
    compress=True,
)
