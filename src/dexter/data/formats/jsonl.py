"""One JSON object per line: our own folder (`jsonl`) and the extreme classification repository's (`xmc-json`).

- `jsonl`: `trn.jsonl`, `tst.jsonl` and `lbl.jsonl`. A query is `{"uid", "text", "labels"}` with label ids (strings) or
  label indices (whole numbers from 0, in the order of `lbl.jsonl`), and `"weights"` where relevance is graded. A label
  is `{"uid", "text"}`.
- `xmc-json`: `trn.json.gz`, `tst.json.gz` and `lbl.json.gz`. A query is `{"uid", "title", "content", "target_ind",
  "target_rel"}`, a label `{"uid", "title", "content"}`. The text is title and content joined by a space, or the title
  alone: that is another data set in the same files. `target_ind` holds label indices, `target_rel` their weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dexter.data.benchmarks import TITLE, TITLE_AND_CONTENT
from dexter.data.dataset import Dataset, Split
from dexter.data.formats.lines import BadRecord, decode, excerpt, raw_lines, without_line_end
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
    split_files,
    train_file,
)
from dexter.data.formats.writer import Writer, labels_of_rows
from dexter.errors import DataError

_SUFFIX, _XMC_SUFFIX = (".jsonl",), (".json",)


def detect(path: Path) -> bool:
    """Whether a path is a `.jsonl` file or a folder with one."""
    return train_file(path, _SUFFIX) is not None


def detect_xmc_json(path: Path) -> bool:
    """Whether a path is a folder with `trn.json`."""
    return find_file(path, TRAIN, _XMC_SUFFIX) is not None


def read(reader: Reader) -> Dataset:
    """Read our own folder or a single file."""
    labels = reader.labels(find_file(reader.root, LABELS, _SUFFIX), partial(_add_label, _FIELDS))
    read_split = partial(reader.queries, add_query=partial(_add_query, _FIELDS, labels))
    return reader.dataset(labels, read_split, split_files(reader.root, _SUFFIX))


def read_xmc_json(reader: Reader) -> Dataset:
    """Read a folder of the extreme classification repository."""
    files = split_files(reader.root, _XMC_SUFFIX)
    text = _RecordText(reader.text_fields or _fields_by_name(reader.name))
    fields = _Fields(text=text, labels="target_ind", weights="target_rel")
    labels = reader.labels(need_file(reader.root, ("lbl",), _XMC_SUFFIX), partial(_add_label, fields))
    dataset = reader.dataset(labels, partial(reader.queries, add_query=partial(_add_query, fields, labels)), files)
    if reader.has_stored_fields:  # written by us: what was title and content stands in the title
        return dataset
    if text.has_content and reader.text_fields is None:
        log.info('texts are title and content; for a data set of titles choose text_fields "title"')
    return replace(dataset, text_fields=text.fields if text.has_content else TITLE)


def read_labels(reader: Reader, path: Path) -> LabelTable:
    """Read a file of labels alone, each of which must have an id: there is no order that could number them."""

    def add_label(labels: LabelTable, line: str) -> None:
        if not identifier_field(parse_object(line)):
            raise BadRecord("label without id", 'the label has no id: give it a field "id" or "uid"')
        _add_label(_FIELDS, labels, line)

    return reader.labels(path, add_label)


def write(dataset: Dataset, writer: Writer) -> None:
    """Write our own folder."""
    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writer.lines("lbl.jsonl", (_json({"uid": uid, "text": text}) for uid, text in labels))
    writer.splits(dataset, ("trn.jsonl", "tst.jsonl"), _lines)


def write_xmc_json(dataset: Dataset, writer: Writer) -> None:
    """Write a folder of the extreme classification repository; texts become titles."""
    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writer.lines("lbl.json", (_json({"uid": uid, "title": text, "content": ""}) for uid, text in labels))
    writer.splits(dataset, ("trn.json", "tst.json"), _xmc_lines)


def parse_object(line: str) -> dict[str, Any]:
    """Parse the JSON object of a line, or raise `BadRecord`."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecord(
            "malformed JSON", f"not a JSON object: {error.msg} at character {error.pos + 1}: correct or remove the line"
        ) from None
    except (ValueError, RecursionError):
        raise BadRecord("malformed JSON", "not a usable JSON object: a number too long or nesting too deep") from None
    if type(value) is not dict:
        raise BadRecord("not an object", f"expected a JSON object, got {excerpt(value)}: write one object per line")
    return value


def text_field(record: dict[str, Any], name: str, *, default: str | None = None) -> str:
    """Return a string field; missing without a default, of another type or with half a surrogate pair it is bad."""
    text = record.get(name, default)
    if type(text) is not str:
        if name not in record:
            raise BadRecord(f"no {name}", f'the field "{name}" is missing: the line has {_names(record)}')
        raise BadRecord(f"type of {name}", f'the field "{name}" must be a string, got {excerpt(text)}')
    return _encodable(text, name=name)


def identifier_field(record: dict[str, Any]) -> str | None:
    """Return the identifier, a string or a whole number, from "uid", "id" or "document_id"; None without one."""
    name = next((name for name in ("uid", "id", "document_id") if name in record), None)
    if name is None:
        return None
    value = record[name]
    if type(value) is int and abs(value) < 10**18:
        return str(value)
    if type(value) is not str:
        raise BadRecord(f"type of {name}", f'the field "{name}" must be a string, got {excerpt(value)}')
    return _encodable(value, name=name)


def read_column(path: Path, name: str) -> list[str]:
    """Read one field of every record."""
    values = []
    for number, raw in raw_lines(path):
        if raw.strip():
            record = parse_object(without_line_end(decode(raw)))
            if name not in record:
                raise DataError(f"the record has no field {name!r}: it has {', '.join(record)}", path=path, line=number)
            values.append(str(record[name]))
    return values


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """The names of a query's fields."""

    text: Callable[[dict[str, Any]], str]
    labels: str
    weights: str


class _RecordText:
    """Makes the text of a record of its title, or of title and content."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self.fields = fields
        self.has_content = False
        """Whether any text has a content."""

    def __call__(self, record: dict[str, Any]) -> str:
        title = text_field(record, "title")
        content = text_field(record, "content", default="") if self.fields == TITLE_AND_CONTENT else ""
        self.has_content |= bool(content)
        return f"{title} {content}" if title and content else title or content


def _fields_by_name(name: str) -> tuple[str, ...]:
    """Return the fields of a data set's texts: the title alone if its name says so, as LF-AmazonTitles-131K does."""
    if "titles" not in name.lower():
        return TITLE_AND_CONTENT
    log.info('texts are the title alone, as the name %s says; text_fields "title,content" reads both', name)
    return TITLE


_FIELDS = _Fields(text=partial(text_field, name="text"), labels="labels", weights="weights")


def _add_label(fields: _Fields, labels: LabelTable, line: str) -> None:
    record = parse_object(line)
    labels.add(identifier_field(record), fields.text(record))


def _add_query(fields: _Fields, labels: LabelTable, split: SplitBuilder, line: str) -> None:
    record = parse_object(line)
    text, uid = fields.text(record), identifier_field(record)
    weights = None
    if fields.weights in record:
        given = record.get(fields.labels)
        weights = check_weights(record[fields.weights], count=len(given) if type(given) is list else 0)
    # Last, because an open table adds the labels of a row: a bad row must leave nothing behind.
    split.add(text, _label_columns(record, fields.labels, labels), uid=uid, weights=weights)


def _label_columns(record: dict[str, Any], name: str, labels: LabelTable) -> Sequence[int]:
    """Return the columns of a list of label ids (strings) or label indices (whole numbers)."""
    if name not in record and "subjects" in record:
        return labels.columns_of_ids(_subjects(record["subjects"]))
    if name not in record:
        raise BadRecord(
            f"no {name}",
            f'the field "{name}" is missing: the line has {_names(record)}; write [] for a row without labels',
        )
    values = record[name]
    if type(values) is not list:
        raise BadRecord(f"type of {name}", f'the field "{name}" must be a list of labels, got {excerpt(values)}')
    kinds = set(map(type, values))
    if not kinds:
        return []
    if kinds == {int}:
        return labels.columns_of_indices(values)
    if kinds == {str}:
        return labels.columns_of_ids([_encodable(value, name=name) for value in values] if labels.is_open else values)
    raise BadRecord(
        f"type of {name}",
        f'the field "{name}" must hold label ids (strings) or indices (whole numbers), got {excerpt(values)}',
    )


def _subjects(subjects: object) -> list[str]:
    """Return the ids of a list of subjects as Annif writes them: objects with a uri, or else a label."""
    if type(subjects) is not list or not all(
        type(one) is dict and (one.get("uri") or one.get("label")) for one in subjects
    ):
        raise BadRecord(
            "subjects", f'the field "subjects" must be a list of objects with a uri or a label, got {excerpt(subjects)}'
        )
    return [_encodable(str(one.get("uri") or one["label"]), name="subjects") for one in subjects]


def _encodable(text: str, *, name: str) -> str:
    """Return the text, or raise `BadRecord` if it holds half a surrogate pair, which UTF-8 cannot represent."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(
            "lone surrogate", f'the field "{name}" holds half a surrogate pair (\\ud800 to \\udfff): remove it'
        ) from None
    return text


def _names(record: dict[str, Any]) -> str:
    return ", ".join(excerpt(name) for name in list(record)[:8]) or "no field"


def _lines(split: Split) -> Iterator[str]:
    for uid, text, (columns, weights) in zip(split.uids, split.texts, labels_of_rows(split), strict=True):
        row: dict[str, object] = {"uid": uid, "text": text, "labels": columns}
        yield _json(row if weights is None else row | {"weights": weights})


def _xmc_lines(split: Split) -> Iterator[str]:
    for uid, text, (columns, weights) in zip(split.uids, split.texts, labels_of_rows(split), strict=True):
        relevance = [1.0] * len(columns) if weights is None else weights
        yield _json({"uid": uid, "title": text, "content": "", "target_ind": columns, "target_rel": relevance})


def _json(record: dict[str, object]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
