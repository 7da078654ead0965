"""Hold out test queries of a data set that came without any: at random by a seed, or by a column of its file."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dexter.data.dataset import Dataset, hash_fraction
from dexter.errors import DataError, UsageError

log = logging.getLogger("dexter")
_TRAIN_NAMES, _TEST_NAMES = ("train", "trn", "training"), ("test", "tst", "testing")


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
