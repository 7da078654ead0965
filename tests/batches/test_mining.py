"""Hard negatives: the shortlist against a slow loop, and draws without replacement."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array

from dexter.batches.mining import draw_hard_negatives, mine_hard_negatives
from dexter.errors import UsageError


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    queries = rng.integers(-3, 4, (17, 5)).astype(np.float32)
    labels = rng.integers(-3, 4, (203, 5)).astype(np.float32)
    relevant = random_array((17, 203), density=0.03, rng=1).toarray()
    relevant[3] = 0  # a query without positives
    return queries, labels, csr_matrix(relevant, dtype=np.float32)


def slow_shortlist(queries, labels, relevance, count):
    lists = []
    for row, scores in enumerate(queries @ labels.T):
        positives = set(relevance[[row]].indices)
        kept = [label for label in range(len(labels)) if label not in positives]
        ranked = sorted(kept, key=lambda label: (-scores[label], label))[:count]
        lists.append(ranked + [-1] * (count - len(ranked)))
    return np.array(lists)


@pytest.mark.parametrize("count", [1, 12, 203])
def test_a_shortlist_is_the_top_without_positives(case, count):
    mined = mine_hard_negatives(*case, num_negatives=count)
    np.testing.assert_array_equal(mined, slow_shortlist(*case, count))
    assert mined.dtype == np.int32


def test_draws_between_refreshes_are_without_replacement_and_complete():
    shortlist = np.random.default_rng(0).permuted(np.tile(np.arange(100), (40, 1)), axis=1)[:, :30]
    rows = np.array([5, 39, 0, 17])
    draws = [draw_hard_negatives(shortlist, rows, 6, epoch=10 + e, refreshed_at=10, seed=1) for e in range(5)]
    assert all(draw.shape == (4, 6) for draw in draws)
    np.testing.assert_array_equal(np.sort(np.concatenate(draws, axis=1)), np.sort(shortlist[rows]))


def test_draws_depend_on_the_query_not_on_its_batch_and_change_with_seed_and_refresh():
    shortlist = np.tile(np.arange(30), (50, 1))

    def draw(rows, seed=1, refreshed_at=0, epoch=0):
        return draw_hard_negatives(shortlist, np.array(rows), 5, epoch=epoch, refreshed_at=refreshed_at, seed=seed)

    np.testing.assert_array_equal(draw([3, 8])[1], draw([8, 40, 2])[0])
    assert (draw([3])[0] != draw([4])[0]).any()
    assert (draw([3])[0] != draw([3], seed=2)[0]).any()
    assert (draw([3])[0] != draw([3], epoch=5, refreshed_at=5)[0]).any()


def test_every_place_of_the_shortlist_is_drawn_equally_often():
    draws = draw_hard_negatives(
        np.tile(np.arange(20), (20_000, 1)), np.arange(20_000), 4, epoch=0, refreshed_at=0, seed=0
    )
    counts = np.bincount(draws.ravel(), minlength=20)
    assert abs(counts - 4000).max() < 5 * np.sqrt(4000 * 0.8)


def test_a_new_order_begins_when_the_shortlist_is_used_up():
    shortlist = np.tile(np.arange(7), (3, 1))
    parts = [draw_hard_negatives(shortlist, np.arange(3), 3, epoch=e, refreshed_at=0, seed=0) for e in range(4)]
    for first, second in (parts[:2], parts[2:]):
        assert all(len(set(row)) == 6 for row in np.concatenate([first, second], axis=1))
    assert (parts[0] != parts[2]).any()


def test_gaps_are_drawn_last_and_long_draws_are_the_whole_list():
    shortlist = np.array([[4, -1, 9, -1], [1, 2, 3, 5]])
    assert (draw_hard_negatives(shortlist, np.array([0]), 2, epoch=0, refreshed_at=0, seed=0) >= 0).all()
    assert (draw_hard_negatives(shortlist, np.array([0]), 2, epoch=1, refreshed_at=0, seed=0) == -1).all()
    whole = draw_hard_negatives(shortlist, np.array([1]), 9, epoch=3, refreshed_at=0, seed=0)
    assert sorted(whole[0]) == [1, 2, 3, 5]
    assert draw_hard_negatives(shortlist, np.array([1]), 0, epoch=3, refreshed_at=0, seed=0).shape == (1, 0)


def test_an_epoch_before_the_refresh_is_an_error():
    with pytest.raises(UsageError, match="refreshed_at"):
        draw_hard_negatives(np.zeros((2, 2), dtype=np.int32), np.array([0]), 1, epoch=1, refreshed_at=2, seed=0)


def clustered_case(num_queries=30, num_labels=2000):
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((20, 12), dtype=np.float32)
    queries, labels = (
        centres[rng.integers(0, 20, num)] + 0.5 * rng.standard_normal((num, 12), dtype=np.float32)
        for num in (num_queries, num_labels)
    )
    relevance = csr_matrix(random_array((num_queries, num_labels), density=0.003, rng=1), dtype=np.float32)
    return queries, labels, relevance


def test_mining_above_a_number_of_labels_is_approximate(caplog):
    pytest.importorskip("faiss")
    caplog.set_level("INFO", logger="dexter")
    case = clustered_case()
    exact = mine_hard_negatives(*case, num_negatives=10, approximate_above=2000)
    assert "index" not in caplog.text
    mined = mine_hard_negatives(*case, num_negatives=10, approximate_above=1999)
    assert "index pq: 2,000 labels" in caplog.text
    assert mined.dtype == np.int32
    shared = [len(set(found) & set(wanted)) for found, wanted in zip(mined, exact, strict=True)]
    assert np.mean(shared) >= 9.8
    assert not case[2].toarray()[np.arange(30)[:, None], mined].any()


def test_mining_is_exact_where_there_is_no_index(monkeypatch, caplog):
    caplog.set_level("INFO", logger="dexter")
    case = clustered_case()
    exact = mine_hard_negatives(*case, num_negatives=10)
    monkeypatch.setattr("dexter.batches.mining.importlib.util.find_spec", lambda name: None)
    np.testing.assert_array_equal(mine_hard_negatives(*case, num_negatives=10, approximate_above=10), exact)
    assert "mining among 2,000 labels is exact: pip install" in caplog.text
