"""What words say for labels: gains against a slow reference, changed labels, stored arrays."""

import math

import numpy as np
import pytest

from dexter.model.lexical import LexicalIndex, TextWords
from dexter.model.word_weights import WordWeights

TEXTS = ["red apple pie", "green apple", "blue sea and green sea", "pie"]


@pytest.fixture
def weights():
    table = np.random.default_rng(0).normal(size=30).astype(np.float32)
    return WordWeights(table, np.array([0, 4, 5, 12, 20]), np.array([4, 1, 7, 8, 10]))


def slow_place(code, start, size):
    return int(start) + int(code) * int(size) // 2**32


def test_gains_are_those_of_a_loop_over_words(weights):
    index = LexicalIndex.of(TEXTS)
    words = [
        index.weigh(index.look_up(["apple", "green", "apple", "unknown"])),
        index.weigh(index.look_up([])),
        index.weigh(index.look_up(["sea"])),
    ]
    assert [len(each.codes) for each in words] == [2, 0, 1]
    starts, labels = np.array([0, 2, 3, 6]), np.array([4, 1, 2, 0, 2, 3])
    expected = []
    for text, (codes, values) in enumerate(words):
        for label in labels[starts[text] : starts[text + 1]]:
            said = [
                weights.table[slow_place(code, weights.starts_L[label], weights.sizes_L[label])] * value
                for code, value in zip(codes, values, strict=True)
            ]
            expected.append(1 / (1 + math.exp(2 - sum(said))))
    np.testing.assert_allclose(weights.gains(words, starts, labels), expected, rtol=1e-5)


def test_the_words_of_a_text_weigh_what_they_weigh_in_the_index():
    index = LexicalIndex.of(TEXTS)
    by_query = index.weights_by_query()
    for row, text in enumerate(TEXTS):
        codes, weights = index.weigh(index.look_up(text.split()))
        assert math.isclose(float(weights @ weights), 1, rel_tol=1e-5)
        columns = np.searchsorted(index.words, codes)
        np.testing.assert_allclose(by_query[row].toarray()[0, columns], weights, rtol=1e-5)


def test_gains_follow_their_labels(weights):
    words = [TextWords(np.array([7, 2**32 - 1]), np.array([0.6, 0.8], np.float32))]
    before = weights.gains(words, np.array([0, 5]), np.arange(5))
    fewer = weights.select_labels(np.array([3, 1])).append_labels(2)
    np.testing.assert_array_equal(fewer.gains(words, np.array([0, 2]), np.arange(2)), before[[3, 1]])
    assert np.isfinite(fewer.gains(words, np.array([0, 4]), np.arange(4))).all()  # newer labels have a place to read


def test_stored_arrays_give_the_same_weights_in_half_precision(weights):
    arrays = weights.to_arrays()
    again = WordWeights.from_arrays(arrays, 5)
    np.testing.assert_allclose(again.table, weights.table, rtol=1e-3)
    np.testing.assert_array_equal(again.starts_L, weights.starts_L)
    np.testing.assert_array_equal(again.sizes_L, weights.sizes_L)
    ranges = arrays["word_label_ranges"]
    for wrong in (
        {"word_label_weights": arrays["word_label_weights"][:-1]},
        {"word_label_weights": arrays["word_label_weights"].astype(np.int32)},
        {"word_label_ranges": ranges[:, :-1]},
        {"word_label_ranges": ranges - 1},
        {"word_label_ranges": ranges * [[1], [0]]},
        {"word_label_ranges": ranges * [[1], [2**40]]},
        {"word_label_ranges": np.maximum(ranges, [[2**63 - 2], [1]])},
    ):
        with pytest.raises(ValueError, match="weights of words"):
            WordWeights.from_arrays(arrays | wrong, 5)
