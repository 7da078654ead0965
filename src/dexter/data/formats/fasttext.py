"""fastText files: `__label__x __label__y text` per line; a folder with train and test files, or one file.

Every word that starts with `__label__` is a label, wherever it stands, as fastText has it. A label's name is its id and
its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.assemble import assemble
from dexter.data.formats.format import Format
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import TRAIN, find_file, plain_suffix, split_files
from dexter.data.formats.lines import first_lines
from dexter.data.formats.problems import BadRecord, excerpt
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows
from dexter.data.formats.writing import Writing, row_columns
from dexter.errors import DataError

_PREFIX = "__label__"
_LEADING_LABEL = re.compile(_PREFIX + r"([^ \t]*)[ \t]?")
_SUFFIXES = (".txt", ".ft", ".fasttext")


def _detect(path: Path) -> bool:
    train = find_file(path, TRAIN, _SUFFIXES) if path.is_dir() else path
    if train is None or (
        path.is_file() and plain_suffix(path) in (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".npz")
    ):
        return False
    return any(line.startswith(_PREFIX) for line in first_lines(train))


def _read(path: Path, reading: Reading) -> Dataset:
    train_path, test_path = split_files(path, _SUFFIXES)
    labels = LabelTable()
    add_row = partial(_add_row, labels)
    train = reading.rows(train_path, add_row)
    test = reading.rows(test_path, add_row) if test_path else None
    return assemble(path, reading, labels=labels, train=train, test=test)


def _add_row(labels: LabelTable, rows: Rows, line: str) -> None:
    identifiers, text = _parse(line)
    if "" in identifiers:
        raise BadRecord("empty label", f"a label has no name after {_PREFIX}: complete or remove it")
    rows.add(text, labels.columns_of_ids(identifiers))


def _parse(line: str) -> tuple[list[str], str]:
    """The label names of a line and the text between them, which keeps its spaces unless labels stand within it."""
    identifiers, start = [], 0
    while label := _LEADING_LABEL.match(line, start):
        identifiers.append(label[1])
        start = label.end()
    rest = line[start:]
    if f" {_PREFIX}" in rest or f"\t{_PREFIX}" in rest:
        words = rest.split()
        identifiers += [word.removeprefix(_PREFIX) for word in words if word.startswith(_PREFIX)]
        rest = " ".join(word for word in words if not word.startswith(_PREFIX))
    return identifiers, rest


def _write(dataset: Dataset, writing: Writing) -> None:
    for identifier in dataset.label_ids:
        if not identifier or any(character.isspace() or character in "\0\ufeff" for character in identifier):
            raise DataError(
                f"label id {excerpt(identifier)} is empty or holds white space, which fasttext cannot hold: write jsonl"
            )
    writing.lines("train.txt", _lines(dataset.train, dataset.label_ids, writing))
    if dataset.test is not None:
        writing.lines("test.txt", _lines(dataset.test, dataset.label_ids, writing))
    writing.filters(dataset)


def _lines(split: Split, label_ids: Sequence[str], writing: Writing) -> Iterator[str]:
    for uid, text, (columns, _) in zip(split.uids, split.texts, row_columns(split), strict=True):
        flat = writing.one_line(text)
        if any(word.startswith(_PREFIX) for word in flat.split()):
            raise DataError(
                f"the text of query {excerpt(uid)} has a word that starts with {_PREFIX}: write jsonl instead"
            )
        if not columns and not flat.strip():
            raise DataError(
                f"query {excerpt(uid)} has neither labels nor text, which fasttext cannot carry: write jsonl"
            )
        yield "".join(f"{_PREFIX}{label_ids[column]} " for column in columns) + flat


FASTTEXT = Format(
    name="fasttext",
    description="train.txt (and test.txt) with lines of __label__x text, in a folder, or one such file",
    detect=_detect,
    read=_read,
    write=_write,
    loses="query ids, label texts, labels without rows and weights",
)
