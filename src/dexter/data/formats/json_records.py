"""Fields of one JSON object per line, checked: what the two JSON formats share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dexter.data.formats.labels import LabelTable
from dexter.data.formats.problems import BadRecord, excerpt


def parse_object(line: str) -> dict[str, Any]:
    """The JSON object of a line, or `BadRecord`."""
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
    """A string field; missing without a default, of another type or with half a surrogate pair it is a bad record."""
    text = record.get(name, default)
    if type(text) is not str:
        if name not in record:
            raise BadRecord(f"no {name}", f'the field "{name}" is missing: the line has {_names(record)}')
        raise BadRecord(f"type of {name}", f'the field "{name}" must be a string, got {excerpt(text)}')
    return whole_text(text, name=name)


def whole_text(text: str, *, name: str) -> str:
    """The text, or `BadRecord` if it holds half a surrogate pair, which no UTF-8 file can carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(
            "lone surrogate", f'the field "{name}" holds half a surrogate pair (\\ud800 to \\udfff): remove it'
        ) from None
    return text


def identifier_field(record: dict[str, Any], names: Sequence[str] = ("uid", "id")) -> str | None:
    """The identifier, a string or a whole number, under the first of the names that is there; None without one."""
    name = next((name for name in names if name in record), None)
    if name is None:
        return None
    value = record[name]
    if type(value) is int and abs(value) < 10**18:
        return str(value)
    if type(value) is not str:
        raise BadRecord(f"type of {name}", f'the field "{name}" must be a string, got {excerpt(value)}')
    return whole_text(value, name=name)


def label_columns(record: dict[str, Any], name: str, labels: LabelTable) -> Sequence[int]:
    """The columns of a list of label ids (strings) or label indices (whole numbers)."""
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
        return labels.columns_of_ids([whole_text(value, name=name) for value in values] if labels.is_open else values)
    raise BadRecord(
        f"type of {name}",
        f'the field "{name}" must hold label ids (strings) or indices (whole numbers), got {excerpt(values)}',
    )


def _names(record: dict[str, Any]) -> str:
    return ", ".join(excerpt(name) for name in list(record)[:8]) or "no field"
