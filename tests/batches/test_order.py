"""Query orders: every query once, stateless in (seed, epoch)."""

import numpy as np
import pytest

from dexter.batches.order import clustered, curriculum_cluster_size, shuffled
from dexter.errors import UsageError


@pytest.mark.parametrize(("num_queries", "num_batches"), [(10, 4), (12, 3), (1, 1), (1025, 2), (2790, 128)])
def test_a_shuffled_epoch_holds_every_query_once_in_batches_equal_within_one(num_queries, num_batches):
    batches = shuffled(num_queries, num_batches, seed=0, epoch=2)
    sizes = [len(batch) for batch in batches]
    assert len(batches) == num_batches
    assert max(sizes) - min(sizes) <= 1
    assert sorted(int(query) for batch in batches for query in batch) == list(range(num_queries))


def test_an_order_depends_on_seed_and_epoch_alone():
    orders = {
        (seed, epoch): np.concatenate(shuffled(50, 7, seed=seed, epoch=epoch)).tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert orders[1, 1] == np.concatenate(shuffled(50, 7, seed=1, epoch=1)).tolist()


def test_as_many_clusters_as_batches_are_batches_in_another_order_each_epoch():
    leaves = [np.arange(start, start + 4) for start in range(0, 40, 4)]
    epochs = [clustered(leaves, 10, seed=0, epoch=epoch) for epoch in (0, 1)]
    for batches in epochs:
        assert sorted(batch.tolist() for batch in batches) == [leaf.tolist() for leaf in leaves]
    assert [batch[0] for batch in epochs[0]] != [batch[0] for batch in epochs[1]]


def test_small_clusters_are_joined_whole():
    leaves = [np.arange(start, start + 3) for start in range(0, 33, 3)]
    batches = clustered(leaves, 4, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == [9, 9, 9, 6]
    for batch in batches:
        assert (batch.reshape(-1, 3) // 3 == batch.reshape(-1, 3)[:, :1] // 3).all()
    assert sorted(int(query) for batch in batches for query in batch) == list(range(33))


def test_batches_that_would_be_empty_are_an_error():
    with pytest.raises(UsageError, match="1 clusters cannot make 4 batches"):
        clustered([np.arange(5)], 4, seed=0, epoch=0)
    with pytest.raises(UsageError, match="5 queries cannot make 0 batches"):
        shuffled(5, 0, seed=0, epoch=0)


def test_the_curriculum_doubles_up_to_the_batch_size():
    sizes = [curriculum_cluster_size(epoch, double_every=2, maximum=24) for epoch in range(14)]
    assert sizes == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 24, 24, 24, 24]
    assert curriculum_cluster_size(10**6, double_every=1, maximum=5, start=3) == 5
    with pytest.raises(UsageError, match="start"):
        curriculum_cluster_size(0, double_every=0, maximum=8)
