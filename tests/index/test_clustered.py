"""Search among clusters: reading all equals exact search; what is read otherwise; the recall stated; what is stored."""

import numpy as np
import pytest

from dexter.encoders.head_arrays import unit_rows
from dexter.errors import ModelError
from dexter.index import clustered, search
from dexter.index.clustered import ClusteredIndex


def unit_vectors(count, dimension=13, seed=0):
    """Vectors of length one around a few directions, rounded to half precision; every seventh is there twice."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((9, dimension))[rng.integers(0, 9, count)] + 0.5 * rng.standard_normal(
        (count, dimension)
    )
    vectors[::7] = vectors[len(vectors[::7]) - 1]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float16).astype(np.float32)


@pytest.fixture
def vectors():
    return unit_vectors(1_003)


@pytest.mark.parametrize("k", [1, 20, 1_003, 1_500])
def test_reading_every_cluster_equals_exact_search(vectors, monkeypatch, k):
    monkeypatch.setattr(clustered, "TARGET_RECALL", 1.0)
    monkeypatch.setattr(clustered, "_READ_PER_PLACE", 1_003)
    queries = unit_vectors(17, seed=1)
    found, exact = ClusteredIndex.of(vectors).search(queries, k), search(queries, vectors, k)
    np.testing.assert_allclose(found.scores, exact.scores, atol=1e-6)
    ties = (found.scores[:, 1:] == found.scores[:, :-1]) & (found.ids[:, 1:] >= 0)
    assert (np.diff(found.ids, axis=1)[ties] > 0).all()
    assert k == 1 or ties.any()
    assert (found.ids >= 0).sum(axis=1).tolist() == [min(k, 1_003)] * 17


def test_a_query_has_the_same_neighbours_alone_and_among_others(vectors):
    made, queries = ClusteredIndex.of(vectors), unit_vectors(33, seed=2)
    together = made.search(queries, 5)
    for row in range(33):
        alone = made.search(queries[[row]], 5)
        np.testing.assert_array_equal(alone.ids, together.ids[[row]])
        np.testing.assert_allclose(alone.scores, together.scores[[row]], atol=1e-6)


def test_the_nearest_clusters_are_read_until_enough_vectors_were(vectors, monkeypatch):
    monkeypatch.setattr(clustered, "_READ_PER_PLACE", 1)
    made = ClusteredIndex.of(vectors)
    for query in unit_vectors(11, seed=3):
        order, read = np.argsort(-(made.centroids_CD @ query), kind="stable"), []
        for cluster in order:
            if len(read) < max(made.num_read, 20):
                read += made.rows_M[made.starts[cluster] : made.starts[cluster + 1]].tolist()
        expected = sorted(read, key=lambda row: (-np.float32(vectors[row] @ query), row))[:20]
        found = made.search(query[None], 20)
        np.testing.assert_allclose(found.scores[0], vectors[expected] @ query, atol=1e-6)
        assert set(found.ids[0].tolist()) <= set(read)
    assert made.num_read < len(vectors)


def test_recall_is_what_it_says(vectors, monkeypatch):
    monkeypatch.setattr(clustered, "_READ_PER_PLACE", 1)
    monkeypatch.setattr(clustered, "TARGET_RECALL", 0.8)
    monkeypatch.setattr(clustered, "_SAMPLED", 2_000)
    made = ClusteredIndex.of(vectors)
    exact = search(vectors, vectors, 21)
    found = made.search(vectors, 21)
    slow = np.mean([len(set(a) & set(b[1:])) / 20 for a, b in zip(found.ids, exact.ids, strict=True)])
    assert 0.8 <= made.recall < 1.0
    assert abs(slow - made.recall) < 0.05  # ties at the last place, and itself in place of a neighbour


def test_stored_arrays_make_the_same(vectors):
    made, queries = ClusteredIndex.of(vectors), unit_vectors(9, seed=4)
    again = ClusteredIndex.from_arrays(made.to_arrays())
    assert again.stored_MD.dtype == np.float16
    for _ in range(2):  # widened when first read
        found, expected = again.search(queries, 7), made.search(queries, 7)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(again.vectors_LD, vectors)
    np.testing.assert_array_equal(again.vectors(np.array([1_002, 0, 5])), vectors[[1_002, 0, 5]])
    assert (again.recall, again.num_read) == (made.recall, made.num_read)


FORGERIES = {
    "a row twice": lambda a: {"cluster_rows": np.where(a["cluster_rows"] == 3, 4, a["cluster_rows"])},
    "a row beyond the last": lambda a: {"cluster_rows": a["cluster_rows"] + 1},
    "an end beyond the last": lambda a: {"cluster_ends": a["cluster_ends"] + 1},
    "ends out of order": lambda a: {"cluster_ends": a["cluster_ends"][[1, 0, *range(2, len(a["cluster_ends"]))]]},
    "another width": lambda a: {"cluster_centroids": a["cluster_centroids"][:, :5]},
    "fewer vectors": lambda a: {"cluster_vectors": a["cluster_vectors"][:-1]},
    "two numbers": lambda a: {"cluster_read": np.array([3, 4])},
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_arrays_that_do_not_fit_are_refused(vectors, kind):
    arrays = ClusteredIndex.of(vectors).to_arrays()
    with pytest.raises(ValueError):
        ClusteredIndex.from_arrays(arrays | FORGERIES[kind](arrays))


def test_equal_vectors_make_one_cluster():
    made = ClusteredIndex.of(np.tile(unit_vectors(1), (100, 1)))
    assert made.search(unit_vectors(1), 4).ids.tolist() == [[0, 1, 2, 3]]


def test_queries_without_a_direction(vectors):
    made = ClusteredIndex.of(vectors)
    assert not made.search(np.zeros((1, 13), np.float32), 3).scores.any()
    with pytest.raises(ModelError, match="not a number"):
        made.search(np.full((1, 13), np.nan, np.float32), 3)


def test_clusters_are_worthwhile_where_vectors_lie_together():
    generator = np.random.default_rng(0)
    scattered = unit_rows(generator.standard_normal((5_000, 64), dtype=np.float32))
    together = unit_rows(scattered[generator.integers(0, 60, 5_000)] + 0.3 * scattered)
    assert ClusteredIndex.are_worthwhile(together)
    assert not ClusteredIndex.are_worthwhile(scattered)
    assert not ClusteredIndex.are_worthwhile(together[:4_000]), "few vectors are soon compared"
