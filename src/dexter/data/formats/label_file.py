"""A file of labels alone: JSONL with id (or uid) and text, or a table (CSV, TSV, Parquet) with such columns."""

from __future__ import annotations

from pathlib import Path

from dexter.data.formats import jsonl, table
from dexter.data.formats.layout import plain_suffix
from dexter.data.formats.load import log_line
from dexter.data.formats.problems import Problems
from dexter.data.formats.reading import Reading
from dexter.errors import DataError

_TABLES = (".csv", ".tsv", ".parquet")


def read_label_file(path: Path) -> list[tuple[str, str]]:
    """The (id, text) of every label of a file; every bad line fails it."""
    suffix = plain_suffix(path)
    reading = Reading(path, problems=Problems("fail"), announce=log_line)
    if suffix == ".jsonl":
        labels = reading.labels(path, jsonl.add_named_label)
    elif suffix in _TABLES:
        labels = table.read_labels(suffix, path, reading)
    else:
        raise DataError(f"a file of labels ends in .jsonl, {', '.join(_TABLES)} (or .gz after it)", path=path)
    return list(zip(labels.ids, labels.texts, strict=True))
