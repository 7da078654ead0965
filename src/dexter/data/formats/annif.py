"""Annif's short-text corpus: `text<TAB><uri> <uri>` per line, and a vocabulary of `<uri><TAB>label<TAB>notation`.

A folder holds `train.tsv`, perhaps `test.tsv`, and one vocabulary whose name contains "vocab" (or is `subjects.tsv` or
`labels.tsv`). Without a vocabulary the URIs themselves are the label texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.lines import BadRecord, excerpt, first_lines
from dexter.data.formats.reader import (
    LABELS,
    LabelTable,
    Reader,
    SplitBuilder,
    find_file,
    log,
    plain_suffix,
    split_files,
    train_file,
)
from dexter.data.formats.writer import Writer, labels_of_rows, refuse_white_space
from dexter.errors import DataError

_SUFFIXES = (".tsv",)


def detect(path: Path) -> bool:
    """Whether the first lines of a TSV file are texts with URIs, rather than a table with a header."""
    train = train_file(path, _SUFFIXES)
    fields = [line.split("\t") for line in first_lines(train) if line.strip()] if train else []
    uris = [uri for field in fields if len(field) == 2 for uri in field[1].split()]
    return bool(uris) and all(len(field) == 2 for field in fields) and all(map(_is_uri, uris))


def read(reader: Reader) -> Dataset:
    """Read a corpus with its vocabulary, or a single file."""
    vocabulary = _find_vocabulary(reader.root)
    if vocabulary is None:
        log.info("no vocabulary file: the URIs are used as label texts")
    labels = reader.labels(vocabulary, _add_label)
    read_split = partial(reader.queries, add_query=partial(_add_query, labels), keep_blank=True)
    return reader.dataset(labels, read_split, split_files(reader.root, _SUFFIXES))


def write(dataset: Dataset, writer: Writer) -> None:
    """Write a corpus and its vocabulary."""
    refuse_white_space(dataset, format_name="annif")
    for identifier in dataset.label_ids:
        if identifier[0] == "<" or identifier[-1] == ">":
            raise DataError(f"label id {excerpt(identifier)} has angle brackets, which annif cannot hold: write jsonl")

    def lines(split: Split) -> Iterator[str]:
        for text, (columns, _) in zip(split.texts, labels_of_rows(split), strict=True):
            yield writer.one_line(text) + "\t" + " ".join(f"<{dataset.label_ids[column]}>" for column in columns)

    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writer.lines("vocab.tsv", (f"<{uri}>\t{writer.one_line(text)}" for uri, text in labels))
    writer.splits(dataset, ("train.tsv", "test.tsv"), lines)


def _is_uri(token: str) -> bool:
    return (token.startswith("<") and token.endswith(">")) or token.startswith(("http://", "https://"))


def _find_vocabulary(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    found = sorted(file for file in path.iterdir() if plain_suffix(file) == ".tsv" and "vocab" in file.name.lower())
    if len(found) > 1:
        raise DataError(f"holds two vocabularies, {found[0].name} and {found[1].name}: keep one", path=path)
    return found[0] if found else find_file(path, ["subjects", *LABELS], _SUFFIXES)


def _add_label(labels: LabelTable, line: str) -> None:
    fields = line.split("\t")
    if len(fields) < 2:
        raise BadRecord("vocabulary line", f"expected uri<TAB>label, got {excerpt(line)}")
    labels.add(_uri(fields[0].strip()), fields[1])


def _add_query(labels: LabelTable, split: SplitBuilder, line: str) -> None:
    if not line:
        return
    text, tab, uris = line.partition("\t")
    if not tab:
        raise BadRecord("document line", f"expected text<TAB><uri> <uri>, found no tab in {excerpt(line)}")
    split.add(text, labels.columns_of_ids([_uri(token) for token in uris.split()]))


def _uri(token: str) -> str:
    uri = token.removeprefix("<").removesuffix(">")
    if not uri:
        raise BadRecord("empty uri", f"expected a URI, got {excerpt(token)}")
    return uri
