"""Rows and labels, once read, become a `Dataset`: uids made unique, filter pairs added, everything checked."""

from __future__ import annotations

from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.filters import read_filter
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import data_name, find_file
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows
from dexter.errors import DataError


def assemble(path: Path, reading: Reading, *, labels: LabelTable, train: Rows, test: Rows | None) -> Dataset:
    """The data set of a folder or file whose rows have been read; raises what `reading.problems` holds."""
    splits = {
        name: _split(path, reading, rows, name=name, num_labels=len(labels))
        for name, rows in (("train", train), ("test", test))
        if rows is not None
    }
    reading.problems.check()
    if not len(train):
        raise DataError(f"no training rows ({train.num_seen} were read): at least one is needed", path=reading.files[0])
    return Dataset(
        name=data_name(path),
        label_texts=labels.texts,
        label_ids=labels.ids,
        train=splits["train"],
        test=splits.get("test"),
    )


def _split(path: Path, reading: Reading, rows: Rows, *, name: str, num_labels: int) -> Split:
    filter_path = find_file(path, [f"filter_labels_{name}"], [".txt"]) if path.is_dir() else None
    filtered = None
    if filter_path is not None:
        filtered = read_filter(filter_path, reading, rows=rows, num_labels=num_labels)
    return Split(
        texts=rows.texts,
        uids=rows.unique_uids(reading.announce),
        relevance=rows.relevance(num_labels),
        filtered=filtered,
    )
