"""Label pools against set arithmetic, draws against their probabilities, and the correction by simulation."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix, random_array

from dexter.batches.pool import (
    all_labels,
    draw_positives,
    expected_label_counts,
    in_batch,
    log_inclusion_probability,
    sampled,
    with_extra_positives,
    without_pairs,
)
from dexter.errors import UsageError

NUM_QUERIES, NUM_LABELS = 41, 97
ROWS = np.array([40, 3, 17, 8, 22, 5, 31])


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def relevance():
    matrix = csr_matrix(random_array((NUM_QUERIES, NUM_LABELS), density=0.08, rng=5), dtype=np.float32)
    dense = (matrix.toarray() > 0).astype(np.float32)
    dense[8] = 0  # a query of the batch without positives
    dense[40, 96] = 1  # the last query and the last label
    matrix = csr_matrix(dense)
    for array in (matrix.data, matrix.indices, matrix.indptr):
        array.setflags(write=False)
    return matrix


def relevant(relevance, rows=ROWS):
    return {(place, int(label)) for place, row in enumerate(rows) for label in relevance[[row]].indices}


def pairs(positives, labels):
    columns = positives.columns.numpy()
    ids = columns if labels is None else labels[columns]
    return set(zip(positives.rows.tolist(), ids.tolist(), strict=True))


def check_pool(pool):
    assert pool.num_labels == len(pool.labels)
    assert (np.diff(pool.labels) > 0).all()
    assert pool.labels.dtype == np.int64


def test_all_labels_have_every_positive(relevance):
    pool = all_labels(relevance, ROWS)
    assert pool.labels is None
    assert pool.num_labels == NUM_LABELS
    assert pool.ignore is None
    assert pool.positives.weights is None
    assert pairs(pool.positives, None) == relevant(relevance)


@pytest.mark.parametrize("count", [1, 3, 50])
@pytest.mark.parametrize("kind", ["all", "in-batch", "sampled"])
def test_drawn_positives_count_and_the_others_are_ignored_or_negative(relevance, rng, kind, count):
    hard = np.tile(relevance[[3]].indices[:2], (len(ROWS), 1))
    pool = {
        "all": lambda: all_labels(relevance, ROWS),
        "in-batch": lambda: in_batch(relevance, ROWS, rng=rng, num_random=20),
        "sampled": lambda: sampled(relevance, ROWS, hard, rng=rng, max_positives=2),
    }[kind]()
    all_pairs = pairs(pool.positives, pool.labels)
    chosen = draw_positives(pool, count, rng=np.random.default_rng(1))
    drawn, rest = pairs(chosen.positives, pool.labels), pairs(chosen.ignore, pool.labels)
    assert drawn | rest == all_pairs
    assert not drawn & rest
    for place in range(len(ROWS)):
        positives = sum(pair[0] == place for pair in all_pairs)
        assert sum(pair[0] == place for pair in drawn) == min(count, positives)
    negative = draw_positives(pool, count, rng=np.random.default_rng(1), undrawn="negative")
    assert pairs(negative.positives, pool.labels) == drawn
    assert negative.ignore is None
    assert negative.labels is pool.labels


def test_drawn_positives_have_weight_one_and_weight_zero_is_drawn_last(rng):
    matrix = csr_matrix(([0.0, 3.0, 5.0], ([0, 0, 1], [0, 1, 2])), shape=(2, 4))
    drawn = draw_positives(all_labels(matrix, np.arange(2)), 1, rng=rng)
    assert drawn.positives.weights is None
    assert pairs(drawn.positives, None) == {(0, 1), (1, 2)}
    assert pairs(drawn.ignore, None) == {(0, 0)}


def test_in_batch_pool_is_the_union_of_positives(relevance, rng):
    pool = in_batch(relevance, ROWS, rng=rng)
    check_pool(pool)
    assert set(pool.labels.tolist()) == {label for _, label in relevant(relevance)}
    assert pairs(pool.positives, pool.labels) == relevant(relevance)


def test_undrawn_positives_that_another_query_brought_are_positive(relevance):
    for seed in range(20):
        pool = in_batch(relevance, ROWS, rng=np.random.default_rng(seed), sample_positives=1)
        inside = {pair for pair in relevant(relevance) if pair[1] in set(pool.labels.tolist())}
        assert pairs(pool.positives, pool.labels) == inside
        assert pool.ignore is None


def test_sampled_pool_re_derives_positives_over_the_whole_pool(relevance, rng):
    someone_elses_positive = int(relevance[[3]].indices[0])
    hard = np.array([[someone_elses_positive, -1], [1, 2], [-1, -1], [1, 96], [4, 5], [1, 1], [0, 7]], dtype=np.int32)
    pool = sampled(relevance, ROWS, hard, rng=rng, max_positives=2, num_random=10)
    check_pool(pool)
    labels = set(pool.labels.tolist())
    assert set(hard[hard >= 0].tolist()) <= labels
    assert pairs(pool.positives, pool.labels) == {pair for pair in relevant(relevance) if pair[1] in labels}
    assert (1, someone_elses_positive) in pairs(pool.positives, pool.labels)
    for place, row in enumerate(ROWS):
        in_pool = sum(pair[0] == place for pair in pairs(pool.positives, pool.labels))
        assert in_pool >= min(2, relevance[[row]].nnz)


def test_the_cap_keeps_positives_by_count_then_negatives_by_count(rng):
    dense = np.zeros((4, 20), dtype=np.float32)
    dense[:, 11], dense[:2, 5], dense[3, 2] = 1, 1, 1
    hard = np.array([[7, 8], [7, 8], [7, 9], [0, 9]])
    order = []
    for cap in range(1, 8):
        labels = sampled(csr_matrix(dense), np.arange(4), hard, rng=rng, max_positives=9, num_random=20, cap=cap).labels
        assert len(labels) == cap
        assert set(order) <= set(labels.tolist())
        order += [label for label in labels.tolist() if label not in order]
    assert order[:4] == [11, 5, 2, 7]
    assert set(order[4:6]) == {8, 9}
    assert order[6] == 0


def test_equals_under_the_cap_are_left_to_chance(rng):
    hard = np.arange(20).reshape(4, 5)
    kept = [
        sampled(csr_matrix((4, 20)), np.arange(4), hard, rng=rng, max_positives=1, cap=5).labels for _ in range(400)
    ]
    counts = np.bincount(np.concatenate(kept), minlength=20)
    assert abs(counts - 100).max() < 5 * np.sqrt(400 * 0.25 * 0.75)


def test_extra_positives_make_a_larger_pool(relevance, rng):
    pool = sampled(relevance, ROWS, rng=rng, max_positives=1)
    larger = with_extra_positives(pool, relevance, ROWS, rng=rng, num_extra=3)
    check_pool(larger)
    assert set(pool.labels) <= set(larger.labels)
    places = np.searchsorted(larger.labels, pool.labels)
    np.testing.assert_array_equal(larger.labels[places], pool.labels)
    in_pool, in_larger = pairs(pool.positives, pool.labels), pairs(larger.positives, larger.labels)
    for place, row in enumerate(ROWS):
        had, has = (sum(pair[0] == place for pair in side) for side in (in_pool, in_larger))
        assert has >= min(had + 3, relevance[[row]].nnz)
    assert in_larger == {pair for pair in relevant(relevance) if pair[1] in set(larger.labels.tolist())}
    everything = all_labels(relevance, ROWS)
    assert with_extra_positives(everything, relevance, ROWS, rng=rng, num_extra=3) is everything


def test_weights_of_pairs_follow_them_into_the_pool(relevance, rng):
    weighted = csr_matrix(relevance, copy=True)
    weighted.data = np.arange(1, weighted.nnz + 1, dtype=np.float32)
    dense = weighted.toarray()
    for pool in (
        all_labels(weighted, ROWS),
        in_batch(weighted, ROWS, rng=rng),
        sampled(weighted, ROWS, rng=rng, max_positives=2),
    ):
        columns = pool.positives.columns.numpy()
        labels = columns if pool.labels is None else pool.labels[columns]
        np.testing.assert_array_equal(pool.positives.weights, dense[ROWS[pool.positives.rows.numpy()], labels])


def test_draws_are_in_proportion_to_weights(rng):
    weights = np.array([1.0, 2.0, 3.0, 6.0], dtype=np.float32)
    matrix = csr_matrix(np.tile(weights, (30_000, 1)))
    first = draw_positives(all_labels(matrix, np.arange(30_000)), 1, rng=rng).positives.columns.numpy()
    np.testing.assert_allclose(np.bincount(first) / 30_000, weights / 12, atol=0.015)
    two = draw_positives(all_labels(matrix, np.arange(30_000)), 2, rng=rng).positives
    # Without replacement: the chance of label 3 is 1/2 first, or second after another.
    expected = 0.5 + sum(w / 12 * 6 / (12 - w) for w in (1, 2, 3))
    assert (two.columns == 3).float().mean().item() * 2 == pytest.approx(expected, abs=0.015)


def test_empty_batches_and_batches_without_positives(rng):
    nothing = csr_matrix((3, 6), dtype=np.float32)
    for pool in (
        in_batch(nothing, np.arange(3), rng=rng),
        sampled(nothing, np.arange(3), rng=rng, max_positives=2, cap=4),
        in_batch(nothing, np.arange(3), rng=rng, sample_positives=1),
    ):
        assert pool.num_labels == len(pool.positives) == 0
    assert len(draw_positives(all_labels(nothing, np.arange(0)), 1, rng=rng).positives) == 0
    assert in_batch(nothing, np.arange(3), rng=rng, num_random=99).num_labels == 6


def estimate(relevance, query, scores, log_p, rng, *, batch_size, num_random, sample_positives, trials):
    """Mean over random batches that hold the query of the corrected sum over its negatives in the pool."""
    negatives = np.setdiff1d(np.arange(relevance.shape[1]), relevance[[query]].indices)
    others = np.setdiff1d(np.arange(relevance.shape[0]), [query])
    is_negative = np.isin(np.arange(relevance.shape[1]), negatives)
    sums = np.empty(trials)
    for trial in range(trials):
        rows = np.concatenate([[query], rng.choice(others, batch_size - 1, replace=False)])
        pool = in_batch(
            relevance, rows, rng=rng, sample_positives=sample_positives, num_random=num_random, log_inclusion=log_p
        )
        chosen = is_negative[pool.labels]
        sums[trial] = np.exp(scores[pool.labels] - pool.log_inclusion)[chosen].sum()
    return sums, np.exp(scores[negatives]).sum()


@pytest.mark.parametrize(("num_random", "batch_size"), [(10, 6), (25, 2), (0, 12)])
def test_the_corrected_denominator_is_unbiased(num_random, batch_size, rng):
    dense = (rng.random((30, 40)) < rng.random(40) ** 3).astype(np.float32)
    if not num_random:
        dense[1, :] = dense[2, :] = 1  # without random labels, every label needs a query that can bring it
    relevance, scores = csr_matrix(dense), rng.standard_normal(40)
    log_p = log_inclusion_probability(dense.sum(axis=0), num_queries=30, batch_size=batch_size, num_random=num_random)
    sums, truth = estimate(
        relevance, 0, scores, log_p, rng, batch_size=batch_size, num_random=num_random, sample_positives=0, trials=3000
    )
    error = sums.std() / np.sqrt(len(sums))
    assert abs(sums.mean() - truth) < 4 * error
    assert error < 0.05 * truth


def test_with_sampled_positives_the_correction_is_close(rng):
    dense = (rng.random((60, 40)) < 0.2).astype(np.float32)
    relevance, scores = csr_matrix(dense), rng.standard_normal(40)
    counts = expected_label_counts(relevance, sample_positives=2)
    assert counts.sum() == pytest.approx(np.minimum(dense.sum(axis=1), 2).sum())
    log_p = log_inclusion_probability(counts, num_queries=60, batch_size=5, num_random=4)
    sums, truth = estimate(
        relevance, 0, scores, log_p, rng, batch_size=5, num_random=4, sample_positives=2, trials=3000
    )
    assert sums.mean() == pytest.approx(truth, rel=0.06)


def test_inclusion_probabilities_match_the_binomial_ratio_and_the_extremes():
    from math import comb, log

    counts = np.array([0, 1, 5, 28, 29])
    log_p = log_inclusion_probability(counts, num_queries=30, batch_size=4)
    expected = [log(1 - comb(29 - c, 3) / comb(29, 3)) for c in counts[1:]]
    assert log_p[0] == -np.inf
    np.testing.assert_allclose(log_p[1:], expected, rtol=1e-5, atol=1e-7)
    assert (log_inclusion_probability(counts, num_queries=30, batch_size=1, num_random=5) == 0).all()
    assert (log_inclusion_probability(counts[1:], num_queries=30, batch_size=30) == 0).all()


def test_wrong_arguments_say_what_was_expected(relevance, rng):
    with pytest.raises(UsageError, match="1 or more"):
        sampled(relevance, ROWS, rng=rng, max_positives=0)
    with pytest.raises(UsageError, match="cannot be drawn"):
        log_inclusion_probability(np.ones(3), num_queries=4, batch_size=5)


def test_unwanted_pairs_are_ignored_in_every_pool():
    relevance = csr_matrix(np.array([[1, 1, 0, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0]], dtype=np.float32))
    unwanted = csr_matrix(np.array([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], dtype=np.float32))
    rows = np.array([2, 0])
    everything = without_pairs(all_labels(relevance, rows), unwanted, rows)
    assert pairs_of(everything.ignore) == [(0, 2), (1, 3)]
    some = draw_positives(all_labels(relevance, rows), 1, rng=np.random.default_rng(0))
    assert len(without_pairs(some, unwanted, rows).ignore) == len(some.ignore) + 2
    batch = in_batch(relevance, rows, rng=np.random.default_rng(0))
    assert batch.labels.tolist() == [0, 1, 3, 4]
    ignored = without_pairs(batch, unwanted, rows).ignore
    assert pairs_of(ignored) == [(1, 2)]


def test_a_filtered_pair_is_never_the_drawn_positive():
    relevance = csr_matrix(np.ones((1, 3), dtype=np.float32))
    filtered = csr_matrix(np.array([[1, 0, 1]], dtype=np.float32))
    pool = without_pairs(all_labels(relevance, np.array([0])), filtered, np.array([0]))
    for seed in range(10):
        drawn = draw_positives(pool, 1, rng=np.random.default_rng(seed))
        assert pairs_of(drawn.positives) == [(0, 1)]


def pairs_of(pairs):
    return list(zip(pairs.rows.tolist(), pairs.columns.tolist(), strict=True))
