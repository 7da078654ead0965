"""Read a data set: find out its format, say so, and read it under one policy for bad lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dexter.data.dataset import Dataset
from dexter.data.formats.problems import OnError, Problems
from dexter.data.formats.reading import Reading, TableOptions
from dexter.data.formats.registry import FORMATS, detect, format_named
from dexter.errors import DataError, UsageError
from dexter.files import sha256


def log_line(line: str) -> None:
    """Where announcements go unless the caller takes them: the log, as information."""
    logging.getLogger("dexter").info(line)


def load_dataset(
    path_or_name: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the word users say
    on_error: OnError = "fail",
    text_column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> Dataset:
    """Read a data set from a file or folder, or build a built-in one.

    Args:
        path_or_name: a path, or the name of a built-in source such as "pydocs" where no such path exists.
        format: one of `FORMATS`; detected when not given.
        on_error: "fail" raises one `DataError` that groups the bad lines; "skip" leaves bad query lines out and
            announces how many. Bad labels and damaged files fail either way.
        text_column: for tables, the text column, or several joined by "+" ("title+body"); guessed when not given.
        label_column: for tables, the column of labels; guessed when not given.
        label_separator: for tables, what stands between the labels of a cell; guessed when not given.
        announce: gets one line for each thing the caller should know; the log by default.
    """
    announce = announce or log_line
    table = TableOptions(text_column=text_column, label_column=label_column, label_separator=label_separator)
    _check_options(on_error, table)
    path = Path(path_or_name)
    if not path.exists():
        return _build(str(path_or_name), announce)
    chosen = format_named(format or detect(path))
    if table != TableOptions() and not chosen.is_table:
        tables = ", ".join(one.name for one in FORMATS.values() if one.is_table)
        raise UsageError(f"text_column, label_column and label_separator apply to {tables}, not to {chosen.name}")
    announce(f"read as {chosen.name}")
    problems = Problems(on_error)
    reading = Reading(path, problems=problems, announce=announce, table=table)
    dataset = chosen.read(path, reading)
    for line in problems.summary():
        announce(line)
    return replace(dataset, source=_source(chosen.name, reading))


def _check_options(on_error: str, table: TableOptions) -> None:
    if on_error not in ("fail", "skip"):
        raise UsageError(f'on_error must be "fail" or "skip", got {on_error!r}')
    if table.label_separator == "":
        raise UsageError("label_separator must not be empty: leave it out to have it guessed")


def _build(name: str, announce: Callable[[str], None]) -> Dataset:
    from dexter.data import sources

    if name not in sources.NAMES:
        raise DataError(
            f"no such file or folder, and no built-in data set of this name ({', '.join(sources.NAMES)})", path=name
        )
    announce(f"built-in data set {name}")
    return sources.build(name)


def _source(format_name: str, reading: Reading) -> dict[str, str]:
    """Where the data came from: the format, the number of lines left out if any, and the SHA-256 of each file."""
    skipped = {"skipped": str(reading.problems.count)} if reading.problems.count else {}
    return {"format": format_name} | skipped | {reading.relative_name(path): sha256(path) for path in reading.files}
