"""Annif's corpora of short texts (one file) and of full texts (a folder with a file for each document).

  short   `text<TAB><uri> <uri>` per line of `train.tsv` and perhaps `test.tsv`
  full    `a.txt` with its subjects in `a.tsv` (`<uri><TAB>label` per line) or `a.key` (a preferred label per line), in
          one folder or in its folders `train` and `test`; documents without subjects are left out, as Annif does

Its CSV and JSONL corpora are read as tables and JSONL. The vocabulary lies beside them (`find_vocabulary`); without one
the URIs themselves are the label texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.columns import is_uri
from dexter.data.formats.lines import MAX_LINE_BYTES, BadRecord, decode, excerpt, first_lines
from dexter.data.formats.reader import (
    LABELS,
    TEST,
    TRAIN,
    LabelTable,
    Reader,
    SplitBuilder,
    log,
    split_files,
    train_file,
)
from dexter.data.formats.vocabulary import clean_uri
from dexter.data.formats.writer import Writer, labels_of_rows, refuse_white_space
from dexter.errors import DataError

VOCABULARY_STEMS = ("subjects", *LABELS)
"""Names of a vocabulary beside a corpus, other than those that contain "vocab"."""
_SUFFIXES = (".tsv",)
_SUBJECT_SUFFIXES = (".tsv", ".key")
"""The first that a document has is read."""


def detect(path: Path) -> bool:
    """Whether a TSV file has texts with URIs, rather than a header, or a folder has documents with their subjects."""
    if _document_folders(path):
        return True
    train = train_file(path, _SUFFIXES)
    fields = [line.split("\t") for line in first_lines(train) if line.strip()] if train else []
    uris = [uri for field in fields if len(field) == 2 for uri in field[1].split()]
    return bool(uris) and all(len(field) == 2 for field in fields) and all(map(is_uri, uris))


def read(reader: Reader) -> Dataset:
    """Read a corpus; with a vocabulary its concepts are the first labels, in its order."""
    labels = LabelTable()
    if reader.vocabulary is None:
        log.info("no vocabulary file: the URIs are used as label texts; name one with --vocabulary")
    else:
        labels.columns_of_ids(concept.id for concept in reader.vocabulary.current())
    folders = _document_folders(reader.root)
    if folders:
        read_split = partial(_read_documents, reader, labels)
        return reader.dataset(labels, read_split, (folders[0], folders[1] if len(folders) > 1 else None))
    read_split = partial(reader.queries, add_query=partial(_add_query, labels), keep_blank=True)
    return reader.dataset(labels, read_split, split_files(reader.root, _SUFFIXES))


def write(dataset: Dataset, writer: Writer) -> None:
    """Write a corpus of short texts and its vocabulary."""
    refuse_white_space(dataset, format_name="annif")
    for identifier, text in zip(dataset.label_ids, dataset.label_texts, strict=True):
        if identifier[0] == "<" or identifier[-1] == ">":
            raise DataError(f"label id {excerpt(identifier)} has angle brackets, which annif cannot hold: write jsonl")
        if not text.strip():
            raise DataError(
                f"label {excerpt(identifier)} has no text, which means deprecated in annif: give it one or write jsonl"
            )

    def lines(split: Split) -> Iterator[str]:
        for text, (columns, _) in zip(split.texts, labels_of_rows(split), strict=True):
            yield writer.one_line(text) + "\t" + " ".join(f"<{dataset.label_ids[column]}>" for column in columns)

    labels = zip(dataset.label_ids, dataset.label_texts, strict=True)
    writer.lines("vocab.tsv", (f"<{uri}>\t{writer.one_line(text)}" for uri, text in labels))
    writer.splits(dataset, ("train.tsv", "test.tsv"), lines)


def _document_folders(path: Path) -> list[Path]:
    """Return the folders of documents for training and, if there are some, for testing; none for another layout."""
    if not path.is_dir():
        return []
    for names in (TRAIN, TEST):
        if sum((path / name).is_dir() for name in names) > 1:
            raise DataError(f"holds both {names[0]} and {names[1]}: keep one of them", path=path)
    train = next((path / name for name in TRAIN if (path / name).is_dir()), path)
    if not any(_subject_file(text) for text in train.glob("*.txt")):
        return []
    return [train, *(path / name for name in TEST if train != path and (path / name).is_dir())]


def _subject_file(document: Path) -> Path | None:
    return next((file for suffix in _SUBJECT_SUFFIXES if (file := document.with_suffix(suffix)).is_file()), None)


def _read_documents(reader: Reader, labels: LabelTable, folder: Path) -> SplitBuilder:
    """Read the documents of a folder, by name; the id of one is its file's name without the ending."""
    split, digest, num_without = SplitBuilder(), hashlib.sha256(), 0
    for document in sorted(folder.glob("*.txt")):
        subjects = _subject_file(document)
        if subjects is None:
            num_without += 1
            continue
        file = document
        try:
            text = _read_text(document, digest)
            file = subjects
            names = [_subject(line) for line in _read_text(subjects, digest).splitlines() if line.strip()]
            split.add(text, labels.columns_of_ids(names), uid=document.stem)
        except BadRecord as bad:
            reader.errors.add(file, 1, bad)
            split.skip()
    if num_without:
        log.info(f"{folder.name}: {num_without:,} documents without a .tsv or .key file are left out")
    reader.record(f"{folder.name}/*.txt", digest.hexdigest())
    return split


def _read_text(path: Path, digest: hashlib._Hash) -> str:
    with open(path, "rb") as handle:
        content = handle.read(MAX_LINE_BYTES + 1)
    digest.update(f"{path.name}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    return decode(content).removeprefix("\ufeff")


def _subject(line: str) -> str:
    """Return the URI of a line of subjects, else the label."""
    fields = [field.strip() for field in line.split("\t") if field.strip()]
    return next((clean_uri(field) for field in fields if is_uri(field)), fields[0])


def _add_query(labels: LabelTable, split: SplitBuilder, line: str) -> None:
    if not line:
        return
    text, tab, uris = line.partition("\t")
    if not tab:
        raise BadRecord("document line", f"expected text<TAB><uri> <uri>, found no tab in {excerpt(line)}")
    split.add(text, labels.columns_of_ids([clean_uri(token) for token in uris.split()]))
