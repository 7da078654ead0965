"""Rows of a CSV, TSV or Parquet file: the column names first, then each row's place and cells."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dexter.data.formats.columns import Cell
from dexter.data.formats.limits import MAX_LINE_BYTES, decompressed_limit, limit_advice
from dexter.data.formats.lines import decode, raw_lines
from dexter.data.formats.problems import BadRecord, excerpt
from dexter.errors import DataError, require

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BATCH_ROWS = 1024

Row = tuple[int, list[Cell] | BadRecord]
"""The line (or, in Parquet, the row) a record starts at, and its cells or what is wrong with it."""


class DelimitedFile:
    """A CSV or TSV file: quoted as RFC 4180 says, so that a cell may hold line breaks."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self._lines = _DecodedLines(path)
        self._reader = csv.reader(self._lines, delimiter=delimiter, strict=True)
        header = next(self._records(), None)
        if header is None:
            raise DataError("the file is empty: expected a line of column names", path=path)
        line, names = header
        if isinstance(names, BadRecord):
            raise DataError(names.message, path=path, line=line)
        self.names: list[str] = [str(name) for name in names]

    def rows(self, used: Sequence[int]) -> Iterator[Row]:
        """Each row with all its cells; `used` is for files in which columns can be left unread."""
        with _long_fields():
            for line, cells in self._records():
                if isinstance(cells, list) and len(cells) != len(self.names):
                    message = f"got {len(cells)} cells, the header has {len(self.names)}: quote or complete the row"
                    yield line, BadRecord("ragged row", message)
                else:
                    yield line, cells

    def _records(self) -> Iterator[Row]:
        """Each record that is not blank, with the line it starts at."""
        while True:
            line = self._lines.number + 1
            try:
                cells: list[Cell] = list(next(self._reader))
            except StopIteration:
                return
            except BadRecord as bad:
                yield self._lines.number, bad
            except csv.Error as error:
                yield (
                    line,
                    BadRecord(
                        "quotes", f"{error} (is a quote not closed, or not doubled within quotes?): correct the row"
                    ),
                )
            else:
                if cells:
                    yield line, cells


class _DecodedLines:
    """Lines of text with their number; unlike a generator, it goes on after raising `BadRecord` for one of them."""

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
    """Let a cell be as long as a line may be; the limit of the csv module is global, so it is put back."""
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


class ParquetFile:
    """A Parquet file, read in batches; its cells are strings, numbers for ids, or lists of strings."""

    def __init__(self, path: Path) -> None:
        self._path = path
        parquet = require("pyarrow.parquet", extra="data", purpose="reading Parquet")
        try:
            self._file = parquet.ParquetFile(path)
            self.names: list[str] = [str(name) for name in self._file.schema_arrow.names]
        except (OSError, ValueError, RuntimeError) as error:
            raise _parquet_error(path, error) from None

    def rows(self, used: Sequence[int]) -> Iterator[Row]:
        """Each row with its cells, of which only the used ones are filled."""
        names = [self.names[position] for position in used]
        row, seen, limit = 0, 0, decompressed_limit(self._path)
        batches = self._file.iter_batches(batch_size=_BATCH_ROWS, columns=names, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
                columns = [] if batch is None else [batch.column(name).to_pylist() for name in names]
            except (OSError, ValueError, RuntimeError, MemoryError, OverflowError, KeyError) as error:
                raise _parquet_error(self._path, error) from None
            if batch is None:
                return
            seen += batch.nbytes
            if seen > limit:
                raise DataError(f"holds more than {limit:,} bytes: {limit_advice()}", path=self._path, line=row + 1)
            for cells in zip(*columns, strict=True):
                row += 1
                yield row, _plain_cells(dict(zip(used, cells, strict=True)), width=len(self.names))


def _plain_cells(values: dict[int, Any], *, width: int) -> list[Cell] | BadRecord:
    """Cells as strings or lists of strings; numbers count as text, anything else is a bad record."""
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
