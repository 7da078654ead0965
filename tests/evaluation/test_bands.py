"""Frequency bands against a slow loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.evaluation import report as report_module
from dexter.metrics import count_labels, find_hits


def score_bands(top_ids, relevance, num_train_of_label, *, inverse_propensity=None, ks):
    hits = find_hits(top_ids, relevance)
    counts = count_labels(top_ids, hits, relevance, ks)
    return report_module.score_bands(hits, counts, relevance, num_train_of_label, inverse_propensity=inverse_propensity)


def slow_band(top_ids, relevance, members, weights, k):
    """P, R and PSP at k over the queries with a relevant label among the members."""
    precision, recall, weight, best = [], [], 0.0, 0.0
    for row, ranking in enumerate(top_ids):
        relevant = {label for label in np.flatnonzero(relevance[row]) if members[label]}
        if not relevant:
            continue
        hits = [label for label in ranking[:k] if label in relevant]
        precision.append(len(hits) / k)
        recall.append(len(hits) / len(relevant))
        weight += sum(weights[label] for label in hits)
        best += sum(sorted((weights[label] for label in relevant), reverse=True)[:k])
    if not precision:
        return math.nan, math.nan, math.nan, 0
    return 100 * np.mean(precision), 100 * np.mean(recall), 100 * weight / best, len(precision)


@pytest.mark.parametrize("seed", range(20))
def test_bands_equal_the_slow_loop(seed):
    rng = np.random.default_rng(seed)
    num_labels = 40
    relevance = rng.random((25, num_labels)) < 0.1
    top_ids = np.argsort(-rng.random((25, num_labels)), axis=1)[:, :6]
    label_counts = rng.choice([0, 1, 9, 10, 100, 101, 5000], num_labels)
    weights = rng.uniform(1, 9, num_labels)
    bands, sizes = score_bands(
        top_ids, csr_matrix(relevance.astype(float)), label_counts, inverse_propensity=weights, ks=(1, 4)
    )
    limits = {"frequent": (101, 10**9), "torso": (10, 100), "tail": (1, 9), "unseen": (0, 0)}
    assert list(bands) == list(limits)
    for name, (low, high) in limits.items():
        members = (label_counts >= low) & (label_counts <= high)
        band = bands[name]
        assert sizes[name]["labels"] == members.sum()
        assert sizes[name]["pairs"] == relevance[:, members].sum()
        for k in (1, 4):
            precision, recall, psp, num_queries = slow_band(top_ids, relevance, members, weights, k)
            assert sizes[name]["queries"] == num_queries
            assert band[f"P@{k}"] == pytest.approx(precision, abs=1e-9, nan_ok=True)
            assert band[f"R@{k}"] == pytest.approx(recall, abs=1e-9, nan_ok=True)
            assert band[f"PSP@{k}"] == pytest.approx(psp, abs=1e-9, nan_ok=True)


def test_macro_metrics_of_a_band_average_over_its_labels_but_count_all_queries():
    relevance = csr_matrix(np.array([[1, 0, 0], [0, 1, 0]]))
    top_ids = np.array([[0], [0]])  # label 0 is predicted for query 1 too, which has no tail label: a false positive
    bands, _ = score_bands(top_ids, relevance, np.array([5, 200, 0]), ks=(1,))
    assert bands["tail"]["F1@1"] == pytest.approx(100 * 2 / 3)
    assert bands["tail"]["Coverage@1"] == 100.0
    assert bands["frequent"]["F1@1"] == 0.0


def test_a_band_without_queries_has_its_keys_and_no_value():
    bands, sizes = score_bands(np.array([[0]]), csr_matrix(np.array([[1, 0]])), np.array([500, 3]), ks=(1,))
    assert sizes["tail"] == {"labels": 1, "queries": 0, "pairs": 0}
    assert all(math.isnan(value) for value in bands["tail"].values())
    assert bands["tail"].keys() == bands["frequent"].keys()
