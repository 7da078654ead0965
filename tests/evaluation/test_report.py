"""Reports and comparisons from predictions, and their tables."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data import Split
from dexter.errors import DataError, UsageError
from dexter.evaluation.baselines import popularity
from dexter.evaluation.report import compare, score_report
from dexter.evaluation.tables import render_comparison, render_table
from dexter.metrics import overfetch, score


@pytest.fixture(scope="module")
def rankings(tiny_dataset):
    rng = np.random.default_rng(4)
    noise = rng.random(tiny_dataset.test.relevance.shape)
    better = np.argsort(-(tiny_dataset.test.relevance.toarray() + 1.5 * noise), axis=1)[:, :8]
    return popularity(tiny_dataset, 8).ids, better


def test_a_report_holds_the_scores_and_what_they_come_from(tiny_dataset, rankings):
    report = score_report(rankings[1], tiny_dataset.test, tiny_dataset.train.relevance, ks=(1, 5), num_resamples=50)
    assert report.metrics == score(rankings[1], tiny_dataset.test.relevance, tiny_dataset.train.relevance, ks=(1, 5))
    assert set(report.by_frequency) == set(report.band_sizes) == {"frequent", "torso", "tail", "unseen"}
    assert "P@1" in report.by_frequency["tail"]
    assert report.num_queries == 40
    assert report.num_without_labels == int((np.diff(tiny_dataset.test.relevance.indptr) == 0).sum()) >= 1
    assert report.num_short == 0
    assert report.intervals["P@1"].low <= report.metrics["P@1"] <= report.intervals["P@1"].high
    assert report.settings["propensity"] == {"a": 0.55, "b": 1.5, "num_train": 300}
    assert sum(size["pairs"] for size in report.band_sizes.values()) == tiny_dataset.test.relevance.nnz
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.num_queries = 1


def test_a_report_without_resamples_has_no_intervals(tiny_dataset, rankings):
    report = score_report(rankings[0], tiny_dataset.test, tiny_dataset.train.relevance, num_resamples=0)
    assert report.intervals == {}


def filtered_split():
    relevance = csr_matrix(np.array([[0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], dtype=float))
    filtered = csr_matrix(np.array([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]], dtype=float))
    return Split(["a", "b"], ["a", "b"], relevance, filtered)


def test_filter_pairs_are_removed_before_scoring():
    split, train = filtered_split(), csr_matrix(np.ones((30, 6)))
    ranking = np.array([[0, 1, 2, 3], [5, 0, 1, 2]])
    report = score_report(ranking, split, train, ks=(1,), num_resamples=0)
    assert report.metrics["P@1"] == 100.0
    assert report.settings["num_predictions_removed"] == 3
    assert report.settings["num_filter_pairs"] == 3
    assert score(ranking, split.relevance, train, ks=(1,))["P@1"] == 0.0


def test_a_ranking_fetched_without_slack_is_refused():
    split, train = filtered_split(), csr_matrix(np.ones((30, 6)))
    ranking = np.array([[0, 1, 2, 3, 4], [5, 0, 1, 2, 3]])
    with pytest.raises(UsageError, match=r"1 queries have fewer than 2 predictions .* fetch 4 places"):
        score_report(ranking[:, :3], split, train, ks=(1, 2))
    assert 2 + overfetch(split.filtered) == 4
    assert score_report(ranking[:, :4], split, train, ks=(1, 2), num_resamples=0).num_short == 0


def test_rankings_that_are_already_filtered_need_no_slack():
    report = score_report(np.array([[2, 3], [0, 1]]), filtered_split(), csr_matrix(np.ones((30, 6))), ks=(2,))
    assert report.settings["num_predictions_removed"] == 0
    assert report.num_short == 0


def test_a_filter_that_leaves_fewer_labels_than_k_is_no_error():
    report = score_report(np.array([[0, 1, 2, 3, 4, 5]] * 2), filtered_split(), csr_matrix(np.ones((30, 6))), ks=(5,))
    assert report.num_short == 1


def test_reports_need_the_same_labels(tiny_dataset, rankings):
    with pytest.raises(DataError, match="same labels"):
        score_report(rankings[0], tiny_dataset.test, csr_matrix((5, 3)))


def test_the_table_has_a_row_per_system_and_band(tiny_dataset, rankings):
    reports = {
        name: score_report(ids, tiny_dataset.test, tiny_dataset.train.relevance, num_resamples=0)
        for name, ids in zip(("popular", "better\x1b[2J"), rankings, strict=True)
    }
    lines = render_table(reports).splitlines()
    assert lines[0].split() == ["queries", "P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@5", "R@5"]
    assert [line.split("  ")[0] for line in lines[2:] if not line.startswith(" ")][:2] == ["popular", r"better\x1b[2J"]
    assert sum(line.startswith("  torso (10-100)") for line in lines) == 2
    assert not any("unseen" in line for line in lines)
    assert f"{reports['popular'].metrics['P@1']:.2f}" in lines[2]
    assert any("without labels are left out" in line for line in lines)
    assert "\x1b" not in render_table(reports)
    with pytest.raises(UsageError, match="has no P@7"):
        render_table(reports, columns=("P@7",))


def test_the_table_shows_a_dash_for_what_is_not_defined():
    report = score_report(
        np.array([[0]]), Split(["a"], ["a"], csr_matrix((1, 2))), csr_matrix(np.ones((9, 2))), ks=(1,)
    )
    assert math.isnan(report.metrics["R@1"])
    assert render_table({"empty": report}, columns=("P@1", "R@1")).splitlines()[2].split() == [
        "empty",
        "1",
        "0.00",
        "-",
    ]


def test_comparison_is_after_minus_before(tiny_dataset, rankings):
    comparison = compare(*rankings, tiny_dataset.test, tiny_dataset.train.relevance, ks=(1, 5), num_resamples=100)
    for name, difference in comparison.differences.items():
        assert difference.value == pytest.approx(comparison.after[name] - comparison.before[name])
    table = render_comparison(comparison, ("popular", "better"))
    assert "PSP@5" in table
    assert "95% intervals from 100 paired resamples" in table
    same = compare(rankings[0], rankings[0], tiny_dataset.test, tiny_dataset.train.relevance, num_resamples=20)
    assert not any(difference.excludes_zero for difference in same.differences.values())
