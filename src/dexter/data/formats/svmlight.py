"""The extreme classification repository's older text files: a header `N D L`, then `label,label feature:value ...`.

The features are a bag of words without the words. Each feature that is present becomes one word: its name, if a file
of feature names lies beside, else `f` and its number; the values are dropped. That is enough to train on, but not what
such files are compared on, so reading says so. Read only: a data set of texts has no features to write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dexter.data.dataset import Dataset
from dexter.data.formats.assemble import assemble
from dexter.data.formats.format import Format
from dexter.data.formats.labels import LabelTable, parse_index
from dexter.data.formats.layout import LABELS, TRAIN, find_file, plain_suffix, split_files
from dexter.data.formats.lines import first_lines
from dexter.data.formats.problems import BadRecord, excerpt
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows
from dexter.errors import DataError

_SUFFIXES = (".txt", ".svm", ".svmlight", ".libsvm")
_FEATURE_NAMES = ("features", "feature_names", "Xf")
_LABEL_NAMES = (*LABELS, "label_names", "Yf")
_LEAST_LABEL_LIMIT = 100_000


@dataclass(frozen=True)
class _Header:
    num_rows: int
    num_features: int
    num_labels: int


def _detect(path: Path) -> bool:
    train = find_file(path, TRAIN, _SUFFIXES) if path.is_dir() else path
    if train is None or (path.is_file() and plain_suffix(path) not in ("", *_SUFFIXES)):
        return False
    lines = first_lines(train, count=1)
    parts = lines[0].split() if lines else []
    return len(parts) == 3 and all(part.isascii() and part.isdecimal() for part in parts)


def _read(path: Path, reading: Reading) -> Dataset:
    train_path, test_path = split_files(path, _SUFFIXES)
    header = _read_header(train_path, size_path=train_path)
    labels = _read_labels(path, reading, header, train_path)
    words = _read_names(
        find_file(path, _FEATURE_NAMES, [".txt"]) if path.is_dir() else None, reading, header.num_features
    )
    reading.announce(
        "features have no text: each feature present becomes one word, "
        + ("by its name" if words else '"f" and its number')
        + "; values are dropped"
    )
    train = _read_rows(train_path, reading, header, words)
    test = None
    if test_path is not None:
        test_header = _read_header(test_path, size_path=train_path)
        if (test_header.num_features, test_header.num_labels) != (header.num_features, header.num_labels):
            raise DataError(
                f"the header differs from that of {train_path.name} in D or L: they must agree", path=test_path, line=1
            )
        test = _read_rows(test_path, reading, test_header, words)
    return assemble(path, reading, labels=labels, train=train, test=test)


def _read_header(path: Path, *, size_path: Path) -> _Header:
    lines = first_lines(path, count=1)
    try:
        parts = [parse_index(part, 10**18, what="header number") for part in (lines[0].split() if lines else [])]
    except BadRecord:
        parts = []
    if len(parts) != 3:
        got = excerpt(lines[0]) if lines else "nothing"
        raise DataError(f'expected a header "N D L" (rows, features, labels), got {got}', path=path, line=1)
    header = _Header(*parts)
    # One entry per label is allocated: a header may not ask for more of them than such a file could ever use.
    limit = max(_LEAST_LABEL_LIMIT, 4 * size_path.stat().st_size)
    if header.num_labels > limit:
        raise DataError(
            f"the header declares {header.num_labels:,} labels, too many for a file of this size: correct the header",
            path=path,
            line=1,
        )
    return header


def _read_labels(path: Path, reading: Reading, header: _Header, train_path: Path) -> LabelTable:
    found = find_file(path, _LABEL_NAMES, [".txt"]) if path.is_dir() else None
    names = _read_names(found, reading, header.num_labels)
    labels = LabelTable(found or train_path)
    for index in range(header.num_labels):
        labels.add(str(index), names[index] if names else str(index))
    return labels


def _read_names(path: Path | None, reading: Reading, count: int) -> list[str]:
    """One name per line, as many as the header says; nothing without a file."""
    if path is None:
        return []
    names = [name or "" for name in reading.records(path, str.strip, skippable=False, keep_blank=True)]
    reading.problems.check()
    if len(names) != count:
        raise DataError(
            f"got {len(names):,} names, the header of the data declares {count:,}: they must agree", path=path
        )
    return names


def _read_rows(path: Path, reading: Reading, header: _Header, words: Sequence[str]) -> Rows:
    rows = reading.rows(path, partial(_add_row, header, words), first_line=2, keep_blank=True)
    if rows.num_seen != header.num_rows:
        raise DataError(
            f"the header declares {header.num_rows:,} rows, the file has {rows.num_seen:,}: one is wrong",
            path=path,
            line=1,
        )
    return rows


def _add_row(header: _Header, words: Sequence[str], rows: Rows, line: str) -> None:
    if rows.num_seen >= header.num_rows and not line.strip():
        return  # blank lines after the last row
    head, _, rest = line.partition(" ")
    if ":" in head:  # a row without labels that also lacks the space before its features
        head, rest = "", line
    columns = [parse_index(token, header.num_labels, what="label index") for token in head.split(",") if token]
    rows.add(" ".join(_word(token, header, words) for token in rest.split()), columns)


def _word(token: str, header: _Header, words: Sequence[str]) -> str:
    """The word of one `feature:value`."""
    index_text, colon, value_text = token.partition(":")
    index = parse_index(index_text, header.num_features, what="feature index")
    try:
        finite = bool(colon) and math.isfinite(float(value_text))
    except ValueError:
        finite = False
    if not finite:
        raise BadRecord("feature value", f"expected feature:value with a finite value, got {excerpt(token)}")
    return words[index] if words else f"f{index}"


SVMLIGHT = Format(
    name="svmlight",
    description='train.txt or trn.txt (and test) whose first line is "N D L", in a folder, or one such file',
    detect=_detect,
    read=_read,
)
