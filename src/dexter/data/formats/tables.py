"""Tables: CSV, TSV and Parquet with a text column and a column of labels, in one file or a folder of train and test.

A folder may also hold `lbl` or `labels` with an id and a text column; without it a label's id is its text. In CSV and
TSV the labels of a row share a cell, separated or written as a list (`["a", "b"]`); in Parquet the cell may be a list.
Columns and separators are guessed from usual names and the first rows, and the guess is logged.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from dexter.data.dataset import Dataset, Split
from dexter.data.formats import annif
from dexter.data.formats.columns import (
    SEPARATORS,
    Cell,
    TableOptions,
    choose_column,
    choose_columns,
    choose_delimiter,
    choose_label_file_columns,
    choose_separator,
    choose_text_columns,
    holds_lists,
    parse_list,
    split_cell,
)
from dexter.data.formats.lines import (
    MAX_LINE_BYTES,
    BadRecord,
    decode,
    decompressed_limit,
    excerpt,
    first_lines,
    limit_advice,
    raw_lines,
)
from dexter.data.formats.reader import (
    LABELS,
    LabelTable,
    Reader,
    SplitBuilder,
    check_weights,
    find_file,
    log,
    plain_suffix,
    split_files,
    train_file,
)
from dexter.data.formats.writer import Writer, labels_of_rows
from dexter.errors import DataError, require

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_SAMPLE_ROWS = 200
_BATCH_ROWS = 1024
_BYTES_PER_VALUE = 8
"""The fewest bytes that a value of a Parquet file takes in memory."""

_Row = tuple[int, list[Cell] | BadRecord]
"""The line (or, in Parquet, the row) a record starts at, and its cells or what is wrong with it."""


def detect(suffix: str, path: Path) -> bool:
    """Whether a path is a table file of that suffix or a folder with one."""
    return train_file(path, [suffix]) is not None and not (suffix == ".tsv" and annif.detect(path))


def read(suffix: str, reader: Reader) -> Dataset:
    """Read a folder or a single file."""
    files = split_files(reader.root, [suffix])
    labels_path = find_file(reader.root, LABELS, [suffix])
    labels = LabelTable() if labels_path is None else read_labels(reader, labels_path)
    return reader.dataset(labels, partial(_read_split, reader, labels), files)


def read_labels(reader: Reader, path: Path) -> LabelTable:
    """Read a table of labels, which has a column of ids and one of texts."""
    table = _open(reader.use(path))
    uid, text = choose_label_file_columns(table.names, path=path)
    labels = LabelTable(path)

    def add_label(cells: list[Cell]) -> None:
        identifier = _identifier(cells, uid)
        if not identifier:
            raise BadRecord("label without id", "the label has no id: fill it in")
        labels.add(identifier, _text(cells, (text,)))

    for line, cells in table.rows([uid, text]):
        bad = _call(add_label, cells)
        if bad is not None:
            reader.errors.add(path, line, bad, skippable=False)
    reader.errors.check()
    return labels


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its name."""
    return plain_suffix(path) in (*_DELIMITERS, ".parquet")


def read_queries(path: Path, *, text_column: str | None = None) -> Iterator[tuple[int, str, str]]:
    """Yield the line, id (empty without one) and text of each row of a table of texts to label."""
    table = _open(path)
    uid, text = choose_text_columns(table.names, TableOptions(text_column=text_column), path=path)
    log.info(f"{path.name}: text from {' + '.join(repr(table.names[position]) for position in text)}")
    for line, cells in table.rows([*text, *([] if uid is None else [uid])]):
        try:
            if isinstance(cells, BadRecord):
                raise cells
            yield line, _identifier(cells, uid) or "", _text(cells, text)
        except BadRecord as bad:
            raise DataError(bad.message, path=path, line=line) from None


def read_column(path: Path, name: str) -> list[str]:
    """Read the cells of one column."""
    table = _open(path)
    position = choose_column(table.names, name, path=path)
    return [
        _identifier(cells, position) or "" if isinstance(cells, list) else "" for _, cells in table.rows([position])
    ]


def write(suffix: str, dataset: Dataset, writer: Writer) -> None:
    """Write `train`, `test` and `lbl`: the labels of a row as a list in Parquet, else in one cell."""
    if "" in dataset.label_ids:
        raise DataError("a label id is empty, which a cell of labels cannot hold: give it a name or write jsonl")
    if suffix == ".parquet":
        _write_parquet(dataset, writer)
    else:
        _write_delimited(suffix, dataset, writer)


def _write_delimited(suffix: str, dataset: Dataset, writer: Writer) -> None:
    separator = _writable_separator(dataset)

    def write_rows(stem: str, rows: Iterable[list[str]]) -> None:
        with writer.text_file(stem + suffix) as handle:
            # Every cell quoted: with fewer quotes, the csv module writes carriage returns that it refuses to read.
            cells = csv.writer(handle, delimiter=_DELIMITERS[suffix], lineterminator="\n", quoting=csv.QUOTE_ALL)
            cells.writerows(map(writer.without_nul, row) for row in rows)

    labels = map(list, zip(dataset.label_ids, dataset.label_texts, strict=True))
    write_rows("lbl", [["uid", "text"], *labels])
    for stem, split in dataset.splits.items():
        write_rows(stem, _delimited_rows(split, dataset, separator))


def _write_parquet(dataset: Dataset, writer: Writer) -> None:
    arrow = require("pyarrow", extra="data", purpose="writing Parquet")
    parquet = require("pyarrow.parquet", extra="data", purpose="writing Parquet")
    string, number = arrow.string(), arrow.float32()

    def write_columns(stem: str, columns: dict[str, tuple[Sequence[Any], Any]]) -> None:
        arrays = {name: arrow.array(values, kind) for name, (values, kind) in columns.items()}
        parquet.write_table(arrow.table(arrays), writer.folder / f"{stem}.parquet")

    write_columns("lbl", {"uid": (dataset.label_ids, string), "text": (dataset.label_texts, string)})
    for stem, split in dataset.splits.items():
        rows = list(labels_of_rows(split))
        labels = [[dataset.label_ids[column] for column in columns] for columns, _ in rows]
        weights = [weights or [1.0] * len(columns) for columns, weights in rows]
        columns = {"uid": (split.uids, string), "text": (split.texts, string), "labels": (labels, arrow.list_(string))}
        graded = {"weights": (weights, arrow.list_(number))} if _is_graded(split) else {}
        write_columns(stem, columns | graded)


def _read_split(reader: Reader, labels: LabelTable, path: Path) -> SplitBuilder:
    table = _open(reader.use(path))
    columns = choose_columns(table.names, reader.table, path=path)
    records = table.rows(columns.used)
    sample = list(islice(records, _SAMPLE_ROWS))
    separator = reader.table.label_separator
    cells_seen = [row[columns.labels] for _, row in sample if isinstance(row, list)]
    are_lists = separator is None and holds_lists(cells_seen, labels.known)
    if separator is None and not are_lists:
        separator = choose_separator(cells_seen, labels.known)
    parted = ", a list of labels in each cell" if are_lists else f", labels split at {separator!r}" if separator else ""
    log.info(f"{path.name}: {columns.describe(table.names)}{parted}")
    split = SplitBuilder()

    def add_query(cells: list[Cell]) -> None:
        text, uid = _text(cells, columns.text), _identifier(cells, columns.uid)
        given = cells[columns.labels]
        identifiers = split_cell(_list_cell(given) if are_lists else given, separator, labels.known)
        weights = None
        if columns.weights is not None and cells[columns.weights]:
            listed = cells[columns.weights]
            parts = split_cell(_list_cell(listed) if are_lists else listed, separator, None)
            weights = check_weights([_number(part) for part in parts], count=len(identifiers))
        split.add(text, labels.columns_of_ids(identifiers), uid=uid, weights=weights)

    for line, cells in chain(sample, records):
        bad = _call(add_query, cells)
        if bad is not None:
            reader.errors.add(path, line, bad)
            split.skip()
    return split


def _list_cell(cell: Cell) -> Cell:
    if not isinstance(cell, str) or not cell.strip():
        return cell
    items = parse_list(cell)
    if items is None:
        message = f'expected a list such as ["a", "b"], as in the other rows, got {excerpt(cell)}'
        raise BadRecord("no list", message)
    return items


def _call(use: Callable[[list[Cell]], None], cells: list[Cell] | BadRecord) -> BadRecord | None:
    """Call `use` with the cells of a row; returns what is wrong with the row, if anything is."""
    if isinstance(cells, BadRecord):
        return cells
    try:
        use(cells)
    except BadRecord as bad:
        return bad
    return None


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


def _open(path: Path) -> _DelimitedFile | _ParquetFile:
    suffix = plain_suffix(path)
    return _ParquetFile(path) if suffix == ".parquet" else _DelimitedFile(path, _DELIMITERS.get(suffix, ","))


class _DelimitedFile:
    """A CSV or TSV file, quoted as in RFC 4180, so that a cell may hold line breaks."""

    def __init__(self, path: Path, usual: str) -> None:
        delimiter = choose_delimiter("".join(first_lines(path, count=1)), usual)
        if delimiter != usual:
            log.info(f"{path.name}: columns separated by {delimiter!r}")
        self._lines = _DecodedLines(path)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        header = next(self._records(), None)
        if header is None:
            raise DataError("the file is empty: expected a line of column names", path=path)
        line, names = header
        if isinstance(names, BadRecord):
            raise DataError(names.message, path=path, line=line)
        self.names: list[str] = [str(name) for name in names]

    def rows(self, used: Sequence[int]) -> Iterator[_Row]:
        """Yield each row with all its cells; `used` is for Parquet files, which read these columns only."""
        with _long_fields():
            for line, cells in self._records():
                if isinstance(cells, list) and len(cells) != len(self.names):
                    message = f"got {len(cells)} cells, the header has {len(self.names)}: quote or complete the row"
                    yield line, BadRecord("ragged row", message)
                else:
                    yield line, cells

    def _records(self) -> Iterator[_Row]:
        """Yield each record that is not blank, with the line it starts at."""
        while True:
            line = self._lines.number + 1
            try:
                cells: list[Cell] = list(next(self._reader))
            except StopIteration:
                return
            except BadRecord as bad:
                yield self._lines.number, bad
            except csv.Error as error:
                message = f"{error} (is a quote not closed, or not doubled within quotes?): correct the row"
                yield line, BadRecord("quotes", message)
            else:
                if cells:
                    yield line, cells


class _DecodedLines:
    """Lines of text with their number; unlike a generator, it continues after raising `BadRecord` for one of them."""

    def __init__(self, path: Path) -> None:
        self.number = 0
        self._raw = raw_lines(path)

    def __iter__(self) -> _DecodedLines:
        return self

    def __next__(self) -> str:
        self.number, raw = next(self._raw)
        return decode(raw)


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let a cell be as long as a line may be; the limit of the csv module is global, so it is restored."""
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


class _ParquetFile:
    """A Parquet file, read in batches, of which no more is decoded than its size allows.

    A few bytes can stand for gigabytes: a long string that many rows refer to, or a list of a billion equal values.
    Strings are therefore read as dictionaries, whose size is known before they are expanded. Lists can be read so only
    where all of a group of rows is encoded in one way: there, that is how they are measured before they are read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        parquet = require("pyarrow.parquet", extra="data", purpose="reading Parquet")
        try:
            plain = parquet.ParquetFile(path)
            leaves = map(plain.schema.column, range(len(plain.schema)))
            strings = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            self._lists = [name for name in strings if "." in name]
            flat = [name for name in strings if "." not in name]
            self._file = parquet.ParquetFile(path, read_dictionary=flat)
            self._measured_file = parquet.ParquetFile(path, read_dictionary=self._lists)
            self.names: list[str] = [str(name) for name in plain.schema_arrow.names]
        except (OSError, ValueError, RuntimeError) as error:
            raise _parquet_error(path, error) from None

    def rows(self, used: Sequence[int]) -> Iterator[_Row]:
        """Yield each row with its cells, of which only the used ones are filled."""
        names = [self.names[position] for position in used]
        row, seen = 0, 0
        self._check_size(self._announced_bytes(names), row)
        self._check_size(self._measure_lists(names), row)
        batches = self._file.iter_batches(batch_size=_BATCH_ROWS, columns=names, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                seen += sum(_decoded_bytes(batch.column(name)) for name in names)
                self._check_size(seen, row)
                columns = [_decoded(batch.column(name)).to_pylist() for name in names]
            except (OSError, ValueError, RuntimeError, MemoryError, OverflowError, KeyError) as error:
                if isinstance(error, DataError):
                    raise
                raise _parquet_error(self._path, error) from None
            for cells in zip(*columns, strict=True):
                row += 1
                yield row, _plain_cells(dict(zip(used, cells, strict=True)), width=len(self.names))

    def _announced_bytes(self, names: Sequence[str]) -> int:
        """Return the size of the columns as the file tells it: bytes of its pages, or some for each value."""
        metadata, total = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            chunks = map(metadata.row_group(group).column, range(metadata.num_columns))
            for chunk in chunks:
                if chunk.path_in_schema.partition(".")[0] in names:
                    total += max(chunk.total_uncompressed_size, _BYTES_PER_VALUE * chunk.num_values)
        return total

    def _measure_lists(self, names: Sequence[str]) -> int:
        """Return the size of the lists of strings once they are expanded, as far as it can be known."""
        total, used = 0, [name for name in self._lists if name.partition(".")[0] in names]
        for group in range(self._measured_file.metadata.num_row_groups) if used else ():
            try:
                table = self._measured_file.read_row_group(group, columns=used, use_threads=False)
            except (OSError, ValueError, RuntimeError):  # in several encodings, or damaged
                continue
            total += sum(_decoded_bytes(chunk) for column in table.columns for chunk in column.chunks)
        return total

    def _check_size(self, num_bytes: int, row: int) -> None:
        limit = decompressed_limit(self._path)
        if num_bytes > limit:
            raise DataError(f"holds more than {limit:,} bytes: {limit_advice()}", path=self._path, line=row + 1)


def _decoded_bytes(array: Any) -> int:
    """Return the size of an array once its dictionaries are expanded."""
    import pyarrow.compute as compute
    from pyarrow import types

    if types.is_list(array.type) or types.is_large_list(array.type):
        return int(array.nbytes) + _decoded_bytes(array.flatten())
    if types.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary)
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0) + int(array.indices.nbytes)
    return int(array.nbytes)


def _decoded(array: Any) -> Any:
    """Return the array with plain strings in place of a dictionary."""
    from pyarrow import types

    return array.dictionary_decode() if types.is_dictionary(array.type) else array


def _plain_cells(values: dict[int, Any], *, width: int) -> list[Cell] | BadRecord:
    """Return cells as strings or lists of strings; numbers are converted, anything else is a bad record."""
    cells: list[Cell] = [None] * width
    for position, value in values.items():
        if value is None or isinstance(value, str):
            cells[position] = value
        elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
            cells[position] = [str(item) for item in value]
        elif isinstance(value, int | float):
            cells[position] = str(value)
        else:
            return BadRecord(
                "cell type", f"expected a string or a list of strings, got {excerpt(value)}: convert the column"
            )
    return cells


def _parquet_error(path: Path, error: BaseException) -> DataError:
    return DataError(f"not a readable Parquet file ({str(error)[:120]!r}): write it again", path=path)


def _delimited_rows(split: Split, dataset: Dataset, separator: str) -> Iterator[list[str]]:
    graded = _is_graded(split)
    yield ["uid", "text", "labels", *(["weights"] if graded else [])]
    for uid, text, (columns, weights) in zip(split.uids, split.texts, labels_of_rows(split), strict=True):
        row = [uid, text, separator.join(dataset.label_ids[column] for column in columns)]
        yield [*row, separator.join(map(repr, weights or ()))] if graded else row


def _is_graded(split: Split) -> bool:
    return bool((split.relevance.data != 1.0).any())


def _writable_separator(dataset: Dataset) -> str:
    """Return a separator that no label id contains, which the reader can infer from the labels file."""
    if any("\0" in identifier for identifier in dataset.label_ids):
        raise DataError("a label id holds a NUL, which a text file cannot hold: write jsonl or parquet")
    for separator in SEPARATORS:
        if not any(separator in identifier for identifier in dataset.label_ids):
            return separator
    tried = " ".join(map(repr, SEPARATORS))
    raise DataError(f"each of {tried} occurs in some label id, so none can separate them: write jsonl or parquet")
