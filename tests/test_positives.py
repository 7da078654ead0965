"""Positives: what is accepted, what is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from dexter.batches import Positives
from dexter.errors import DataError, UsageError


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda values: np.array(values, dtype=np.int32)])
def test_pairs_are_sorted_and_kept_as_int64(kind):
    pairs = Positives(kind([2, 0, 0]), kind([1, 5, 3]), [0.5, 1.0, 2.0])
    assert pairs.rows.tolist() == [0, 0, 2]
    assert pairs.columns.tolist() == [3, 5, 1]
    assert pairs.weights.tolist() == [2.0, 1.0, 0.5]
    assert pairs.rows.dtype == pairs.columns.dtype == torch.int64
    assert pairs.weights.dtype == torch.float32
    assert len(pairs) == 3


def test_duplicates_are_merged_with_the_largest_weight():
    pairs = Positives([1, 1, 0, 1], [4, 4, 2, 4], [0.5, 3.0, 1.0, 2.0])
    assert (pairs.rows.tolist(), pairs.columns.tolist(), pairs.weights.tolist()) == ([0, 1], [2, 4], [1.0, 3.0])
    assert len(Positives([1, 1], [4, 4])) == 1


def test_empty():
    for empty in ([], np.array([]), torch.empty(0)):
        pairs = Positives(empty, empty)
        assert len(pairs) == 0
        assert pairs.counts(3).tolist() == [0, 0, 0]
        assert len(pairs.transpose()) == 0
        pairs.check(0, 0)


def test_counts_transpose_select_and_device():
    pairs = Positives([0, 0, 2], [1, 3, 0], [1.0, 2.0, 3.0])
    assert pairs.counts(4).tolist() == [2, 0, 1, 0]
    swapped = pairs.transpose()
    assert (swapped.rows.tolist(), swapped.columns.tolist(), swapped.weights.tolist()) == (
        [0, 1, 3],
        [2, 0, 0],
        [3.0, 1.0, 2.0],
    )
    assert pairs.select(pairs.columns > 0).columns.tolist() == [1, 3]
    assert pairs.to("cpu") is pairs
    assert pairs.to("meta").rows.device.type == "meta"


def test_from_csr():
    matrix = csr_matrix(np.array([[0, 2, 0], [1, 0, 1]], dtype=np.float32))
    pairs = Positives.from_csr(matrix)
    assert (pairs.rows.tolist(), pairs.columns.tolist(), pairs.weights.tolist()) == (
        [0, 1, 1],
        [1, 0, 2],
        [2.0, 1.0, 1.0],
    )
    assert Positives.from_csr(matrix.astype(bool)).weights is None


def test_check_names_the_pair():
    pairs = Positives([0, 2], [1, 7])
    pairs.check(3, 8)
    with pytest.raises(DataError, match=r"query 2, label 7.*3 queries x 7 labels"):
        pairs.check(3, 7)
    with pytest.raises(DataError, match=r"query 2, label 7"):
        pairs.check(2, 8)


@pytest.mark.parametrize(
    "wrong",
    [
        ([0, 1], [0]),
        ([0], [0], [1.0, 2.0]),
        ([0.5], [0]),
        (torch.tensor([True]), [0]),
        ([[0]], [[0]]),
        ([-1], [0]),
        ([0], [0], [-1.0]),
        ([0], [0], [float("nan")]),
    ],
)
def test_wrong_pairs_are_refused(wrong):
    with pytest.raises((UsageError, DataError)):
        Positives(*wrong)


def test_frozen():
    with pytest.raises(AttributeError):
        Positives([0], [0]).rows = torch.zeros(1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 4, width=32)), max_size=30))
def test_is_the_set_of_its_pairs(triples):
    rows, columns, weights = zip(*triples, strict=True) if triples else ((), (), ())
    pairs = Positives(rows, columns, weights)
    largest = {}
    for row, column, weight in triples:
        largest[row, column] = max(weight, largest.get((row, column), 0.0))
    got = dict(zip(zip(pairs.rows.tolist(), pairs.columns.tolist(), strict=True), pairs.weights.tolist(), strict=True))
    assert list(got) == sorted(largest)
    assert got == largest
