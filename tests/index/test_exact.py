"""Exact search against a full sort, on sizes that divide nothing."""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix, random_array

import dexter.index.device as on_device
import dexter.index.exact as exact
from dexter.errors import ModelError, UsageError
from dexter.index import ExactIndex, search


def whole_numbers(rng, shape, span=3):
    """Small integers: products are exact in float32 whatever the order of summation, and ties abound."""
    return rng.integers(-span, span + 1, shape).astype(np.float32)


def slow_search(queries, labels, k, forbidden=None):
    scores = queries.astype(np.float64) @ labels.astype(np.float64).T
    if forbidden is not None:
        scores[forbidden] = -np.inf
    ids = np.full((len(queries), k), -1)
    top = np.full((len(queries), k), -np.inf)
    for row, values in enumerate(scores):
        ranked = sorted(
            (label for label in range(len(labels)) if values[label] > -np.inf),
            key=lambda label: (-values[label], label),
        )
        ids[row, : len(ranked[:k])] = ranked[:k]
        top[row, : len(ranked[:k])] = values[ranked[:k]]
    return ids, top


@pytest.mark.parametrize(
    ("num_queries", "num_labels", "k"),
    [(1, 1, 1), (3, 31, 5), (7, 33, 33), (5, 20, 40), (13, 1003, 7), (9, 2111, 100), (0, 10, 3)],
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (2, 991), (512, 8_192)])
def test_agrees_with_a_full_sort_also_in_ties(num_queries, num_labels, k, rows, columns, monkeypatch):
    monkeypatch.setattr(exact, "ROWS", rows)
    monkeypatch.setattr(exact, "COLUMNS", columns)
    rng = np.random.default_rng(num_labels)
    queries, labels = whole_numbers(rng, (num_queries, 6)), whole_numbers(rng, (num_labels, 6))
    found = search(queries, labels, k)
    ids, scores = slow_search(queries, labels, k)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)
    assert found.ids.dtype == np.int64
    assert found.scores.dtype == np.float32


def test_tiles_of_rows_and_products_of_columns(monkeypatch):
    monkeypatch.setattr(exact, "ROWS", 5)
    monkeypatch.setattr(exact, "COLUMNS", 64)
    rng = np.random.default_rng(0)
    queries, labels = whole_numbers(rng, (23, 4)), whole_numbers(rng, (777, 4))
    exclude = csr_matrix(random_array((23, 777), density=0.3, rng=1))
    found = search(queries, labels, 9, exclude=exclude)
    np.testing.assert_array_equal(found.ids, slow_search(queries, labels, 9, exclude.toarray() != 0)[0])


def test_all_scores_equal_ranks_by_id():
    found = search(np.zeros((4, 3)), np.ones((500, 3)), 50)
    np.testing.assert_array_equal(found.ids, np.tile(np.arange(50), (4, 1)))


def test_minus_zero_equals_zero():
    labels = np.array([[1.0], [-1.0], [1.0], [-1.0]], dtype=np.float32)
    np.testing.assert_array_equal(search(np.zeros((1, 1), dtype=np.float32), labels, 4).ids, [[0, 1, 2, 3]])


def test_real_vectors_have_the_scores_of_torch_topk(device):
    queries, labels = torch.randn(37, 24), torch.randn(4099, 24)
    expected = torch.topk(queries @ labels.T, 20)
    for placed in (labels.numpy(), labels.to(device)):
        found = search(queries.numpy(), placed, 20)
        np.testing.assert_allclose(found.scores, expected.values, rtol=1e-5)
        assert (found.ids == expected.indices.numpy()).mean() > 0.99


@pytest.mark.parametrize(("num_queries", "num_labels", "k"), [(1, 1, 1), (5, 20, 40), (13, 1003, 7), (0, 10, 3)])
def test_labels_on_a_device_are_searched_alike(num_queries, num_labels, k, device, monkeypatch):
    monkeypatch.setattr(on_device, "COLUMNS", 300)
    rng = np.random.default_rng(num_labels)
    queries, labels = whole_numbers(rng, (num_queries, 6)), whole_numbers(rng, (num_labels, 6))
    exclude = csr_matrix(random_array((num_queries, num_labels), density=0.3, rng=1))
    settings = {"exclude": exclude, "ceiling": np.full(num_queries, 9.0, dtype=np.float32)}
    expected = search(queries, labels, k, **settings)
    found = search(queries, torch.from_numpy(labels).to(device), k, **settings)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.scores, expected.scores)


def test_excluded_pairs_are_never_returned_and_leave_gaps_only_at_the_end():
    rng = np.random.default_rng(2)
    queries, labels = whole_numbers(rng, (11, 5)), whole_numbers(rng, (140, 5))
    forbidden = rng.random((11, 140)) < 0.5
    forbidden[4, :137] = True  # three labels left or fewer, less than k
    forbidden[5, :] = True  # none left
    forbidden[6, 139] = True  # the last label
    found = search(queries, labels, 8, exclude=csr_matrix(forbidden))
    ids, scores = slow_search(queries, labels, 8, forbidden)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)
    assert (found.ids[5] == -1).all()


def test_labels_above_the_ceiling_make_room_for_the_next():
    rng = np.random.default_rng(4)
    queries, labels = whole_numbers(rng, (6, 5)), whole_numbers(rng, (333, 5))
    ceiling = np.array([-np.inf, -3, 0, 2, 5, np.inf], dtype=np.float32)
    found = search(queries, labels, 10, ceiling=ceiling)
    forbidden = queries @ labels.T > ceiling[:, None]
    np.testing.assert_array_equal(found.ids, slow_search(queries, labels, 10, forbidden)[0])


def test_half_precision_and_float64_are_scored_as_float32():
    rng = np.random.default_rng(5)
    queries, labels = whole_numbers(rng, (3, 4)), whole_numbers(rng, (100, 4))
    expected = search(queries, labels, 6).ids
    for dtype in (np.float16, np.float64):
        found = search(queries.astype(dtype), labels.astype(dtype), 6)
        np.testing.assert_array_equal(found.ids, expected)
    found = search(queries, torch.tensor(labels).bfloat16(), 6)
    np.testing.assert_array_equal(found.ids, expected)


def test_inputs_stay_as_they_were():
    rng = np.random.default_rng(8)
    queries, labels = whole_numbers(rng, (5, 3)), whole_numbers(rng, (50, 3))
    before = labels.copy()
    search(queries, labels, 4, ceiling=np.zeros(5, dtype=np.float32))
    np.testing.assert_array_equal(labels, before)


def test_labels_in_ascending_order_of_score_over_several_tiles(monkeypatch):
    monkeypatch.setattr(exact, "COLUMNS", 128)
    labels = np.arange(3000, dtype=np.float32)[:, None]
    queries = np.array([[1.0], [-1.0], [0.0]], dtype=np.float32)
    found = search(queries, labels, 150)
    np.testing.assert_array_equal(found.ids[0], np.arange(2999, 2849, -1))
    np.testing.assert_array_equal(found.ids[1], np.arange(150))
    np.testing.assert_array_equal(found.ids[2], np.arange(150))


def test_rows_with_many_candidates_beside_rows_with_few(monkeypatch):
    monkeypatch.setattr(exact, "COLUMNS", 256)
    labels = np.arange(1000, dtype=np.float32)[:, None]
    found = search(np.array([[1.0], [-1.0], [0.0]], dtype=np.float32), labels, 3)
    # Every label of each later tile is above the floor of the first query, and none above that of the others.
    assert found.ids.tolist() == [[999, 998, 997], [0, 1, 2], [0, 1, 2]]
    keys = exact.make_keys(np.float32([5, 1, 4, 2, 3, 0, 6, 9]), np.arange(8))
    cut = exact.as_rows(keys.copy(), np.array([7, 0, 1]), 2)
    assert [sorted(exact.columns_of(row[row > exact.NO_KEY]).tolist()) for row in cut] == [[0, 6], [], [7]]


def test_many_equal_scores_rank_by_id(monkeypatch):
    monkeypatch.setattr(exact, "COLUMNS", 96)
    rng = np.random.default_rng(6)
    queries, labels = whole_numbers(rng, (17, 2), span=1), whole_numbers(rng, (1001, 2), span=1)
    found = search(queries, labels, 40)
    np.testing.assert_array_equal(found.ids, slow_search(queries, labels, 40)[0])


def test_rows_with_fewer_labels_than_places_beside_rows_with_many(monkeypatch):
    monkeypatch.setattr(exact, "COLUMNS", 64)
    rng = np.random.default_rng(7)
    queries, labels = whole_numbers(rng, (6, 4)), whole_numbers(rng, (500, 4))
    forbidden = np.zeros((6, 500), dtype=bool)
    forbidden[2, 3:] = True
    forbidden[3, :] = True
    forbidden[4, :480] = True
    found = search(queries, labels, 12, exclude=csr_matrix(forbidden))
    ids, scores = slow_search(queries, labels, 12, forbidden)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_array_equal(found.scores, scores)


def test_wrong_arguments_say_what_was_expected():
    queries, labels = np.ones((2, 3), dtype=np.float32), np.ones((4, 3), dtype=np.float32)
    with pytest.raises(UsageError, match="one width"):
        search(queries, labels[:, :2], 1)
    with pytest.raises(UsageError, match="1 or more"):
        search(queries, labels, 0)
    with pytest.raises(UsageError, match="queries x labels"):
        search(queries, labels, 1, exclude=csr_matrix((4, 2)))
    with pytest.raises(UsageError, match="one number per query"):
        search(queries, labels, 1, ceiling=np.zeros(3, dtype=np.float32))
    labels[2, 1] = np.nan
    with pytest.raises(ModelError, match="not a number"):
        search(queries, labels, 1)


@pytest.mark.parametrize(("num_labels", "k"), [(1, 1), (40, 60), (3_001, 7), (3_001, 900), (5_000, 20)])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("knows_queries", [False, True])
def test_one_query_at_a_time_finds_what_a_batch_finds(num_labels, k, spread, knows_queries, monkeypatch):
    """Before and after the vectors are rotated, whatever their spectrum, with a prior and with excluded pairs."""
    monkeypatch.setattr(exact, "MANY", 1_000)
    rng = np.random.default_rng(num_labels)
    scales = np.exp(-spread * np.arange(24) / 24)
    queries, labels = (rng.standard_normal((n, 24)) * scales for n in (exact.SEARCHED_PLAIN + 6, num_labels))
    labels[:, -1] = rng.standard_normal(num_labels) - 3
    queries, labels = queries.astype(np.float32), labels.astype(np.float32)
    exclude = csr_matrix(random_array((len(queries), num_labels), density=0.1, rng=1))
    index = ExactIndex(labels, sample_queries=lambda: queries[::2] if knows_queries else None)
    expected = search(queries, labels, k, exclude=exclude)
    for row, query in enumerate(queries):
        found = index.search(query[None], k, exclude=exclude[[row]])
        # Two orders of summation differ in the last bits, and may swap labels that are that close.
        np.testing.assert_allclose(found.scores[0], expected.scores[row], rtol=1e-4, atol=1e-5)
        assert (found.ids[0] == expected.ids[row]).mean() > 0.95


def test_equal_scores_of_one_query_rank_by_id(monkeypatch):
    monkeypatch.setattr(exact, "MANY", 1_000)
    rng = np.random.default_rng(3)
    labels, query = whole_numbers(rng, (3_000, 8), span=1), whole_numbers(rng, (1, 8), span=1)
    index = ExactIndex(labels)
    for _ in range(exact.SEARCHED_PLAIN + 2):
        np.testing.assert_array_equal(index.search(query, 50).ids, slow_search(query, labels, 50)[0])
