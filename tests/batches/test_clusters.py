"""Balanced clusters: sizes, coverage, determinism, and that they find what is there."""

import numpy as np
import pytest

import dexter.batches.clusters as clusters
from dexter.batches.clusters import balanced_clusters
from dexter.errors import UsageError


def unit_vectors(num_points, dimensions, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((num_points, dimensions)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("num_points", "leaf_size", "num_leaves"),
    [(1000, 1000, 1), (1000, 999, 2), (1003, 100, 16), (257, 7, 64), (64, 1, 64), (5, 64, 1), (3001, 400, 8)],
)
def test_leaves_cover_all_points_once_with_sizes_equal_within_one(num_points, leaf_size, num_leaves):
    leaves = balanced_clusters(unit_vectors(num_points, 5), leaf_size, seed=1)
    sizes = [len(leaf) for leaf in leaves]
    assert len(leaves) == num_leaves
    assert max(sizes) <= leaf_size
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(leaves)), np.arange(num_points))


def test_every_small_size_is_balanced_and_none_is_empty():
    for num_points in range(1, 40):
        for leaf_size in range(1, 9):
            sizes = [len(leaf) for leaf in balanced_clusters(unit_vectors(num_points, 3), leaf_size, seed=0)]
            assert sum(sizes) == num_points
            assert 1 <= min(sizes) <= max(sizes) <= min(leaf_size, min(sizes) + 1)


def test_no_points_have_no_clusters():
    assert balanced_clusters(np.empty((0, 4), dtype=np.float32), 8, seed=0) == []


def test_separate_groups_are_found():
    centres = np.eye(8, dtype=np.float32)[np.arange(1024) % 8]
    vectors = centres + 0.05 * np.random.default_rng(0).standard_normal((1024, 8)).astype(np.float32)
    for leaf in balanced_clusters(vectors, 128, seed=3):
        assert len(set(leaf % 8)) == 1


def test_clusters_are_tighter_than_chance_when_centroids_see_a_sample(monkeypatch):
    monkeypatch.setattr(clusters, "CENTROID_POINTS", 64)
    monkeypatch.setattr(clusters, "BLOCK_BYTES", 10_000)
    vectors = unit_vectors(4000, 8)
    tightness = [np.linalg.norm(vectors[leaf].mean(axis=0)) for leaf in balanced_clusters(vectors, 64, seed=0)]
    by_chance = [np.linalg.norm(vectors[start : start + 62].mean(axis=0)) for start in range(0, 3968, 62)]
    assert np.mean(tightness) > 4 * np.mean(by_chance)


def test_the_seed_decides():
    vectors = unit_vectors(500, 6)
    first, again, other = (balanced_clusters(vectors, 40, seed=seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_equal_points_are_split_all_the_same():
    sizes = [len(leaf) for leaf in balanced_clusters(np.ones((100, 4), dtype=np.float32), 10, seed=0)]
    assert sorted(set(sizes)) == [6, 7]


def test_wrong_arguments_say_what_was_expected():
    with pytest.raises(UsageError, match="1 or more"):
        balanced_clusters(np.ones((4, 2)), 0, seed=0)
    with pytest.raises(UsageError, match="one vector per point"):
        balanced_clusters(np.ones(4), 1, seed=0)
