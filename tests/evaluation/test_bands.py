"""Frequency bands and deciles against a slow loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data import Split
from dexter.evaluation import report as report_module
from dexter.evaluation.page import render_page
from dexter.evaluation.report import score_report
from dexter.evaluation.tables import render_deciles
from dexter.metrics import count_labels, find_hits, inverse_propensity


def score_bands(top_ids, relevance, num_train_of_label, *, inverse_propensity=None, ks):
    hits = find_hits(top_ids, relevance)
    counts = count_labels(top_ids, hits, relevance, ks)
    bands = report_module.band_members(num_train_of_label)
    return report_module.score_groups(hits, counts, relevance, bands, inverse_propensity=inverse_propensity)


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


def slow_deciles(label_counts):
    """Fill ten groups one after the other with the labels that have training queries, most frequent first."""
    labels = sorted(np.flatnonzero(label_counts), key=lambda label: -label_counts[label])
    size, larger = divmod(len(labels), 10)
    groups = []
    for number in range(10):
        groups.append([labels.pop(0) for _ in range(size + (number < larger))])
    return groups


@pytest.mark.parametrize("num_labels", [7, 40, 57])
def test_deciles_equal_the_slow_loop(num_labels):
    rng = np.random.default_rng(num_labels)
    num_queries, ks = 60, (1, 4)
    relevance = rng.random((num_queries, num_labels)) < 0.1
    train = rng.random((80, num_labels)) < rng.choice([0.0, 0.02, 0.1, 0.5], num_labels)
    top_ids = np.argsort(-rng.random((num_queries, num_labels)), axis=1)[:, :6]
    split = Split([str(row) for row in range(num_queries)], ["x"] * num_queries, csr_matrix(relevance.astype(float)))
    report = score_report(top_ids, split, csr_matrix(train.astype(float)), ks=ks, num_resamples=0)
    weights = inverse_propensity(csr_matrix(train.astype(float)))
    label_counts = train.sum(axis=0)
    assert list(report.by_decile) == list(report.decile_sizes) == [str(number) for number in range(1, 11)]
    for number, labels in enumerate(slow_deciles(label_counts), start=1):
        members = np.isin(np.arange(num_labels), labels)
        decile, sizes = report.by_decile[str(number)], report.decile_sizes[str(number)]
        assert sizes["labels"] == len(labels)
        assert sizes["pairs"] == relevance[:, members].sum()
        assert (sizes["least"], sizes["most"]) == (
            min(label_counts[labels], default=0),
            max(label_counts[labels], default=0),
        )
        for k in ks:
            precision, recall, psp, in_decile = slow_band(top_ids, relevance, members, weights, k)
            assert sizes["queries"] == in_decile
            assert decile[f"P@{k}"] == pytest.approx(precision, abs=1e-9, nan_ok=True)
            assert decile[f"R@{k}"] == pytest.approx(recall, abs=1e-9, nan_ok=True)
            assert decile[f"PSP@{k}"] == pytest.approx(psp, abs=1e-9, nan_ok=True)


def test_deciles_break_ties_by_id_and_leave_out_labels_without_training_queries():
    members = report_module.decile_members(np.array([1] * 10 + [0] * 5 + [3] * 10))
    assert [np.flatnonzero(members[str(number)]).tolist() for number in (1, 5, 6, 10)] == [
        [15, 16],
        [23, 24],
        [0, 1],
        [8, 9],
    ]
    assert not any(decile[10:15].any() for decile in members.values())


def test_the_decile_table_has_a_row_per_decile_with_its_range():
    rng = np.random.default_rng(0)
    train = csr_matrix((rng.random((60, 20)) < np.linspace(0.6, 0.05, 20)).astype(float))
    split = Split([str(row) for row in range(60)], ["x"] * 60, train)
    report = score_report(np.argsort(-rng.random((60, 20)), axis=1)[:, :5], split, train, num_resamples=0)
    lines = render_deciles({"run": report}).splitlines()
    assert lines[2].startswith("run") and len(lines) == 14
    sizes = report.decile_sizes["1"]
    assert lines[3].split()[:3] == ["decile", "1", f"({sizes['least']}-{sizes['most']})"]
    assert lines[3].split()[4] == f"{report.by_decile['1']['P@1']:.2f}"
    assert "By decile" in render_page({"run": report}) and "decile 10" in render_page({"run": report})
