"""The extreme classification repository's folder: `trn.json.gz`, `tst.json.gz` and `lbl.json.gz`, one object per line.

A query is `{"uid", "title", "content", "target_ind", "target_rel"}`, a label `{"uid", "title", "content"}`. The text is
title and content joined by a space. `target_ind` holds label indices from 0, `target_rel` their weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.assemble import assemble
from dexter.data.formats.format import Format
from dexter.data.formats.json_records import identifier_field, label_columns, parse_object, text_field
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import TRAIN, find_file, need_file, split_files
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows, check_weights
from dexter.data.formats.writing import Writing, row_columns

_SUFFIXES = (".json",)


def _detect(path: Path) -> bool:
    return path.is_dir() and find_file(path, TRAIN, _SUFFIXES) is not None


def _read(path: Path, reading: Reading) -> Dataset:
    train_path, test_path = split_files(path, _SUFFIXES)
    labels = reading.labels(need_file(path, ("lbl",), _SUFFIXES), _add_label)
    add_row = partial(_add_row, labels)
    train = reading.rows(train_path, add_row)
    test = reading.rows(test_path, add_row) if test_path else None
    return assemble(path, reading, labels=labels, train=train, test=test)


def _text(record: dict[str, Any]) -> str:
    title, content = text_field(record, "title"), text_field(record, "content", default="")
    return f"{title} {content}" if title and content else title or content


def _add_label(labels: LabelTable, line: str) -> None:
    record = parse_object(line)
    identifier = identifier_field(record)
    labels.add(str(len(labels)) if identifier is None else identifier, _text(record))


def _add_row(labels: LabelTable, rows: Rows, line: str) -> None:
    record = parse_object(line)
    columns = label_columns(record, "target_ind", labels)
    weights = check_weights(record["target_rel"], count=len(columns)) if "target_rel" in record else None
    rows.add(_text(record), columns, uid=identifier_field(record), weights=weights)


def _write(dataset: Dataset, writing: Writing) -> None:
    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writing.lines("lbl.json", (_json({"uid": uid, "title": text, "content": ""}) for uid, text in labels))
    writing.lines("trn.json", _lines(dataset.train))
    if dataset.test is not None:
        writing.lines("tst.json", _lines(dataset.test))
    writing.filters(dataset)


def _lines(split: Split) -> Iterator[str]:
    for uid, text, (columns, weights) in zip(split.uids, split.texts, row_columns(split), strict=True):
        relevance = [1.0] * len(columns) if weights is None else weights
        yield _json({"uid": uid, "title": text, "content": "", "target_ind": columns, "target_rel": relevance})


def _json(record: dict[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


XMC_JSON = Format(
    name="xmc-json",
    description="a folder with trn.json[.gz], tst.json[.gz] and lbl.json[.gz] of the extreme classification repository",
    detect=_detect,
    read=_read,
    write=_write,
    compress=True,
)
