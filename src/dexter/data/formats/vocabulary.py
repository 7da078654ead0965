"""A controlled vocabulary: concepts with labels in several languages, alternative labels, broader concepts.

`read_vocabulary` reads RDF (SKOS, see `dexter.data.formats.skos`) and Annif's two simple forms:

  .tsv   `<uri><TAB>label<TAB>notation` per line, in one language
  .csv   a header with `uri`, `label_en`, `label_fi`, ... and perhaps `notation`; no label at all: deprecated

`apply_vocabulary` makes its concepts the labels of a data set whose rows name them.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.dataset import Dataset, Split
from dexter.data.formats.lines import BadRecord, OnError, RecordErrors, decode, excerpt, raw_lines, without_line_end
from dexter.data.formats.reader import log, merge_repeated_labels, plain_suffix
from dexter.data.label_names import DEFAULT_PARTS, LabelNames, best_language, check_parts
from dexter.errors import DataError, UsageError, require
from dexter.files import sha256

RDF_SUFFIXES = (".ttl", ".turtle", ".rdf", ".xml", ".owl", ".nt", ".ntriples")
SUFFIXES = (*RDF_SUFFIXES, ".csv", ".tsv")
"""Endings of the files that can be read, without .gz."""
_PATH_LENGTH = 3
"""Number of broader concepts in a text."""


@dataclass(frozen=True, kw_only=True)
class Concept:
    """One concept; texts are by language tag, "" where the file gives none."""

    id: str
    """Its URI."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The preferred label."""
    alternatives: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other labels, in the order of the alphabet."""
    broader: Sequence[str] = ()
    """Ids of the concepts directly above it."""
    definitions: Mapping[str, str] = field(default_factory=dict)
    notation: str | None = None
    is_deprecated: bool = False
    replaced_by: Sequence[str] = ()
    """Ids of the concepts to use instead of a deprecated one."""


@dataclass(frozen=True, eq=False)
class LabelVocabulary:
    """Concepts by id, as read from a file."""

    path: Path
    concepts: Mapping[str, Concept]

    @cached_property
    def languages(self) -> Counter[str]:
        """Number of concepts that have a preferred label in each language, most frequent language first."""
        found = Counter(language for concept in self.current() for language in concept.labels)
        return Counter(dict(found.most_common()))

    def current(self) -> Iterator[Concept]:
        """Return the concepts that are not deprecated."""
        return (concept for concept in self.concepts.values() if not concept.is_deprecated)

    def choose_language(self, language: str | None) -> str:
        """Return the language asked for, or the only one; an error names those that there are."""
        known = ", ".join(f"{name or 'none given'} ({count:,})" for name, count in self.languages.items())
        if language is None:
            if len(self.languages) > 1:
                raise UsageError(f"{self.path}: labels in several languages, {known}: choose one with --language")
            return next(iter(self.languages), "")
        if best_language(self.languages, language) is None:
            raise UsageError(f"{self.path}: no labels in {language!r}, only in {known or 'no language'}")
        return language

    def label(self, concept_id: str, language: str) -> str | None:
        """Return the preferred label of a concept in a language; None if it has none."""
        concept = self.concepts.get(concept_id)
        return None if concept is None else best_language(concept.labels, language)

    def text(self, concept_id: str, language: str, parts: Sequence[str] = DEFAULT_PARTS) -> str | None:
        """Return the text of a label, made of the parts in the order of `PARTS`; None without a preferred label."""
        concept, label = self.concepts[concept_id], self.label(concept_id, language)
        if label is None:
            return None
        if "alternatives" in parts:
            label = "; ".join([label, *(best_language(concept.alternatives, language) or ())])
        if "broader" in parts:
            label = " < ".join([label, *self._broader_labels(concept_id, language)])
        definition = best_language(concept.definitions, language) if "definition" in parts else None
        return label if definition is None else f"{label}: {definition}"

    def successor(self, concept_id: str) -> str | None:
        """Return the concept itself or, if it is deprecated, the one current concept that replaces it."""
        seen: set[str] = set()
        while (concept := self.concepts.get(concept_id)) is not None and concept.is_deprecated:
            seen.add(concept_id)
            if len(concept.replaced_by) != 1 or concept.replaced_by[0] in seen:
                return None
            concept_id = concept.replaced_by[0]
        return None if concept is None else concept_id

    def names(self, label_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return by language the preferred labels of some concepts."""
        names: dict[str, dict[str, str]] = {}
        for label_id in label_ids:
            for language, label in self.concepts[label_id].labels.items():
                names.setdefault(language, {})[label_id] = label
        return names

    def _broader_labels(self, concept_id: str, language: str) -> list[str]:
        """Return the labels of the first broader concept, of the first one above that, and so on."""
        path = [concept_id]
        while len(path) <= _PATH_LENGTH:
            parents = [one for one in self.concepts[path[-1]].broader if one in self.concepts and one not in path]
            if not parents:
                break
            path.append(parents[0])
        labels = (self.label(one, language) for one in path[1:])
        return [label for label in labels if label is not None]


def find_vocabulary(folder: Path, *, stems: Sequence[str] = ()) -> Path | None:
    """Find the vocabulary in a folder: its name contains "vocab" or it is RDF, else it has one of the stems.

    Two of them are an error.
    """
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and plain_suffix(file) in SUFFIXES]
    found = [one for one in files if "vocab" in one.name.lower() or plain_suffix(one) in (".ttl", ".rdf", ".nt")]
    found = found or [one for one in files if one.name.split(".")[0] in stems]
    if len(found) > 1:
        raise DataError(f"holds two vocabularies, {found[0].name} and {found[1].name}: keep one", path=folder)
    return found[0] if found else None


def read_vocabulary(path: str | Path, *, language: str | None = None) -> LabelVocabulary:
    """Read a vocabulary; `language` is that of a .tsv file, which does not say it."""
    path = Path(path)
    suffix = plain_suffix(path)
    if suffix in RDF_SUFFIXES:
        require("rdflib", extra="skos", purpose=f"reading {path.name}")
        from dexter.data.formats.skos import read_rdf

        concepts = read_rdf(path)
    elif suffix in (".csv", ".tsv"):
        concepts = _read_delimited(path, language=language or "")
    else:
        raise DataError(f"a vocabulary ends in {', '.join(SUFFIXES)} (or .gz after it)", path=path)
    vocabulary = LabelVocabulary(path, concepts)
    num_current = sum(1 for _ in vocabulary.current())
    if not num_current:
        raise DataError("holds no concept that is not deprecated: is it a vocabulary?", path=path)
    num_deprecated = len(concepts) - num_current
    deprecated = f", {num_deprecated:,} deprecated" if num_deprecated else ""
    log.info(f"read as vocabulary: {path.name}, {num_current:,} concepts{deprecated}")
    return vocabulary


def clean_uri(token: str) -> str:
    """Return a URI without the angle brackets around it, or raise `BadRecord`."""
    uri = token.strip().removeprefix("<").removesuffix(">")
    if not uri:
        raise BadRecord("empty uri", f"expected a URI, got {excerpt(token)}")
    return uri


def apply_vocabulary(
    dataset: Dataset,
    vocabulary: LabelVocabulary,
    *,
    language: str | None = None,
    parts: Sequence[str] = DEFAULT_PARTS,
    on_error: OnError = "fail",
    folder: Path | None = None,
) -> Dataset:
    """Return the data set with the vocabulary's concepts as its labels.

    All current concepts become labels, those without training rows too. A row may name a concept by its URI, or by its
    preferred label. A deprecated concept becomes the one that replaces it; without one its pairs are left out, which is
    logged. A label that is not in the vocabulary is an error, or left out with `on_error="skip"`. `folder` is where the
    data set was read from, for the error.
    """
    language, parts = vocabulary.choose_language(language), check_parts(parts)
    targets = _find_targets(dataset, vocabulary, language)
    counts = np.zeros(dataset.num_labels, dtype=np.int64)
    for split in dataset.splits.values():
        counts += np.bincount(split.relevance.indices, minlength=dataset.num_labels)
    _report_lost(dataset, vocabulary, targets, counts, on_error=on_error, folder=folder)
    used = {target for target, count in zip(targets, counts, strict=True) if target is not None and count}
    texts = {one.id: vocabulary.text(one.id, language, parts) for one in vocabulary.current()}
    other = {one: _any_label(vocabulary.concepts[one]) for one in used if texts[one] is None}
    num_left_out = sum(text is None for text in texts.values()) - len(other)
    if other or num_left_out:
        log.info(
            f"{len(other) + num_left_out:,} concepts have no label in {language!r}: {num_left_out:,} are left out, "
            f"{len(other):,} that the data name have their label in another language"
        )
    texts = {one: other.get(one, text) for one, text in texts.items() if one in other or text is not None}
    columns = {concept_id: column for column, concept_id in enumerate(texts)}
    column_of_label = np.array([-1 if one is None else columns.get(one, -1) for one in targets], dtype=np.int64)
    splits: dict[str, Any] = {
        name: _with_columns(split, column_of_label, len(texts)) for name, split in dataset.splits.items()
    }
    return replace(
        dataset,
        label_ids=list(texts),
        label_texts=[text or "" for text in texts.values()],
        names=LabelNames(
            language=language,
            parts=parts,
            names=vocabulary.names(list(texts)),
            broader={one.id: one.broader for one in vocabulary.concepts.values() if one.broader},
        ),
        source={**dataset.source, vocabulary.path.name: sha256(vocabulary.path)},
        **splits,
    )


def _find_targets(dataset: Dataset, vocabulary: LabelVocabulary, language: str) -> list[str | None]:
    """Return for each label of the data set the current concept that it stands for, if there is one."""
    by_label: dict[str, str] = {}
    for concept in vocabulary.current():
        by_label.setdefault(vocabulary.label(concept.id, language) or "", concept.id)
    ids = [label_id.removeprefix("<").removesuffix(">") for label_id in dataset.label_ids]
    return [vocabulary.successor(one if one in vocabulary.concepts else by_label.get(one, "")) for one in ids]


def _report_lost(
    dataset: Dataset,
    vocabulary: LabelVocabulary,
    targets: Sequence[str | None],
    counts: np.ndarray,
    *,
    on_error: OnError,
    folder: Path | None,
) -> None:
    """Log the pairs of concepts that were deprecated, and of unknown ones; these raise if errors are to fail."""
    lost = [column for column, target in enumerate(targets) if target is None and counts[column]]
    name = vocabulary.path.name
    unknown = [column for column in lost if dataset.label_ids[column] not in vocabulary.concepts]
    if unknown and on_error == "fail":
        place = _first_place(dataset, unknown[0], folder)
        more = f" (and {len(unknown) - 1:,} more like it)" if len(unknown) > 1 else ""
        raise DataError(
            f"{place}: label id {excerpt(dataset.label_ids[unknown[0]])} is not in {name}: add it there, correct it, "
            f"or leave such labels out with on_error skip{more}"
        )
    deprecated = [column for column in lost if column not in set(unknown)]
    for columns, what in ((unknown, f"are not in {name}"), (deprecated, "are deprecated without one replacement")):
        if columns:
            first, num_pairs = excerpt(dataset.label_ids[columns[0]]), int(counts[columns].sum())
            log.warning(f"{len(columns):,} labels {what}, as {first}: they are left out of {num_pairs:,} rows")


def _first_place(dataset: Dataset, column: int, folder: Path | None) -> str:
    """Name the file and line of the first query that has a label."""
    from dexter.data.findings import LineNumbers  # which imports the formats, and they this module

    name, split = next((name, one) for name, one in dataset.splits.items() if column in one.relevance.indices)
    row = int(np.searchsorted(split.relevance.indptr, np.argmax(split.relevance.indices == column), side="right")) - 1
    return str(LineNumbers(dataset, folder).locate(name, row))


def _any_label(concept: Concept) -> str:
    return concept.labels[min(concept.labels)] if concept.labels else concept.id


def _with_columns(split: Split, column_of_label: np.ndarray, num_labels: int) -> Split:
    return replace(
        split,
        relevance=_move_columns(split.relevance, column_of_label, num_labels),
        filtered=None if split.filtered is None else _move_columns(split.filtered, column_of_label, num_labels),
    )


def _move_columns(matrix: csr_matrix, column_of_label: np.ndarray, num_labels: int) -> csr_matrix:
    """Return the matrix with other columns, without those below 0; of pairs that become one the largest stays."""
    columns = column_of_label[matrix.indices]
    kept_before = np.r_[0, np.cumsum(columns >= 0)]
    triple = matrix.data[columns >= 0], columns[columns >= 0], kept_before[matrix.indptr]
    return merge_repeated_labels(csr_matrix(triple, shape=(matrix.shape[0], num_labels)))


def _read_delimited(path: Path, *, language: str) -> dict[str, Concept]:
    """Read a .tsv or .csv file of Annif; all bad lines are one error."""
    concepts: dict[str, Concept] = {}
    errors = RecordErrors()
    lines = ((number, without_line_end(decode(raw))) for number, raw in raw_lines(path))
    try:
        records = _read_csv(lines, path) if plain_suffix(path) == ".csv" else _read_tsv(lines, language)
        for number, fields in records:
            try:
                concept = _concept(fields)
                if concept.id in concepts:
                    raise BadRecord("duplicate label", f"{excerpt(concept.id)} was given before: make URIs unique")
                concepts[concept.id] = concept
            except BadRecord as bad:
                errors.add(path, number, bad)
    except BadRecord as bad:
        raise DataError(bad.message, path=path) from None
    errors.check()
    return concepts


def _concept(fields: Mapping[str, str]) -> Concept:
    """Make a concept of `uri`, `label_*` and `notation`."""
    if "uri" not in fields:
        raise BadRecord("vocabulary line", "expected uri<TAB>label, found no tab or no uri")
    labels = {name.removeprefix("label_"): text for name, text in fields.items() if name.startswith("label_")}
    labels = {name: text for name, text in labels.items() if text.strip()}
    notation = fields.get("notation", "").strip()
    return Concept(id=clean_uri(fields["uri"]), labels=labels, notation=notation or None, is_deprecated=not labels)


def _read_tsv(lines: Iterator[tuple[int, str]], language: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    for number, line in lines:
        if line.strip():
            fields = line.split("\t")
            names = ("uri", f"label_{language}", "notation")
            yield number, dict(zip(names, fields, strict=False)) if len(fields) > 1 else {}


def _read_csv(lines: Iterator[tuple[int, str]], path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    last = 0

    def numbered() -> Iterator[str]:
        nonlocal last
        for last, line in lines:  # noqa: B007 - the number of the line that the csv module has reached
            yield line + "\n"

    try:
        rows = csv.reader(numbered(), strict=True)
        header = [name.strip() for name in next(rows, [])]
        if "uri" not in header or not any(name.startswith("label_") for name in header):
            names = ", ".join(repr(name[:40]) for name in header[:10])
            raise DataError(
                f"expected the columns uri and label_LANGUAGE (label_en), got {names}: name them so", path=path, line=1
            )
        for row in rows:
            if row:
                yield last, dict(zip(header, row, strict=False))
    except csv.Error as error:
        raise DataError(f"not CSV: {error}: correct the quotes", path=path, line=last) from None
