"""What a data set promises: checked once, then immutable; validation carved from train by a stable hash."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split
from dexter.data.dataset import freeze
from dexter.errors import DataError


def split(num_rows: int = 4, num_labels: int = 3, *, value: float = 1.0) -> Split:
    values = np.full(num_rows, value, dtype=np.float64)
    matrix = csr_matrix((values, (np.arange(num_rows), np.arange(num_rows) % num_labels)), shape=(num_rows, num_labels))
    return Split(
        texts=[f"text {row}" for row in range(num_rows)], uids=[f"u{row}" for row in range(num_rows)], relevance=matrix
    )


def dataset(num_rows: int = 4) -> Dataset:
    return Dataset(
        name="d", label_ids=["a", "b", "c"], label_texts=["A", "B", "C"], train=split(num_rows), test=split(2)
    )


def test_immutable() -> None:
    data = dataset()
    with pytest.raises(FrozenInstanceError):
        data.name = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        data.train.relevance.data[0] = 5
    assert isinstance(data.train.texts, tuple)
    assert isinstance(data.label_ids, tuple)


def test_changes_to_the_given_matrix_do_not_reach_it() -> None:
    matrix = csr_matrix(np.eye(2))
    made = Split(texts=["x", "y"], uids=["1", "2"], relevance=matrix)
    matrix.data[:] = 9
    assert made.relevance.data.tolist() == [1, 1]


def test_a_frozen_matrix_is_taken_without_a_copy() -> None:
    matrix = freeze(csr_matrix(np.eye(2, dtype=np.float32)))
    assert Split(texts=["x", "y"], uids=["1", "2"], relevance=matrix).relevance is matrix
    unsorted = freeze(csr_matrix(([1.0, 1.0], [1, 0], [0, 2]), shape=(1, 2), dtype=np.float32))
    assert Split(texts=["x"], uids=["1"], relevance=unsorted).relevance.indices.tolist() == [0, 1]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_must_be_finite_and_positive(value: float) -> None:
    with pytest.raises(DataError, match="finite and above zero"):
        split(value=value)


def test_sizes_must_agree() -> None:
    with pytest.raises(DataError, match="2 texts, 1 uids, 2 rows"):
        Split(texts=["x", "y"], uids=["1"], relevance=csr_matrix((2, 1)))
    with pytest.raises(DataError, match="filter pairs have shape"):
        Split(texts=["x"], uids=["1"], relevance=csr_matrix((1, 2)), filtered=csr_matrix((1, 3)))
    with pytest.raises(DataError, match="the train split refers to 3 labels, the data set has 1"):
        Dataset(name="d", label_ids=["a"], label_texts=["A"], train=split())
    with pytest.raises(DataError, match="2 label ids for 1 label texts"):
        Dataset(name="d", label_ids=["a", "b"], label_texts=["A"], train=split())
    with pytest.raises(DataError, match="unique"):
        Dataset(name="d", label_ids=["a", "a", "b"], label_texts=["A", "B", "C"], train=split())


def test_label_counts_and_select() -> None:
    data = dataset()
    assert data.label_counts.tolist() == [2, 1, 1]
    chosen = data.train.select([3, 0])
    assert chosen.uids == ("u3", "u0")
    assert chosen.relevance.toarray().tolist() == [[1, 0, 0], [1, 0, 0]]


def test_carve_validation_is_a_stable_partition() -> None:
    data = dataset(1000)
    train, validation = data.carve_validation(0.2, seed=3)
    assert sorted(train.uids + validation.uids) == sorted(data.train.uids)
    assert 150 < len(validation) < 250
    again = data.carve_validation(0.2, seed=3)[1]
    assert again.uids == validation.uids
    assert data.carve_validation(0.2, seed=4)[1].uids != validation.uids


def test_carve_validation_survives_reordering_and_added_rows() -> None:
    data = dataset(500)
    chosen = set(data.carve_validation(0.2)[1].uids)
    reordered = replace(data, train=data.train.select(np.arange(500)[::-1]))
    assert set(reordered.carve_validation(0.2)[1].uids) == chosen
    longer = dataset(900)
    assert chosen <= set(longer.carve_validation(0.2)[1].uids)


def test_carve_validation_limits() -> None:
    data = dataset(500)
    assert len(data.carve_validation(0.5, maximum=7)[1]) == 7
    for fraction in (0.0, 1.0, float("nan")):
        with pytest.raises(DataError, match="between 0 and 1"):
            data.carve_validation(fraction)
    with pytest.raises(DataError, match="too few"):
        dataset(1).carve_validation(0.5)


def test_labels_without_a_training_query_are_filter_pairs_of_validation() -> None:
    rare, common = np.eye(1000), np.ones((1000, 2))
    relevance = csr_matrix(np.hstack([common, rare]))
    whole = dataset(1000)
    texts, uids = whole.train.texts, whole.train.uids
    labels = [f"l{label}" for label in range(1002)]
    own = csr_matrix(([1.0], ([0], [1001])), shape=relevance.shape)
    data = replace(whole, label_ids=labels, label_texts=labels, train=Split(texts, uids, relevance, own), test=None)
    train, validation = data.carve_validation(0.2)
    assert train.relevance.sum() == 3 * len(train)
    assert (validation.relevance.toarray() == [1.0, 1.0] + [0.0] * 1000).all()
    rows = [uids.index(uid) for uid in validation.uids]
    expected = np.hstack([np.zeros((len(rows), 2)), rare[rows]]) + own[rows].toarray()
    np.testing.assert_array_equal(validation.filtered.toarray() > 0, expected > 0)


def test_validation_stays_as_it_is_where_most_labels_are_new() -> None:
    whole = dataset(1000)
    labels = [f"l{label}" for label in range(1000)]
    split = Split(whole.train.texts, whole.train.uids, csr_matrix(np.eye(1000)))
    data = replace(whole, label_ids=labels, label_texts=labels, train=split, test=None)
    validation = data.carve_validation(0.2)[1]
    assert validation.relevance.nnz == len(validation)
    assert validation.filtered is None
