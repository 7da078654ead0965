"""Metrics against a slow loop over the definitions, and against napkinxc where the definitions coincide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.errors import DataError, UsageError
from dexter.metrics import (
    PROPENSITY,
    find_hits,
    inverse_propensity,
    overfetch,
    per_query,
    relevant_pairs,
    remove_filtered,
    score,
)
from dexter.metrics import hits as hits_module


def random_case(seed: int, *, rows_without_labels: bool = True, short_rows: bool = True):
    """A small random problem: rankings, relevance with graded weights, training relevance, cut-offs."""
    rng = np.random.default_rng(seed)
    num_queries, num_labels = int(rng.integers(1, 30)), int(rng.integers(5, 60))
    num_places = int(rng.integers(1, min(num_labels, 14)))
    relevance = (rng.random((num_queries, num_labels)) < rng.uniform(0.02, 0.4)) * rng.uniform(0.1, 3.0)
    train = (rng.random((int(rng.integers(3, 50)), num_labels)) < rng.uniform(0.01, 0.3)).astype(float)
    if not rows_without_labels:
        relevance[np.arange(num_queries), rng.integers(0, num_labels, num_queries)] = 1.0
    scores = rng.random((num_queries, num_labels)) + 0.5 * (relevance > 0) * (rng.random(relevance.shape) < 0.5)
    top_ids = np.argsort(-scores, axis=1)[:, :num_places].astype(rng.choice([np.int32, np.int64]))
    if short_rows:
        length = rng.integers(0, num_places + 1, num_queries)
        missing = rng.choice([-1, -7, num_labels, num_labels + 3])
        top_ids[np.arange(num_places)[None] >= length[:, None]] = missing
    ks = sorted({int(k) for k in rng.integers(1, num_places + 4, 3)})
    return top_ids, csr_matrix(relevance), csr_matrix(train), ks


def slow_inverse_propensity(train, a, b):
    num_queries, num_labels = train.shape
    scale = max(math.log(num_queries) - 1, 0) * (b + 1) ** a
    return [1 + scale * (int((train[:, label] > 0).sum()) + b) ** -a for label in range(num_labels)]


def slow_score(top_ids, relevance, train, ks, propensity):
    """Every definition of docs/metrics.md, spelled out query by query."""
    relevance, train = relevance.toarray(), train.toarray()
    weight = slow_inverse_propensity(train, *propensity)
    num_queries, num_labels = relevance.shape
    truth = [{label for label in range(num_labels) if relevance[query, label] > 0} for query in range(num_queries)]
    ranking = [[int(label) if 0 <= label < num_labels else None for label in row] for row in top_ids]
    result = {}
    for k in ks:
        precision, recall, ndcg, mrr, psp, best_psp, psndcg, best_psndcg = [], [], [], [], 0.0, 0.0, 0.0, 0.0
        hit_labels, predicted, counted = set(), [0] * num_labels, [0] * num_labels
        for query in range(num_queries):
            top, relevant = ranking[query][:k], truth[query]
            hit_ranks = [rank for rank, label in enumerate(top, start=1) if label in relevant]
            for label in top:
                if label is not None:
                    predicted[label] += 1
                if label in relevant:
                    hit_labels.add(label)
                    counted[label] += 1
                    psp += weight[label] / k
            precision.append(len(hit_ranks) / k)
            if not relevant:
                continue
            ideal = sum(1 / math.log2(rank + 1) for rank in range(1, min(k, len(relevant)) + 1))
            recall.append(len(hit_ranks) / len(relevant))
            ndcg.append(sum(1 / math.log2(rank + 1) for rank in hit_ranks) / ideal)
            mrr.append(1 / hit_ranks[0] if hit_ranks else 0.0)
            best = sorted((weight[label] for label in relevant), reverse=True)[:k]
            best_psp += sum(best) / k
            psndcg += sum(weight[top[rank - 1]] / math.log2(rank + 1) for rank in hit_ranks) / ideal
            best_psndcg += sum(value / math.log2(rank + 1) for rank, value in enumerate(best, start=1)) / ideal
        used = set().union(*truth)
        f1 = [2 * counted[label] / (predicted[label] + sum(label in relevant for relevant in truth)) for label in used]
        mean = lambda values: 100 * sum(values) / len(values) if values else math.nan  # noqa: E731
        result |= {
            f"P@{k}": mean(precision),
            f"R@{k}": mean(recall),
            f"nDCG@{k}": mean(ndcg),
            f"MRR@{k}": mean(mrr),
            f"PSP@{k}": 100 * psp / best_psp if best_psp else math.nan,
            f"PSnDCG@{k}": 100 * psndcg / best_psndcg if best_psndcg else math.nan,
            f"Coverage@{k}": 100 * len(hit_labels) / len(used) if used else math.nan,
            f"F1@{k}": mean(f1),
        }
    return result


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
def test_score_equals_the_slow_loop(first_seed):
    for seed in range(first_seed, first_seed + 50):
        top_ids, relevance, train, ks = random_case(seed, rows_without_labels=seed % 2 == 0)
        propensity = list(PROPENSITY.values())[seed % 3]
        expected = slow_score(top_ids, relevance, train, ks, propensity)
        got = score(top_ids, relevance, train, ks, propensity)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, abs=1e-9, nan_ok=True), (seed, name)


def as_rankings(top_ids, num_labels):
    return [[int(label) for label in row if 0 <= label < num_labels] for row in top_ids]


@pytest.mark.parametrize("first_seed", range(1000, 1300, 100))
def test_score_equals_napkinxc(first_seed):
    napkin = pytest.importorskip("napkinxc.metrics")
    for seed in range(first_seed, first_seed + 100):
        top_ids, relevance, train, _ = random_case(seed, rows_without_labels=False, short_rows=seed % 2 == 0)
        num_labels = relevance.shape[1]
        truth = [list(map(int, relevance[row].indices)) for row in range(relevance.shape[0])]
        rankings = as_rankings(top_ids, num_labels)
        weights = napkin.Jain_et_al_inverse_propensity(train, 0.55, 1.5)
        np.testing.assert_allclose(inverse_propensity(train), weights, rtol=0, atol=1e-9)
        theirs = {
            "P": napkin.precision_at_k(truth, rankings, k=9),
            "R": napkin.recall_at_k(truth, rankings, k=9),
            "nDCG": napkin.ndcg_at_k(truth, rankings, k=9),
            "PSP": napkin.psprecision_at_k(truth, rankings, weights, k=9),
            "PSnDCG": napkin.psndcg_at_k(truth, rankings, weights, k=9),
            "Coverage": napkin.coverage_at_k(truth, rankings, k=9),
        }
        ours = score(top_ids, relevance, train, ks=range(1, 10))
        for name, values in theirs.items():
            for k, value in enumerate(values, start=1):
                assert ours[f"{name}@{k}"] == pytest.approx(100 * value, abs=1e-9), (seed, name, k)


def test_macro_f1_equals_napkinxc_where_every_label_is_relevant_somewhere():
    napkin = pytest.importorskip("napkinxc.metrics")
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_labels = int(rng.integers(8, 30))
        relevance = rng.random((80, num_labels)) < 0.2
        relevance[:num_labels] |= np.eye(num_labels, dtype=bool)
        top_ids = np.argsort(-rng.random(relevance.shape), axis=1)[:, :5]
        truth = [list(map(int, np.flatnonzero(row))) for row in relevance]
        theirs = napkin.macro_f1_measure_at_k(truth, as_rankings(top_ids, num_labels), k=5)
        ours = score(top_ids, csr_matrix(relevance.astype(float)), None, ks=range(1, 6))
        np.testing.assert_allclose([ours[f"F1@{k}"] for k in range(1, 6)], 100 * theirs, rtol=0, atol=1e-9)


def test_queries_without_labels_count_in_precision_only():
    relevance = csr_matrix(np.array([[1, 0, 0], [0, 0, 0]]))
    train = csr_matrix(np.ones((20, 3)))
    result = score(np.array([[0, 1], [1, 2]]), relevance, train, ks=(1,))
    assert result["P@1"] == 50.0
    assert result["R@1"] == result["nDCG@1"] == result["MRR@1"] == result["PSP@1"] == 100.0


def test_nothing_to_score_is_nan():
    result = score(np.array([[0], [1]]), csr_matrix((2, 3)), csr_matrix(np.ones((9, 3))), ks=(1,))
    assert result["P@1"] == 0.0
    assert all(math.isnan(value) for name, value in result.items() if name != "P@1")
    assert math.isnan(score(np.zeros((0, 1), dtype=int), csr_matrix((0, 3)), None, ks=(1,))["P@1"])


def test_missing_predictions_are_misses_wherever_they_stand():
    relevance = csr_matrix(np.array([[1, 1, 0, 0]]))
    gap = score(np.array([[-1, 0, -1, 1]]), relevance, None, ks=(1, 2, 4, 8))
    assert (gap["P@1"], gap["P@2"], gap["P@4"], gap["P@8"]) == (0.0, 50.0, 50.0, 25.0)
    assert gap["MRR@4"] == 50.0
    assert score(np.zeros((1, 0), dtype=int), relevance, None, ks=(1,))["P@1"] == 0.0


def test_without_training_relevance_there_is_no_propensity_metric():
    names = score(np.array([[0]]), csr_matrix(np.ones((1, 2))), None, ks=(1,)).keys()
    assert names == {"P@1", "R@1", "nDCG@1", "MRR@1", "Coverage@1", "F1@1"}


def test_the_order_of_a_ranking_is_taken_as_it_is_and_extra_places_are_ignored():
    relevance = csr_matrix(np.array([[0, 0, 1, 0]]))
    assert score(np.array([[1, 2, 3, 0]]), relevance, None, ks=(1, 2)) == score(
        np.array([[1, 2]]), relevance, None, ks=(2, 1, 1)
    )


def test_the_last_label_of_a_row_and_the_first_of_the_next_are_not_confused():
    relevance = csr_matrix(np.array([[0, 0, 1], [1, 0, 0]]))
    top_ids = np.array(
        [[3, 2], [-1, 0]]
    )  # 3 in row 0 would be the key of label 0 in row 1, -1 in row 1 of label 2 in row 0
    hits = find_hits(top_ids, relevance)
    assert hits.queries.tolist() == [0, 1]
    assert hits.ranks.tolist() == [1, 1]
    assert hits.labels.tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_of_ids_gives_the_same(dtype):
    top_ids, relevance, train, ks = random_case(8, short_rows=False)
    assert score(top_ids.astype(dtype), relevance, train, ks) == score(top_ids, relevance, train, ks)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_the_block_size_changes_nothing(block, monkeypatch):
    top_ids, relevance, train, ks = random_case(5)
    expected = score(top_ids, relevance, train, ks)
    monkeypatch.setattr(hits_module, "_BLOCK_PREDICTIONS", block)
    assert score(top_ids, relevance, train, ks) == expected


def test_unsorted_repeated_zero_and_negative_entries_mean_what_they_say():
    messy = csr_matrix(
        (np.array([1.0, 0.0, 2.0, -1.0, 0.5]), np.array([3, 1, 0, 2, 3]), np.array([0, 5])), shape=(1, 4)
    )
    before = messy.indices.copy()
    assert relevant_pairs(messy).indices.tolist() == [0, 3]
    assert score(np.array([[3, 1, 2]]), messy, None, ks=(1,))["R@1"] == 50.0
    np.testing.assert_array_equal(messy.indices, before)


def test_per_query_sums_to_score():
    top_ids, relevance, train, ks = random_case(11)
    whole = score(top_ids, relevance, train, ks)
    parts = per_query(top_ids, relevance, inverse_propensity(train), ks)
    assert {name: ratio.value for name, ratio in parts.items()} == {name: whole[name] for name in parts}
    assert all(ratio.numerator.shape == ratio.denominator.shape == (len(top_ids),) for ratio in parts.values())


def test_propensity_of_tiny_training_sets_is_never_below_one():
    for num_queries in (1, 2, 3):
        assert (inverse_propensity(csr_matrix((num_queries, 4))) >= 1.0).all()
    with pytest.raises(DataError, match="no training queries"):
        inverse_propensity(csr_matrix((0, 4)))
    with pytest.raises(UsageError, match="b above zero"):
        inverse_propensity(csr_matrix((3, 4)), 0.55, 0.0)


@pytest.mark.parametrize(
    ("top_ids", "ks", "error"),
    [
        (np.array([0, 1]), (1,), "shape"),
        (np.array([[0.0], [1.0]]), (1,), "float64"),
        (np.array([[0]]), (1,), "1 rows of predictions for 2"),
        (np.array([[0, 0], [1, 2]]), (2,), "label 0 more than once"),
        (np.array([[0], [1]]), (), "cut-offs"),
        (np.array([[0], [1]]), (0,), "cut-offs"),
        (np.array([[0], [1]]), (1.5,), "cut-offs"),
    ],
)
def test_wrong_input_is_named(top_ids, ks, error):
    with pytest.raises((DataError, UsageError), match=error):
        score(top_ids, csr_matrix(np.eye(2, 3)), None, ks=ks)


def test_training_relevance_must_have_the_same_labels():
    with pytest.raises(DataError, match="3 labels, training relevance 4"):
        score(np.array([[0], [1]]), csr_matrix(np.eye(2, 3)), csr_matrix((5, 4)))


def slow_remove(ids, scores, filtered, k):
    kept_ids, kept_scores = [], []
    for row in range(len(ids)):
        pairs = [(i, s) for i, s in zip(ids[row], scores[row], strict=True) if i < 0 or not filtered[row, i]]
        pairs = (pairs + [(-1, -np.inf)] * k)[:k]
        kept_ids.append([i for i, _ in pairs])
        kept_scores.append([s for _, s in pairs])
    return np.array(kept_ids), np.array(kept_scores)


def test_filter_pairs_are_removed_and_the_gap_is_closed():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        num_queries, num_labels, places = int(rng.integers(1, 12)), 15, int(rng.integers(1, 12))
        scores = rng.random((num_queries, num_labels))
        ids = np.argsort(-scores, axis=1)[:, :places]
        scores = np.take_along_axis(scores, ids, axis=1)
        filtered = rng.random((num_queries, num_labels)) < 0.2
        k = int(rng.integers(1, 14))
        got = remove_filtered(ids, scores, csr_matrix(filtered.astype(float)), k)
        expected_ids, expected_scores = slow_remove(ids, scores, filtered, k)
        np.testing.assert_array_equal(got.ids, expected_ids)
        np.testing.assert_array_equal(got.scores, expected_scores)


def test_overfetch_is_enough_and_just_enough():
    filtered = csr_matrix(np.array([[1, 1, 0, 0, 0], [0, 0, 0, 0, 1]]))
    assert overfetch(filtered) == 2
    assert overfetch(None) == overfetch(csr_matrix((2, 5))) == 0
    ranking = np.array([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    fetched = ranking[:, : 2 + overfetch(filtered)]
    assert remove_filtered(fetched, -fetched, filtered, 2).ids.tolist() == [[2, 3], [0, 1]]
    short = remove_filtered(ranking[:, :3], -ranking[:, :3], filtered, 2)
    assert short.ids.tolist() == [[2, -1], [0, 1]]
    assert short.scores[0, 1] == -np.inf


def test_without_filter_pairs_the_first_places_are_copied():
    ids = np.array([[4, 2, 0]], dtype=np.int32)
    scores = np.array([[3.0, 2.0, -1.0]], dtype=np.float32)
    kept = remove_filtered(ids, scores, None, 2)
    assert (kept.ids.tolist(), kept.scores.tolist()) == ([[4, 2]], [[3.0, 2.0]])
    assert (kept.ids.dtype, kept.scores.dtype) == (np.int32, np.float32)
    assert not np.shares_memory(kept.ids, ids)
    with pytest.raises(DataError, match="must agree"):
        remove_filtered(ids, scores[:, :2], None, 2)
