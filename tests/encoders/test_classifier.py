import copy

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch.nn import functional

from dexter.encoders.classifier import ClassifierTable, centroids, starting_rows
from dexter.errors import UsageError

STORAGES = ["float32", "bfloat16"]


def table_of(num_labels=11, dimension=6, **settings):
    table = ClassifierTable(num_labels, dimension, **settings)
    table.initialise(torch.randn(num_labels, dimension, generator=torch.Generator().manual_seed(0)))
    return table


def unit(*shape, seed=0):
    return functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("labels", [None, [10, 0, 3, 10]], ids=["all", "some"])
def test_rows_and_their_gradient_equal_dense_indexing(storage, labels):
    table = table_of(storage=storage)
    dense = table.weight.detach().float().requires_grad_()
    labels = None if labels is None else torch.tensor(labels)
    rows, expected = table.rows(labels), dense if labels is None else dense[labels]
    assert rows.dtype == torch.float32
    assert torch.equal(rows, expected)
    weights = torch.randn(rows.shape)
    (rows * weights).sum().backward()
    (expected * weights).sum().backward()
    assert table.weight.grad.is_sparse and table.weight.grad.dtype == torch.float32
    torch.testing.assert_close(table.weight.grad.to_dense(), dense.grad)


@pytest.mark.parametrize("storage", STORAGES)
def test_several_lookups_in_a_step_add_up_without_rounding(storage):
    table = table_of(storage=storage)
    small = 1 + 2.0**-12  # bfloat16 cannot hold it
    for labels in ([1, 2, 1], [2], [10]):
        (table.rows(torch.tensor(labels)) * small).sum().backward()
    expected = torch.zeros(11, 6)
    expected[[1, 2, 10]] = torch.tensor([2.0, 2.0, 1.0])[:, None] * small
    assert torch.equal(table.weight.grad.to_dense(), expected)


def test_a_copied_or_reloaded_table_still_learns():
    table = table_of(storage="bfloat16")
    other = copy.deepcopy(table)
    other.load_state_dict(table.state_dict())
    assert other.weight.dtype == torch.bfloat16
    other.rows(torch.tensor([3])).sum().backward()
    assert other.weight.grad.dtype == torch.float32


def test_dropout_is_for_training_only():
    table = table_of(dimension=400, dropout=0.25)
    table.initialise(torch.ones(11, 400))
    labels = torch.tensor([1, 5])
    torch.manual_seed(0)
    rows = table.rows(labels)
    dropped = rows == 0
    assert 0.15 < dropped.float().mean() < 0.35
    torch.testing.assert_close(rows[~dropped], torch.full_like(rows[~dropped], 1 / 0.75))
    rows.sum().backward()
    assert torch.equal(table.weight.grad.to_dense()[labels] == 0, dropped)
    assert torch.equal(table.eval().rows(labels), torch.ones(2, 400))


def test_wrong_arguments_are_errors():
    with pytest.raises(UsageError, match="float16"):
        ClassifierTable(3, 2, storage="float16")
    with pytest.raises(UsageError, match="dropout"):
        ClassifierTable(3, 2, dropout=1.0)
    with pytest.raises(UsageError, match=r"\(4, 2\).*\(3, 2\)"):
        ClassifierTable(3, 2).initialise(torch.zeros(4, 2))
    with pytest.raises(UsageError, match="4 vectors for 3 queries"):
        centroids(torch.zeros(4, 2), csr_matrix((3, 5)))


def relevance_of(num_queries=9, num_labels=7):
    generator = np.random.default_rng(0)
    dense = generator.random((num_queries, num_labels)) * (generator.random((num_queries, num_labels)) < 0.4)
    dense[:, 6] = 0  # the last label has no query
    dense[2] = 0  # and one query no label
    return csr_matrix(dense)


def test_centroids_equal_a_slow_loop():
    relevance, queries = relevance_of(), torch.randn(9, 4)
    found = centroids(queries, relevance)
    assert found.dtype == torch.float32
    for label in range(7):
        weights = torch.from_numpy(relevance[:, [label]].toarray().ravel()).float()
        expected = weights @ queries / weights.sum() if weights.sum() else torch.zeros(4)
        torch.testing.assert_close(found[label], expected)


def test_rows_start_between_text_and_queries():
    relevance, queries, labels = relevance_of(), unit(9, 4), 3 * unit(7, 4, seed=1)
    rows = starting_rows(labels, queries, relevance)
    middle = centroids(queries, relevance)
    seen = torch.from_numpy(np.diff(relevance.tocsc().indptr) > 0)
    cosines = functional.cosine_similarity(rows, labels), functional.cosine_similarity(rows, middle)
    torch.testing.assert_close(cosines[0][seen], cosines[1][seen])
    torch.testing.assert_close(rows[~seen], labels[~seen] / 3)


def test_rows_of_long_queries_start_short():
    relevance, queries, labels = relevance_of(), unit(9, 4), unit(7, 4, seed=1)
    rows = starting_rows(labels, queries, relevance)
    torch.testing.assert_close(starting_rows(labels, 5 * queries, relevance), rows / 5)
    torch.testing.assert_close(starting_rows(labels, 0.2 * queries, relevance), rows)
