"""Annif's short-text corpus: `text<TAB><uri> <uri>` per line, and a vocabulary of `<uri><TAB>label<TAB>notation`.

A folder holds `train.tsv`, perhaps `test.tsv`, and one vocabulary whose name contains "vocab" (or is `subjects.tsv` or
`labels.tsv`). Without a vocabulary the URIs themselves are the label texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.assemble import assemble
from dexter.data.formats.format import Format
from dexter.data.formats.labels import LabelTable
from dexter.data.formats.layout import LABELS, TRAIN, find_file, plain_suffix, split_files
from dexter.data.formats.lines import first_lines
from dexter.data.formats.problems import BadRecord, excerpt
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows
from dexter.data.formats.writing import Writing, row_columns
from dexter.errors import DataError

_SUFFIXES = (".tsv",)


def looks_like_annif(path: Path) -> bool:
    """Whether the first lines of a TSV file are documents with URIs, rather than a table with a header."""
    lines = [line for line in first_lines(path) if line.strip()]
    fields = [line.split("\t") for line in lines]
    uris = [uri for field in fields if len(field) == 2 for uri in field[1].split()]
    return bool(uris) and all(len(field) == 2 for field in fields) and all(map(_is_uri, uris))


def _is_uri(token: str) -> bool:
    return (token.startswith("<") and token.endswith(">")) or token.startswith(("http://", "https://"))


def _detect(path: Path) -> bool:
    train = find_file(path, TRAIN, _SUFFIXES) if path.is_dir() else path
    return train is not None and plain_suffix(train) in _SUFFIXES and looks_like_annif(train)


def _read(path: Path, reading: Reading) -> Dataset:
    train_path, test_path = split_files(path, _SUFFIXES)
    vocabulary = _find_vocabulary(path) if path.is_dir() else None
    if vocabulary is None:
        reading.announce("no vocabulary file: the URIs stand for the label texts")
    labels = reading.labels(vocabulary, _add_label) if vocabulary else LabelTable()
    add_row = partial(_add_row, labels)
    train = reading.rows(train_path, add_row, keep_blank=True)
    test = reading.rows(test_path, add_row, keep_blank=True) if test_path else None
    return assemble(path, reading, labels=labels, train=train, test=test)


def _find_vocabulary(folder: Path) -> Path | None:
    found = sorted(path for path in folder.iterdir() if plain_suffix(path) == ".tsv" and "vocab" in path.name.lower())
    if len(found) > 1:
        raise DataError(f"holds two vocabularies, {found[0].name} and {found[1].name}: keep one", path=folder)
    return found[0] if found else find_file(folder, ["subjects", *LABELS], _SUFFIXES)


def _add_label(labels: LabelTable, line: str) -> None:
    fields = line.split("\t")
    if len(fields) < 2:
        raise BadRecord("vocabulary line", f"expected uri<TAB>label, got {excerpt(line)}")
    labels.add(_uri(fields[0].strip()), fields[1])


def _add_row(labels: LabelTable, rows: Rows, line: str) -> None:
    if not line:
        return
    text, tab, uris = line.partition("\t")
    if not tab:
        raise BadRecord("document line", f"expected text<TAB><uri> <uri>, found no tab in {excerpt(line)}")
    rows.add(text, labels.columns_of_ids([_uri(token) for token in uris.split()]))


def _uri(token: str) -> str:
    uri = token.removeprefix("<").removesuffix(">")
    if not uri:
        raise BadRecord("empty uri", f"expected a URI, got {excerpt(token)}")
    return uri


def _write(dataset: Dataset, writing: Writing) -> None:
    for identifier in dataset.label_ids:
        unusable = not identifier or identifier[0] == "<" or identifier[-1] == ">"
        if unusable or any(character.isspace() or character in "\0\ufeff" for character in identifier):
            raise DataError(
                f"label id {excerpt(identifier)} is empty or holds white space or angle brackets, "
                "which annif cannot carry: write jsonl"
            )
    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writing.lines("vocab.tsv", (f"<{uri}>\t{writing.one_line(text)}" for uri, text in labels))
    writing.lines("train.tsv", _lines(dataset.train, dataset.label_ids, writing))
    if dataset.test is not None:
        writing.lines("test.tsv", _lines(dataset.test, dataset.label_ids, writing))
    writing.filters(dataset)


def _lines(split: Split, label_ids: Sequence[str], writing: Writing) -> Iterator[str]:
    for text, (columns, _) in zip(split.texts, row_columns(split), strict=True):
        yield writing.one_line(text) + "\t" + " ".join(f"<{label_ids[column]}>" for column in columns)


ANNIF = Format(
    name="annif",
    description="train.tsv (and test.tsv, vocab*.tsv) with lines of text<TAB><uri> <uri>, in a folder, or one file",
    detect=_detect,
    read=_read,
    write=_write,
    loses="query ids and weights",
)
