"""Write a data set: a whole folder or nothing; and convert one format to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dexter.data.dataset import Dataset
from dexter.data.formats.load import load_dataset, log_line
from dexter.data.formats.problems import OnError
from dexter.data.formats.registry import FORMATS, format_named
from dexter.data.formats.writing import Writing
from dexter.errors import DataError, UsageError
from dexter.files import atomic_folder


def save_dataset(
    dataset: Dataset,
    path: str | Path,
    *,
    format: str = "jsonl",  # noqa: A002 - the word users say
    gzip: bool | None = None,
    replace: bool = False,
    announce: Callable[[str], None] | None = None,
) -> None:
    """Write a data set as a folder, which appears whole or not at all.

    Args:
        dataset: what to write.
        path: the folder to make; it must not exist unless `replace` is given.
        format: one of `FORMATS` that can be written.
        gzip: whether text files are compressed; by default as the format's other tools expect (jsonl, xmc-json: yes).
        replace: take the place of an existing folder.
        announce: gets one line for each thing that the format cannot keep; the log by default.
    """
    announce = announce or log_line
    chosen = format_named(format)
    if chosen.write is None:
        writable = ", ".join(one.name for one in FORMATS.values() if one.write is not None)
        raise UsageError(f"{format} is read only: a data set can be written as {writable}")
    with atomic_folder(path, replace=replace) as folder:
        writing = Writing(folder, compress=chosen.compress if gzip is None else gzip, announce=announce)
        try:
            chosen.write(dataset, writing)
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text or id holds half a surrogate pair ({error.object[error.start]!a}): remove it, UTF-8 has none"
            ) from None
    if chosen.loses:
        announce(f"{format} does not keep {chosen.loses}")
    if writing.num_changed:
        announce(f"{writing.num_changed:,} texts had line breaks, tabs or NULs that {format} cannot carry: now spaces")


def convert_dataset(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "jsonl",
    format: str | None = None,  # noqa: A002 - the word users say
    on_error: OnError = "fail",
    gzip: bool | None = None,
    replace: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Dataset:
    """Read a data set in any format and write it in another; returns what was written."""
    format_named(to)
    dataset = load_dataset(source, format=format, on_error=on_error, announce=announce)
    save_dataset(dataset, target, format=to, gzip=gzip, replace=replace, announce=announce)
    return dataset
