"""Texts in: queries from a file or stdin, a text or a JSON object per line, or a table; one at a time.

Apart from `files.py` because a text on the command line does not need the formats of data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from dexter.data.formats.jsonl import identifier_field, parse_object, text_field
from dexter.data.formats.lines import MAX_LINE_BYTES, BadRecord, decode, raw_lines, without_line_end
from dexter.data.formats.tables import is_table, read_queries
from dexter.errors import DataError, UsageError
from dexter.predict.files import Query


def read_texts(path: Path | None, *, text_column: str | None = None) -> Iterator[Query]:
    """Read queries from a file (gzip or not) or stdin: a text per line, or a JSON object with `text` and maybe `id`.

    Lines are JSON if the file's name says so (`.jsonl`) or the first line is a JSON object; then all of them must be.
    CSV, TSV and Parquet files are read as tables, as training reads them: the text from `text_column`, or from a column
    with a usual name. Empty lines are skipped; a query without an id gets the number of its line.
    """
    name = "stdin" if path is None else str(path)
    if path is not None and is_table(path) and not path.is_fifo():
        rows = read_queries(path, text_column=text_column)
        yield from (Query(uid or str(row), text, has_id=bool(uid)) for row, uid, text in rows)
        return
    if text_column is not None:
        raise UsageError(f"--text-column applies to tables (.csv, .tsv, .parquet), not to {name}")
    is_json = True if name.removesuffix(".gz").endswith(".jsonl") else None
    for number, raw in _lines(path):
        try:
            line = without_line_end(decode(raw))
            if not line.strip():
                continue
            if is_json is None:
                is_json = _is_object(line)
            yield _record(line, number) if is_json else Query(str(number), line)
        except BadRecord as bad:
            raise DataError(bad.message, path=name, line=number) from None


def _lines(path: Path | None) -> Iterator[tuple[int, bytes]]:
    if path is not None and not path.is_fifo():
        yield from raw_lines(path)
        return
    with nullcontext(sys.stdin.buffer) if path is None else path.open("rb") as handle:
        # A line that is too long is cut, and refused by `decode`.
        for number, raw in enumerate(iter(lambda: handle.readline(MAX_LINE_BYTES + 1), b""), start=1):
            yield number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw


def _is_object(line: str) -> bool:
    try:
        parse_object(line)
    except BadRecord:
        return False
    return True


def _record(line: str, number: int) -> Query:
    record = parse_object(line)
    uid = identifier_field(record)
    return Query(str(number) if uid is None else uid, text_field(record, "text"), has_id=uid is not None)
