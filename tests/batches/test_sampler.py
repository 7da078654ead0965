"""Every step of an epoch has a batch, and every query comes once, whatever the sizes."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.batches.sampler import Sampler
from dexter.config import BatchConfig, LossConfig
from dexter.data import Split


def sampler(num_queries, **settings):
    relevance = csr_matrix(np.eye(num_queries, 7, dtype=np.float32) + np.eye(num_queries, 7, 3, dtype=np.float32))
    texts = [f"query {number}" for number in range(num_queries)]
    return Sampler(
        Split(texts, texts, relevance), BatchConfig(pool="sampled", positives=1, **settings), LossConfig(), seed=0
    )


def queries_of_an_epoch(made, epoch):
    steps = range(epoch * made.steps_per_epoch, (epoch + 1) * made.steps_per_epoch)
    return [made.rows(step) for step in steps]


@pytest.mark.parametrize("order", ["shuffled", "clustered"])
@pytest.mark.parametrize(("num_queries", "size"), [(127, 1), (5, 1), (279, 3), (2790, 32), (64, 64), (65, 64)])
def test_every_query_comes_once_before_and_after_a_refresh(num_queries, size, order):
    made = sampler(num_queries, order=order, size=size, start=1)
    batches = queries_of_an_epoch(made, 0)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(num_queries))
    assert max(map(len, batches)) <= max(size, 2)
    vectors, labels = (np.random.default_rng(0).standard_normal((n, 4), dtype=np.float32) for n in (num_queries, 7))
    made.refresh(made.steps_per_epoch, vectors, labels)
    batches = queries_of_an_epoch(made, 1)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(num_queries))
    assert max(map(len, batches)) <= max(size, 2)


@pytest.mark.parametrize("epoch", [0, 1, 2, 5])
def test_growing_clusters_leave_no_query_out(epoch):
    made = sampler(2790, order="clustered", size=32, cluster_doubling=1, refresh=1)
    vectors, labels = (np.random.default_rng(0).standard_normal((n, 4), dtype=np.float32) for n in (2790, 7))
    made.refresh(epoch * made.steps_per_epoch, vectors, labels)
    batches = queries_of_an_epoch(made, epoch)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(2790))
