"""Test queries held out of a data set that has none: by a seed, or by a column."""

import numpy as np
import pytest
from tests.conftest import make_world

from dexter.data.dataset import hold_out_test
from dexter.errors import DataError, UsageError


@pytest.fixture
def whole():
    from dataclasses import replace

    return replace(make_world(), test=None)


def test_every_query_is_in_one_split_and_the_seed_decides(whole):
    first, again, other = (hold_out_test(whole, fraction=0.2, seed=seed) for seed in (0, 0, 1))
    assert sorted([*first.train.uids, *first.test.uids]) == sorted(whole.train.uids)
    assert 0.1 < len(first.test) / len(whole.train) < 0.3
    assert first.test.uids == again.test.uids != other.test.uids
    row = whole.train.uids.index(first.test.uids[0])
    assert (first.test.relevance[0] != whole.train.relevance[row]).nnz == 0


def test_validation_queries_are_chosen_independently(whole):
    """With one hash for both, no query below the fraction would be left to validate on."""
    _, validation = hold_out_test(whole, fraction=0.2).carve_validation(0.2)
    assert len(validation) > 0.1 * len(whole.train)


def test_groups_stay_together_and_names_of_splits_decide(whole):
    groups = [str(number % 40) for number in range(len(whole.train))]
    split = hold_out_test(whole, fraction=0.3, groups=groups)
    group_of = dict(zip(whole.train.uids, groups, strict=True))
    assert not {group_of[uid] for uid in split.train.uids} & {group_of[uid] for uid in split.test.uids}
    named = ["Test" if number < 7 else "train" for number in range(len(whole.train))]
    assert hold_out_test(whole, groups=named).test.uids == whole.train.uids[:7]


def test_labels_of_the_test_queries_alone_are_counted(whole, caplog):
    caplog.set_level("INFO", logger="dexter")
    label = int(whole.train.relevance.indices[0])
    rows = set(np.flatnonzero(whole.train.relevance[:, label].toarray().ravel()))
    hold_out_test(whole, groups=["test" if row in rows else "train" for row in range(len(whole.train))])
    assert "labels have test queries only" in caplog.text


def test_what_cannot_be_split_is_refused(whole):
    with pytest.raises(UsageError, match="has a test split of 80 queries already"):
        hold_out_test(make_world())
    with pytest.raises(UsageError, match="between 0 and 1"):
        hold_out_test(whole, fraction=1.0)
    with pytest.raises(DataError, match="0 of 400 queries would be for testing"):
        hold_out_test(whole, groups=["train"] * 400)
