"""What a data set is: query texts, labels with ids and texts, and relevant pairs; and splits of its queries.

It is checked once, then immutable.

Relevance is a CSR matrix of queries x labels whose values are graded weights (1 where nothing else was given). Filter
pairs are the (query, label) pairs that must not be predicted, such as an item recommending itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.label_names import LabelNames
from dexter.errors import DataError, UsageError
from dexter.types import PROPENSITY

log = logging.getLogger("dexter")
_TRAIN_NAMES, _TEST_NAMES = ("train", "trn", "training"), ("test", "tst", "testing")


@dataclass(frozen=True, eq=False)
class Split:
    """Queries of one split with their relevant labels."""

    texts: Sequence[str]
    """One text per query."""
    uids: Sequence[str]
    """One identifier per query, unique within the split."""
    relevance: csr_matrix
    """Queries x labels; a stored value is the weight of a relevant pair."""
    filtered: csr_matrix | None = None
    """Queries x labels; a stored value marks a pair that is removed from predictions before scoring."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", tuple(self.texts))
        object.__setattr__(self, "uids", tuple(self.uids))
        object.__setattr__(self, "relevance", _frozen_csr(self.relevance))
        if self.filtered is not None:
            object.__setattr__(self, "filtered", _frozen_csr(self.filtered))
        num_queries = len(self.texts)
        if len(self.uids) != num_queries or self.relevance.shape[0] != num_queries:
            raise DataError(
                f"a split needs one uid and one relevance row per text: got {num_queries} texts, "
                f"{len(self.uids)} uids, {self.relevance.shape[0]} rows"
            )
        if self.filtered is not None and self.filtered.shape != self.relevance.shape:
            raise DataError(
                f"filter pairs have shape {self.filtered.shape}, relevance {self.relevance.shape}: they must agree"
            )
        values = self.relevance.data
        if values.size and not (np.isfinite(values).all() and (values > 0).all()):
            raise DataError("relevance weights must be finite and above zero: leave irrelevant labels out instead")

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_labels(self) -> int:
        """Number of label columns."""
        return int(self.relevance.shape[1])

    def select(self, rows: Sequence[int] | np.ndarray) -> Split:
        """Return a split of the given rows, in that order."""
        rows = np.asarray(rows, dtype=np.int64)
        return Split(
            texts=[self.texts[row] for row in rows],
            uids=[self.uids[row] for row in rows],
            relevance=freeze(self.relevance[rows]),
            filtered=None if self.filtered is None else freeze(self.filtered[rows]),
        )


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labels and the splits that refer to them."""

    name: str
    """A short name, used in reports."""
    label_texts: Sequence[str]
    """One text per label, in column order."""
    label_ids: Sequence[str]
    """One string identifier per label, unique, in column order."""
    train: Split
    """The queries to learn from."""
    test: Split | None = None
    """The queries to score on; training never uses them."""
    source: Mapping[str, str] = field(default_factory=dict)
    """Where it came from: the format it was read as and the SHA-256 of each file."""
    propensity: tuple[float, float] = PROPENSITY["default"]
    """The constants (a, b) of its propensity-scored metrics, which differ between published data sets."""
    text_fields: tuple[str, ...] | None = None
    """The fields of the published records that the texts were made of, where there was a choice."""
    names: LabelNames | None = None
    """What the labels of a vocabulary are called in its languages; None where labels come from no vocabulary."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_texts", tuple(self.label_texts))
        object.__setattr__(self, "label_ids", tuple(self.label_ids))
        object.__setattr__(self, "propensity", check_propensity(self.propensity))
        if len(self.label_ids) != len(self.label_texts):
            raise DataError(
                f"got {len(self.label_ids)} label ids for {len(self.label_texts)} label texts: one each is needed"
            )
        if len(set(self.label_ids)) != len(self.label_ids):
            raise DataError("label ids must be unique")
        for split_name, split in self.splits.items():
            if split.num_labels != self.num_labels:
                raise DataError(
                    f"the {split_name} split refers to {split.num_labels} labels, the data set has {self.num_labels}"
                )

    @property
    def num_labels(self) -> int:
        """Number of labels."""
        return len(self.label_texts)

    @property
    def splits(self) -> dict[str, Split]:
        """The splits that are present, by name."""
        return {"train": self.train} | ({"test": self.test} if self.test is not None else {})

    @cached_property
    def label_counts(self) -> np.ndarray:
        """Number of training queries of each label."""
        return np.bincount(self.train.relevance.indices, minlength=self.num_labels)

    def carve_validation(
        self, fraction: float = 0.1, *, seed: int = 0, maximum: int | None = None
    ) -> tuple[Split, Split]:
        """Split the training queries in (train, validation) by a seeded hash of their uids; the test split is not read.

        The choice depends on the uid and the seed alone, so that it survives reordering and added rows. Labels whose
        last training query is taken away by this count neither as right nor as wrong for the queries that have them:
        they become filter pairs, unless that would be most pairs.
        """
        if not 0.0 < fraction < 1.0:
            raise DataError(f"a validation fraction must lie between 0 and 1, got {fraction}")
        keys = np.array([hash_fraction(f"{seed}:{uid}") for uid in self.train.uids])
        chosen = np.flatnonzero(keys < fraction)
        if maximum is not None and len(chosen) > maximum:
            chosen = np.sort(chosen[np.argsort(keys[chosen], kind="stable")[:maximum]])
        rest = np.setdiff1d(np.arange(len(self.train)), chosen, assume_unique=True)
        if not len(chosen) or not len(rest):
            raise DataError(
                f"{len(self.train)} training queries are too few to hold out {fraction:.0%} for validation: add data, "
                "raise validation.fraction, or set it to 0 to train without validation"
            )
        train, validation = self.train.select(rest), self.train.select(chosen)
        return train, _filter_untrained(validation, train)


def _filter_untrained(validation: Split, train: Split) -> Split:
    """Return the split with pairs whose label no training query has as filter pairs; as it is if these are most."""
    is_trained = np.bincount(train.relevance.indices, minlength=train.num_labels) > 0
    untrained, trained = validation.relevance.copy(), validation.relevance.copy()
    trained.data *= is_trained[trained.indices]
    untrained.data *= ~is_trained[untrained.indices]
    for pairs in (untrained, trained):
        pairs.eliminate_zeros()
    if not untrained.nnz or untrained.nnz > trained.nnz:
        return validation
    filtered = untrained if validation.filtered is None else (validation.filtered + untrained).tocsr()
    return replace(validation, relevance=trained, filtered=filtered)


def hold_out_test(
    dataset: Dataset, *, fraction: float = 0.1, seed: int = 0, groups: Sequence[str] | None = None
) -> Dataset:
    """Return the data set with a share of its queries as test split.

    The choice depends on a query's id (or group) and the seed alone, so that it survives reordering and added rows. It
    is independent of the validation queries that training holds out.

    Args:
        dataset: one without a test split.
        fraction: the share of the queries, about.
        seed: another seed holds out others.
        groups: one value per query. Where the values are names of splits (train, test), they decide; otherwise queries
            with the same value stay together.
    """
    if dataset.test is not None:
        raise UsageError(f"{dataset.name} has a test split of {len(dataset.test):,} queries already: use it as it is")
    if not 0.0 < fraction < 1.0:
        raise UsageError(f"the fraction of test queries must lie between 0 and 1, got {fraction:g}")
    if groups is not None and len(groups) != len(dataset.train):
        raise DataError(f"got {len(groups):,} groups for {len(dataset.train):,} queries: one each is needed")
    names = {name.strip().lower() for name in groups or ()}
    if groups is not None and names <= {*_TRAIN_NAMES, *_TEST_NAMES}:
        is_test = np.array([name.strip().lower() in _TEST_NAMES for name in groups])
    else:
        keys = dataset.train.uids if groups is None else groups
        is_test = np.array([hash_fraction(f"test:{seed}:{key}") for key in keys]) < fraction
    if is_test.all() or not is_test.any():
        count = f"{int(is_test.sum()):,} of {len(is_test):,}"
        raise DataError(f"{count} queries would be for testing: raise or lower the fraction, or take another seed")
    train, test = (dataset.train.select(np.flatnonzero(rows)) for rows in (~is_test, is_test))
    unseen = np.setdiff1d(test.relevance.indices, train.relevance.indices)
    if len(unseen):
        log.info("%s labels have test queries only: training never sees one of theirs", f"{len(unseen):,}")
    return replace(dataset, train=train, test=test)


def check_propensity(constants: Sequence[float]) -> tuple[float, float]:
    """Return the propensity constants as a pair of numbers, or raise `DataError`."""
    values = list(constants) if isinstance(constants, Sequence) else []
    if len(values) != 2 or not all(_is_number(one) and 0 < one < 1000 for one in values):
        raise DataError(
            f"propensity is {str(constants)[:40]}: expected two numbers (a, b) above 0, such as 0.55 and 1.5"
        )
    return float(values[0]), float(values[1])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def hash_fraction(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return (
        int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2.0**64
    )


def csr_of_rows(rows: Sequence[Sequence[int]], num_columns: int) -> csr_matrix:
    """Return a matrix of ones at the given columns of each row."""
    ends = np.cumsum([0, *map(len, rows)])
    columns = np.fromiter((column for row in rows for column in row), dtype=np.int64, count=int(ends[-1]))
    return csr_matrix((np.ones(len(columns), np.float32), columns, ends), shape=(len(rows), num_columns))


def freeze(matrix: csr_matrix) -> csr_matrix:
    """Make the arrays of a matrix read-only, so that a `Split` takes it without a copy; returns the matrix."""
    for array in (matrix.data, matrix.indices, matrix.indptr):
        array.setflags(write=False)
    return matrix


def _frozen_csr(matrix: csr_matrix) -> csr_matrix:
    """Return a read-only float32 CSR matrix in canonical form: the matrix itself if it is one, else a copy."""
    if not _is_frozen(matrix):
        matrix = csr_matrix(matrix, dtype=np.float32, copy=True)
        matrix.sum_duplicates()
        matrix.sort_indices()
    matrix.check_format(full_check=True)
    return freeze(matrix)


def _is_frozen(matrix: csr_matrix) -> bool:
    return (
        isinstance(matrix, csr_matrix)
        and matrix.dtype == np.float32
        and not any(array.flags.writeable for array in (matrix.data, matrix.indices, matrix.indptr))
        and matrix.has_canonical_format
    )
