"""Tables: CSV, TSV and Parquet with a text column and a column of labels, in one file or a folder of train and test.

A folder may also hold `lbl` or `labels` with an id and a text column; without it a label's id is its text. In CSV and
TSV the labels of a row share a cell, separated; in Parquet the cell may be a list. Columns and separator are guessed
from usual names and the first rows, and announced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from dexter.data.dataset import Dataset
from dexter.data.formats.annif import looks_like_annif
from dexter.data.formats.assemble import assemble
from dexter.data.formats.columns import (
    Cell,
    Columns,
    choose_columns,
    choose_label_file_columns,
    choose_separator,
    split_cell,
)
from dexter.data.formats.format import Format
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import LABELS, TRAIN, find_file, plain_suffix, split_files
from dexter.data.formats.problems import BadRecord, excerpt
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows, check_weights
from dexter.data.formats.table_rows import DELIMITERS, DelimitedFile, ParquetFile, Row
from dexter.data.formats.table_writing import write_delimited, write_parquet

_SAMPLE_ROWS = 200


def _detect(suffix: str, path: Path) -> bool:
    train = find_file(path, TRAIN, [suffix]) if path.is_dir() else path
    if train is None or plain_suffix(train) != suffix:
        return False
    return suffix != ".tsv" or not looks_like_annif(train)


def _read(suffix: str, path: Path, reading: Reading) -> Dataset:
    train_path, test_path = split_files(path, [suffix])
    labels_path = find_file(path, LABELS, [suffix]) if path.is_dir() else None
    labels = read_labels(suffix, labels_path, reading) if labels_path else LabelTable()
    train = _read_rows(suffix, train_path, reading, labels)
    test = _read_rows(suffix, test_path, reading, labels) if test_path else None
    return assemble(path, reading, labels=labels, train=train, test=test)


def _open(suffix: str, path: Path, reading: Reading) -> DelimitedFile | ParquetFile:
    reading.use(path)
    return ParquetFile(path) if suffix == ".parquet" else DelimitedFile(path, DELIMITERS[suffix])


def read_labels(suffix: str, path: Path, reading: Reading) -> LabelTable:
    """The labels of a table that has a column of ids and one of texts."""
    table = _open(suffix, path, reading)
    columns = choose_label_file_columns(table.names, path=path)
    labels = LabelTable(path)
    for line, cells in table.rows([columns.uid, columns.text]):
        try:
            usable = _usable(cells)
            identifier = _identifier(usable, columns.uid)
            if not identifier:
                raise BadRecord("label without id", "the label has no id: fill it in")
            labels.add(identifier, _text(usable, (columns.text,)))
        except BadRecord as bad:
            reading.problems.add(path, line, bad, skippable=False)
    reading.problems.check()
    return labels


@dataclass(frozen=True)
class _Layout:
    columns: Columns
    separator: str | None


def _read_rows(suffix: str, path: Path, reading: Reading, labels: LabelTable) -> Rows:
    table = _open(suffix, path, reading)
    columns = choose_columns(table.names, reading.table, path=path)
    records = table.rows(columns.used)
    sample = list(islice(records, _SAMPLE_ROWS))
    layout = _Layout(columns, _separator(sample, columns, reading, labels))
    parted = "" if layout.separator is None else f", labels split at {layout.separator!r}"
    reading.announce(f"{path.name}: {columns.describe(table.names)}{parted}")
    rows = Rows()
    for line, cells in chain(sample, records):
        try:
            _add_row(rows, _usable(cells), layout, labels)
        except BadRecord as bad:
            reading.problems.add(path, line, bad)
            rows.skip()
    return rows


def _separator(sample: Iterable[Row], columns: Columns, reading: Reading, labels: LabelTable) -> str | None:
    if reading.table.label_separator is not None:
        return reading.table.label_separator
    cells = [cells[columns.labels] for _, cells in sample if isinstance(cells, list)]
    return choose_separator(cells, labels.known)


def _add_row(rows: Rows, cells: list[Cell], layout: _Layout, labels: LabelTable) -> None:
    columns = layout.columns
    text, uid = _text(cells, columns.text), _identifier(cells, columns.uid)
    identifiers = split_cell(cells[columns.labels], layout.separator, labels.known)
    weights = None
    if columns.weights is not None and cells[columns.weights]:
        parts = split_cell(cells[columns.weights], layout.separator, None)
        weights = check_weights([_number(part) for part in parts], count=len(identifiers))
    rows.add(text, labels.columns_of_ids(identifiers), uid=uid, weights=weights)


def _usable(cells: list[Cell] | BadRecord) -> list[Cell]:
    if isinstance(cells, BadRecord):
        raise cells
    return cells


def _text(cells: list[Cell], positions: tuple[int, ...]) -> str:
    parts = [cells[position] or "" for position in positions]
    if not all(isinstance(part, str) for part in parts):
        raise BadRecord("text type", "the text cell holds a list, expected a string: name another text_column")
    return " ".join(str(part) for part in parts if part)


def _identifier(cells: list[Cell], position: int | None) -> str | None:
    value = None if position is None else cells[position]
    if isinstance(value, list):
        raise BadRecord("id type", f"the id cell holds a list, expected a string: {excerpt(value)}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadRecord("weights not numbers", f"expected a number as weight, got {excerpt(text)}") from None


def _description(suffix: str) -> str:
    return (
        f"train{suffix} or trn{suffix} with a header (and test; lbl for label texts) in a folder, or one {suffix} file"
    )


CSV = Format(
    name="csv", description=_description(".csv"), detect=partial(_detect, ".csv"), read=partial(_read, ".csv"),
    write=partial(write_delimited, ".csv"), is_table=True,
)  # fmt: skip
TSV = Format(
    name="tsv", description=_description(".tsv"), detect=partial(_detect, ".tsv"), read=partial(_read, ".tsv"),
    write=partial(write_delimited, ".tsv"), is_table=True,
)  # fmt: skip
PARQUET = Format(
    name="parquet", description=_description(".parquet"), detect=partial(_detect, ".parquet"),
    read=partial(_read, ".parquet"), write=write_parquet, is_table=True,
)  # fmt: skip
