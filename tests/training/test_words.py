"""Learning what words say for labels: which pairs are told apart, and what is learned from them."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.model.lexical import LexicalIndex, TextWords, split_words
from dexter.training import words
from dexter.training.words import Pairs, choose_pairs, learn_word_weights


def random_world(num_queries=60, num_labels=12, dimension=8):
    generator = np.random.default_rng(3)
    directions = generator.normal(size=(num_queries, dimension)).astype(np.float32)
    labels = generator.normal(size=(num_labels, dimension)).astype(np.float32)
    relevance = csr_matrix((generator.random((num_queries, num_labels)) < 0.2).astype(np.float32))
    return directions, labels, relevance


@pytest.mark.parametrize("most", [3, 100])
def test_pairs_are_the_right_labels_and_the_best_wrong_ones_of_a_group(monkeypatch, most):
    directions, labels, relevance = random_world()
    monkeypatch.setattr(words, "_WRONG", most)
    exclude = csr_matrix(([1.0, 1.0], ([0, 5], [2, 7])), shape=relevance.shape)
    pairs = choose_pairs(directions, np.negative, labels, relevance, exclude)  # fewer queries than a group has
    right = relevance.toarray() > 0
    scores = np.where(right | (exclude.toarray() > 0), -np.inf, -directions @ labels.T)
    scores[:, ~right.any(axis=0)] = -np.inf  # labels of no query of the group
    for query in range(len(directions)):
        part = pairs.queries_P == query
        is_right = pairs.right_P[part]
        assert set(pairs.labels_P[part][is_right]) == set(np.flatnonzero(right[query]))
        best = [label for label in np.argsort(-scores[query])[:most] if scores[query, label] > -np.inf]
        assert set(pairs.labels_P[part][~is_right]) == set(best)


def test_groups_hold_every_query_once(monkeypatch):
    directions, *_ = random_world(num_queries=100)
    monkeypatch.setattr(words, "_GROUP", 16)
    groups = list(words._groups(directions, 0))
    assert len(groups) == 7
    assert sorted(np.concatenate(groups)) == list(range(100))


def test_queries_without_labels_have_no_pairs():
    directions, labels, relevance = random_world()
    pairs = choose_pairs(directions, np.negative, labels, csr_matrix(relevance.shape, dtype=np.float32))
    assert len(pairs.labels_P) == len(pairs.queries_P) == len(pairs.right_P) == 0
    learned = learn_word_weights(csr_matrix((60, 5), dtype=np.float32), np.arange(5), pairs, 12)
    assert not learned.table.any()


def fruit():
    """Texts of two labels whose words differ in one word only, all of them pairs with both labels."""
    texts = [f"common words of text {number % 7} {'apple' if number % 2 else 'pear'}" for number in range(40)]
    texts[0] = "..."  # no word at all
    queries, labels = np.tile(np.arange(len(texts)), 2), np.repeat([0, 1], len(texts))
    return texts, Pairs(queries, labels, labels == queries % 2)


def test_the_word_that_decides_is_learned(monkeypatch):
    texts, pairs = fruit()
    index = LexicalIndex.of(texts)
    monkeypatch.setattr(words, "_EPOCHS", 10)
    learned = learn_word_weights(index.weights_by_query(), index.words, pairs, 3)
    assert learned.table.dtype == np.float16
    said = [index.weigh(index.look_up(split_words(text))) for text in ("an apple", "a pear", "common words")]
    gains = learned.gains(said, np.array([0, 3, 6, 9]), np.tile(np.arange(3), 3)).reshape(3, 3)
    assert gains[0, 1] > 0.8 > 0.2 > gains[0, 0]
    assert gains[1, 0] > 0.8 > 0.2 > gains[1, 1]
    assert abs(gains[2, 0] - gains[2, 1]) < 0.2
    np.testing.assert_allclose(gains[:, 2], 1 / (1 + np.exp(2)), rtol=0.2)  # a label of no pair
    again = learn_word_weights(index.weights_by_query(), index.words, pairs, 3)
    np.testing.assert_array_equal(again.table, learned.table)


def test_a_step_is_one_of_adagrad(monkeypatch):
    texts, pairs = fruit()
    index = LexicalIndex.of(texts)
    monkeypatch.setattr(words, "_EPOCHS", 1)
    monkeypatch.setattr(words, "_STEPS", 1)
    by_query, codes = index.weights_by_query(), index.words
    learned = learn_word_weights(by_query, codes, pairs, 2)
    for word in ("apple", "text"):
        weighed = index.weigh(index.look_up([word]))
        column = int(np.searchsorted(index.words, weighed.codes)[0])
        values = by_query[:, column].toarray().ravel().astype(np.float64)
        for label in (0, 1):
            is_right = np.array([number % 2 == label for number in range(len(texts))])
            gradients = (1 / (1 + np.exp(2)) - is_right) * values
            expected = -0.3 * gradients.sum() / np.sqrt(1e-6 + (gradients**2).sum())
            one = TextWords(weighed.codes, np.ones(1, np.float32))
            gain = float(learned.gains([one], np.array([0, 1]), np.array([label]))[0])
            assert np.log(gain / (1 - gain)) + 2 == pytest.approx(expected, rel=0.01)
