"""fastText files: `__label__x __label__y text` per line; a folder with train and test files, or one file.

Every word that starts with `__label__` is a label, wherever it stands, as in fastText. A label's name is its id and its
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.lines import BadRecord, excerpt, first_lines
from dexter.data.formats.reader import TRAIN, LabelTable, Reader, SplitBuilder, find_file, plain_suffix, split_files
from dexter.data.formats.writer import Writer, labels_of_rows, refuse_white_space
from dexter.errors import DataError

_PREFIX = "__label__"
_LEADING_LABEL = re.compile(_PREFIX + r"([^ \t]*)[ \t]?")
_SUFFIXES = (".txt", ".ft", ".fasttext")
_OTHER_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".npz")


def detect(path: Path) -> bool:
    """Whether one of the first lines starts with a label; the file may have any suffix that is not another format's."""
    train = find_file(path, TRAIN, _SUFFIXES) if path.is_dir() else path
    if train is None or plain_suffix(train) in _OTHER_SUFFIXES:
        return False
    return any(line.startswith(_PREFIX) for line in first_lines(train))


def read(reader: Reader) -> Dataset:
    """Read a folder or a single file."""
    labels = LabelTable()
    read_split = partial(reader.queries, add_query=partial(_add_query, labels))
    return reader.dataset(labels, read_split, split_files(reader.root, _SUFFIXES))


def write(dataset: Dataset, writer: Writer) -> None:
    """Write a folder; texts that would read back differently are an error."""
    refuse_white_space(dataset, format_name="fasttext")

    def lines(split: Split) -> Iterator[str]:
        for uid, text, (columns, _) in zip(split.uids, split.texts, labels_of_rows(split), strict=True):
            flat = writer.one_line(text)
            if any(word.startswith(_PREFIX) for word in flat.split()):
                raise DataError(
                    f"the text of query {excerpt(uid)} has a word that starts with {_PREFIX}: write jsonl instead"
                )
            if not columns and not flat.strip():
                raise DataError(
                    f"query {excerpt(uid)} has neither labels nor text, which fasttext cannot hold: write jsonl"
                )
            yield "".join(f"{_PREFIX}{dataset.label_ids[column]} " for column in columns) + flat

    writer.splits(dataset, ("train.txt", "test.txt"), lines)


def _add_query(labels: LabelTable, split: SplitBuilder, line: str) -> None:
    identifiers, text = _parse(line)
    if "" in identifiers:
        raise BadRecord("empty label", f"a label has no name after {_PREFIX}: complete or remove it")
    split.add(text, labels.columns_of_ids(identifiers))


def _parse(line: str) -> tuple[list[str], str]:
    """Return the label names of a line and the text between them, which keeps its spaces unless it contains labels."""
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
