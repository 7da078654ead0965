"""Fixed samples of the shared data sets, small enough that a trial takes seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from bench import shared_data
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split


@dataclass(frozen=True)
class Sample:
    """How a sample is drawn: random rows (seed 0) of a data set, and the labels that these training rows have."""

    data: str
    num_train: int = 0
    """Training queries; 0: all of them."""
    num_test: int = 0
    """Test queries; 0: all of them."""
    num_labels: int = 0
    """Only the most frequent labels, and only queries with two of them or more; 0: every label."""

    def describe(self) -> str:
        """Return the sample in words."""
        if not self.num_train:
            return f"all of {self.data}"
        which = f", the {self.num_labels:,} commonest labels, queries with two of them" if self.num_labels else ""
        num_test = f"{self.num_test:,}" if self.num_test else "all"
        return f"{self.num_train:,} training and {num_test} test queries of {self.data}{which}"


PUBLISHED_COUNTS = "published counts"
"""The sample of plans, which read no data."""
SAMPLES = {
    "stackexchange4": Sample("stackexchange4"),
    "stackexchange4-half": Sample("stackexchange4", 16_718),
    "stackexchange4-5k": Sample("stackexchange4", 5_000, 2_000),
    "stackexchange4-mini": Sample("stackexchange4", 750, 500, 300),
    "debian-5k": Sample("debian-related", 5_000, 2_000),
    "delicious-5k": Sample("delicious-bow", 5_000, 2_000),
    "yso-5k": Sample("yso-finna-en", 5_000, 2_000, 2_000),
}


@cache
def load_sample(name: str) -> Dataset:
    """Return a sample by its name, or one of `bench.claims.synthetic` by `synthetic-...`."""
    if name == PUBLISHED_COUNTS:
        return Dataset(name, [], [], Split([], [], csr_matrix((0, 0))), None)
    if name.startswith("synthetic"):
        from bench.claims.synthetic import make_dataset

        return make_dataset(name)
    return draw(shared_data.load(SAMPLES[name].data), SAMPLES[name], name)


def draw(dataset: Dataset, sample: Sample, name: str) -> Dataset:
    """Draw a sample from a data set."""
    assert dataset.test is not None
    if not sample.num_train:
        return dataset
    labels, least = np.arange(dataset.num_labels), 1
    if sample.num_labels:
        labels, least = np.sort(np.argsort(-dataset.label_counts, kind="stable")[: sample.num_labels]), 2
    train = _rows(dataset.train, labels, least, sample.num_train)
    seen = labels[np.bincount(train.relevance[:, labels].indices, minlength=len(labels)) > 0]
    test = _rows(dataset.test, seen, 1, sample.num_test)
    return replace(
        dataset,
        name=name,
        label_texts=[dataset.label_texts[label] for label in seen],
        label_ids=[dataset.label_ids[label] for label in seen],
        train=_columns(train, seen),
        test=_columns(test, seen),
    )


def _rows(split: Split, labels: np.ndarray, least: int, count: int) -> Split:
    """Draw `count` queries (0: all) that have at least `least` of the labels."""
    rows = np.flatnonzero(np.diff(csr_matrix(split.relevance[:, labels]).indptr) >= least)
    return split.select(np.sort(np.random.default_rng(0).permutation(rows)[: count or None]))


def _columns(split: Split, labels: np.ndarray) -> Split:
    filtered = None if split.filtered is None else csr_matrix(split.filtered[:, labels])
    return Split(split.texts, split.uids, csr_matrix(split.relevance[:, labels]), filtered)
