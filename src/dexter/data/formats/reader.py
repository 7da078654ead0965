"""What the readers of all formats share: finding files, bad lines, labels, and rows that become a CSR matrix.

A line is parsed into its fields, which are appended to a `SplitBuilder`; the builder's arrays are those of the split.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.benchmarks import find_benchmark
from dexter.data.dataset import Dataset, Split, freeze
from dexter.data.formats import description
from dexter.data.formats.columns import TableOptions
from dexter.data.formats.lines import BadRecord, OnError, RecordErrors, decode, excerpt, raw_lines, without_line_end
from dexter.errors import DataError, UsageError
from dexter.files import sha256
from dexter.types import PROPENSITY

if TYPE_CHECKING:
    from dexter.data.formats.vocabulary import LabelVocabulary

log = logging.getLogger("dexter")

TRAIN = ("trn", "train")
TEST = ("tst", "test")
LABELS = ("lbl", "labels")
_LARGEST_WEIGHT = float(np.finfo(np.float32).max)


class LabelTable:
    """Label ids and texts in column order.

    With a labels file the table is closed: an id it does not hold is a bad record. Without one it is open: a label is
    added when a row first names it, and its id is its text.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.ids: list[str] = []
        self.texts: list[str] = []
        self._columns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_open(self) -> bool:
        """Whether rows may name labels that are not in the table yet."""
        return self.path is None

    @property
    def known(self) -> Set[str] | None:
        """The ids of a closed table; None for an open one."""
        return None if self.is_open else self._columns.keys()

    def add(self, identifier: str | None, text: str) -> int:
        """Append a label and return its column, which is its id if none is given; a repeated id is a bad record."""
        column = len(self.ids)
        identifier = str(column) if identifier is None else identifier
        first = self._columns.setdefault(identifier, column)
        if first != column:
            raise BadRecord(
                "duplicate label",
                f"label id {excerpt(identifier)} was given before (as label {first + 1}): make label ids unique",
            )
        self.ids.append(identifier)
        self.texts.append(text)
        return column

    def columns_of_ids(self, identifiers: Iterable[str]) -> list[int]:
        """Return the columns of label ids; an open table adds new ones."""
        if self.is_open:
            columns = self._columns
            return [columns[one] if one in columns else self.add(one, one) for one in identifiers]
        try:
            return [self._columns[one] for one in identifiers]
        except KeyError as error:
            raise BadRecord(
                "unknown label",
                f"label id {excerpt(error.args[0])} is not in {self.file_name}: add it there or correct the id",
            ) from None

    def columns_of_indices(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the columns of label indices, counted from 0 in the order of the labels file."""
        if self.is_open:
            raise BadRecord(
                "index without labels file",
                f"label index {excerpt(indices[0])} needs a labels file to refer to: add one, or give string ids",
            )
        if indices and not (min(indices) >= 0 and max(indices) < len(self.ids)):
            bad = next(index for index in indices if not 0 <= index < len(self.ids))
            raise BadRecord(
                "label index out of range",
                f"label index {excerpt(bad)} is out of range: {self.file_name} has {len(self.ids):,} labels, "
                f"numbered from 0",
            )
        return indices

    @property
    def file_name(self) -> str:
        """The name of the labels file, for messages."""
        return self.path.name if self.path is not None else "the labels file"


class SplitBuilder:
    """The queries of one split while they are read: texts, ids and the arrays of the CSR matrix.

    Skipped rows keep their number, because files that refer to rows by number (filter pairs, npz matrices) count them.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.uids: list[str] = []
        self.kept = array("q")
        """For each row kept, its number in the file, from 0."""
        self.num_seen = 0
        self._columns = array("i")
        self._weights = array("f")
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self.texts)

    def add(
        self, text: str, columns: Sequence[int], *, uid: str | None = None, weights: Sequence[float] | None = None
    ) -> None:
        """Append a query; without a uid its row number is used. Weights must have passed `check_weights`."""
        self.texts.append(text)
        self.uids.append(str(self.num_seen) if uid is None else uid)
        self._columns.extend(columns)
        self._weights.extend([1.0] * len(columns) if weights is None else weights)
        self._ends.append(len(self._columns))
        self.kept.append(self.num_seen)
        self.num_seen += 1

    def skip(self) -> None:
        """Count a row that could not be used."""
        self.num_seen += 1

    def build(self, num_labels: int, *, filtered: csr_matrix | None) -> Split:
        """Make the split; the builder must not be used afterwards.

        A label repeated within a row counts once, with its largest weight; a label of weight 0 is not relevant.
        """
        triple = (np.asarray(self._weights), np.asarray(self._columns), np.asarray(self._ends))
        relevance = csr_matrix(triple, shape=(len(self), num_labels))
        relevance.sort_indices()
        if not relevance.has_canonical_format or not relevance.data.all():
            relevance = merge_repeated_labels(relevance)
        return Split(texts=self.texts, uids=_unique_uids(self.uids), relevance=freeze(relevance), filtered=filtered)


class Reader:
    """One reading of a data set: where it is, what to do with bad lines, and which files were read."""

    def __init__(
        self,
        root: Path,
        *,
        format_name: str,
        on_error: OnError = "fail",
        table: TableOptions | None = None,
        text_fields: tuple[str, ...] | None = None,
        vocabulary: LabelVocabulary | None = None,
    ) -> None:
        self.root = root
        self.vocabulary = vocabulary
        """Whose concepts the labels are; `apply_vocabulary` looks them up after reading."""
        self.errors = RecordErrors(on_error)
        self.table = table or TableOptions()
        self._format_name = format_name
        self._files: list[Path] = []
        self._digests: dict[str, str] = {}
        self._description = description.read_description(root)
        self.text_fields = self._description.text_fields or text_fields
        """The fields that make a text, as `dataset.json` or else the caller says; None where neither does."""
        self.has_stored_fields = self._description.text_fields is not None
        if text_fields not in (None, self.text_fields):
            raise UsageError(
                f"text_fields is {','.join(text_fields or ())}, but {root / description.NAME} says "
                f"{','.join(self.text_fields or ())}: read the original files, or correct it there"
            )

    def use(self, path: Path) -> Path:
        """Remember a file as part of the data set."""
        if path not in self._files:
            self._files.append(path)
        return path

    def record(self, name: str, digest: str) -> None:
        """Remember the SHA-256 of many files under one name."""
        self._digests[name] = digest

    def for_each_line(
        self,
        path: Path,
        use: Callable[[str], object],
        *,
        on_bad: Callable[[], None] | None = None,
        first_line: int = 1,
        keep_blank: bool = False,
        skippable: bool = True,
    ) -> None:
        """Call `use` with each line, without its line end; where it raises `BadRecord`, note that and call `on_bad`.

        Blank lines are passed over unless `keep_blank`: in some formats they are an empty text.
        """
        for number, raw in raw_lines(self.use(path)):
            if number < first_line or not (keep_blank or raw.strip()):
                continue
            try:
                use(without_line_end(decode(raw)))
            except BadRecord as bad:
                self.errors.add(path, number, bad, skippable=skippable)
                if on_bad is not None:
                    on_bad()

    def labels(
        self, path: Path | None, add_label: Callable[[LabelTable, str], object], *, keep_blank: bool = False
    ) -> LabelTable:
        """Read a labels file, one label per line, or make an open table without one.

        A bad label fails the load whatever `on_error` says: others are counted from its line.
        """
        labels = LabelTable(path)
        if path is not None:
            self.for_each_line(path, lambda line: add_label(labels, line), keep_blank=keep_blank, skippable=False)
            self.errors.check()
        return labels

    def queries(
        self,
        path: Path,
        add_query: Callable[[SplitBuilder, str], None],
        *,
        first_line: int = 1,
        keep_blank: bool = False,
    ) -> SplitBuilder:
        """Read a file of one query per line, which `add_query` parses and appends; a bad line is counted as skipped."""
        split = SplitBuilder()
        self.for_each_line(
            path, lambda line: add_query(split, line), on_bad=split.skip, first_line=first_line, keep_blank=keep_blank
        )
        return split

    def dataset(
        self, labels: LabelTable, read_split: Callable[[Path], SplitBuilder], files: tuple[Path, Path | None]
    ) -> Dataset:
        """Read the training file and the test file, if there is one, and filter pairs; raise if a line was bad."""
        builders = {
            name: read_split(path) for name, path in zip(("train", "test"), files, strict=True) if path is not None
        }
        splits = {
            name: builder.build(len(labels), filtered=self._filter_pairs(name, builder, num_labels=len(labels)))
            for name, builder in builders.items()
        }
        self.errors.check()
        if not len(builders["train"]):
            num_seen = builders["train"].num_seen
            raise DataError(f"no training rows ({num_seen} were read): at least one is needed", path=files[0])
        for line in self.errors.summary():
            log.info(line)
        counts = (len(splits["train"]), len(splits["test"]) if "test" in splits else 0, len(labels))
        return Dataset(
            name=self.name,
            label_texts=labels.texts,
            label_ids=labels.ids,
            train=splits["train"],
            test=splits.get("test"),
            source=self._source(),
            propensity=self._propensity(counts),
            text_fields=self.text_fields,
        )

    @property
    def name(self) -> str:
        """The name of the data set: of its folder, or of its file without endings."""
        name = self.root.resolve().name
        return name.removesuffix(".gz").rsplit(".", 1)[0] if self.root.is_file() else name

    def _propensity(self, counts: tuple[int, int, int]) -> tuple[float, float]:
        """Return the constants of `dataset.json`, or of the benchmark of this name or these counts."""
        if self._description.propensity is not None:
            return self._description.propensity
        benchmark = find_benchmark(self.name, counts)
        if benchmark is None:
            return PROPENSITY["default"]
        log.info("propensity constants %g and %g, as published for %s", *benchmark.propensity, benchmark.name)
        return benchmark.propensity

    def _filter_pairs(self, split_name: str, rows: SplitBuilder, *, num_labels: int) -> csr_matrix | None:
        """Read the filter pairs of a split, "row label" per line, over the rows kept; None without such a file."""
        path = find_file(self.root, [f"filter_labels_{split_name}"], [".txt"])
        if path is None:
            return None
        pairs: list[tuple[int, int]] = []

        def add_pair(line: str) -> None:
            parts = line.split()
            if len(parts) != 2:
                raise BadRecord("filter pair", f'expected "row label", two numbers, got {excerpt(line)}')
            row = parse_index(parts[0], rows.num_seen, what="row number")
            pairs.append((row, parse_index(parts[1], num_labels, what="label index")))

        self.for_each_line(path, add_pair)
        numbers, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        position = np.full(rows.num_seen, -1, dtype=np.int64)
        position[np.asarray(rows.kept)] = np.arange(len(rows))
        kept = position[numbers] >= 0
        marks = np.ones(int(kept.sum()), dtype=np.float32)
        matrix = csr_matrix((marks, (position[numbers[kept]], columns[kept])), shape=(len(rows), num_labels))
        matrix.data[:] = 1.0  # a pair listed twice was summed
        return freeze(matrix)

    def _source(self) -> dict[str, str]:
        """Describe where the data came from: format, number of lines skipped if any, and SHA-256 of each file."""
        skipped = {"skipped": str(self.errors.count)} if self.errors.count else {}
        folder = self.root if self.root.is_dir() else self.root.parent
        if (folder / description.NAME).is_file() and self.root.is_dir():
            self.use(folder / description.NAME)
        hashes = {path.relative_to(folder).as_posix(): sha256(path) for path in self._files}
        return {"format": self._format_name} | skipped | hashes | self._digests


def find_file(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    """Find the one file in a folder with one of the stems and suffixes, `.gz` or not; two of them are an error.

    A single file in place of the folder has no such file beside it.
    """
    names = [f"{stem}{suffix}{gz}" for stem in stems for suffix in suffixes for gz in ("", ".gz")]
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) > 1:
        raise DataError(f"holds both {found[0].name} and {found[1].name}: keep one of them", path=folder)
    return found[0] if found else None


def need_file(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path:
    """Find a file as `find_file` does; a missing one is an error that names what was looked for."""
    path = find_file(folder, stems, suffixes)
    if path is None:
        names = " or ".join(f"{stem}{suffix}[.gz]" for stem in stems for suffix in suffixes)
        raise DataError(f"no {names} in this folder", path=folder)
    return path


def split_files(path: Path, suffixes: Sequence[str]) -> tuple[Path, Path | None]:
    """Find the training file and, if there is one, the test file; a single file is a training file alone."""
    if path.is_file():
        return path, None
    return need_file(path, TRAIN, suffixes), find_file(path, TEST, suffixes)


def train_file(path: Path, suffixes: Sequence[str]) -> Path | None:
    """Return the file whose first lines decide whether a path is in some format, if it has one of the suffixes."""
    train = find_file(path, TRAIN, suffixes) if path.is_dir() else path
    return train if train is not None and plain_suffix(train) in suffixes else None


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case, without `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def parse_index(token: str, bound: int, *, what: str) -> int:
    """Parse a whole number from 0 to below `bound` written in ASCII digits, or raise `BadRecord`."""
    if not (token.isascii() and token.isdecimal() and len(token) < 19):
        raise BadRecord(f"{what} not a number", f"expected a {what} (a whole number from 0), got {excerpt(token)}")
    index = int(token)
    if index >= bound:
        raise BadRecord(f"{what} out of range", f"{what} {index} is out of range: expected less than {bound:,}")
    return index


def check_weights(weights: object, *, count: int) -> list[float]:
    """Return a row's weights, or raise `BadRecord` unless there is one finite number, 0 or more, for each label."""
    if type(weights) is not list or not set(map(type, weights)) <= {int, float}:
        raise BadRecord("weights not numbers", f"weights must be a list of numbers, got {excerpt(weights)}")
    if len(weights) != count:
        raise BadRecord("weight count", f"got {len(weights)} weights for {count} labels: give one for each, or none")
    if not all(0 <= weight <= _LARGEST_WEIGHT for weight in weights):
        bad = next(weight for weight in weights if not 0 <= weight <= _LARGEST_WEIGHT)
        raise BadRecord("bad weight", f"weight {excerpt(bad)} must be finite and not negative: correct or remove it")
    return weights


def merge_repeated_labels(matrix: csr_matrix) -> csr_matrix:
    """Keep the largest weight of a label repeated within a row, and leave out weights of 0."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    order = np.lexsort((-matrix.data, matrix.indices, rows))
    rows, columns, weights = rows[order], matrix.indices[order], matrix.data[order]
    keep = weights > 0
    keep[1:] &= (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    return csr_matrix((weights[keep], (rows[keep], columns[keep])), shape=matrix.shape)


def _unique_uids(uids: list[str]) -> list[str]:
    """Append `#2`, `#3`, ... to repeated uids and log how many there are."""
    if len(set(uids)) == len(uids):
        return uids
    used: set[str] = set()
    last_number: dict[str, int] = {}
    unique = []
    for uid in uids:
        name = uid
        while name in used:
            last_number[uid] = last_number.get(uid, 1) + 1
            name = f"{uid}#{last_number[uid]}"
        used.add(name)
        unique.append(name)
    renamed = [new for new, old in zip(unique, uids, strict=True) if new != old]
    log.info(f"{len(renamed):,} query ids were used before and got a number appended, as in {excerpt(renamed[0])}")
    return unique
