"""Words in common: nearest training queries by TF-IDF against a slow loop, the budget of postings, what is stored."""

import math
import re
from collections import Counter
from zlib import crc32

import numpy as np
import pytest

from dexter.model import lexical
from dexter.model.lexical import LexicalIndex

TEXTS = ["Red fox, red den", "the fox", "the river", "a blue river by the den", "", "RIVER river Österreich", "!?"]
QUERIES = ["fox fox den river", "the Österreich", "nothing known", "", "the"]


def slow_cosines(texts, query):
    bags = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    frequencies = Counter(word for bag in bags for word in bag)

    def weigh(bag):
        weights = {
            word: (1 + math.log(count)) * (1 + math.log((1 + len(texts)) / (1 + frequencies[word])))
            for word, count in bag.items()
            if word in frequencies
        }
        length = math.sqrt(sum(weight**2 for weight in weights.values()))
        return {word: weight / length for word, weight in weights.items()}

    asked = weigh(Counter(re.findall(r"\w+", query.lower())))
    return [sum(weight * asked.get(word, 0.0) for word, weight in weigh(bag).items()) for bag in bags]


@pytest.mark.parametrize("k", [1, 3, 7, 20])
def test_cosines_equal_a_slow_loop(k):
    found = LexicalIndex.of(TEXTS).nearest(QUERIES, k)
    for row, query in enumerate(QUERIES):
        slow = np.array(slow_cosines(TEXTS, query))
        np.testing.assert_allclose(found.scores[row], np.sort(slow)[::-1][:k], atol=1e-6)
        shared = found.scores[row] > 0
        np.testing.assert_allclose(slow[found.ids[row, shared]], found.scores[row, shared], atol=1e-6)
        assert len(set(found.ids[row, shared])) == min(k, (slow > 0).sum())
        assert not found.ids[row, ~shared].any()


def test_one_text_at_a_time_gives_the_same():
    index = LexicalIndex.of(TEXTS)
    together = index.nearest(QUERIES, 3)
    for row, query in enumerate(QUERIES):
        np.testing.assert_array_equal(index.nearest([query], 3).ids, together.ids[[row]])


def test_only_among_some():
    found = LexicalIndex.of(TEXTS).nearest(["the river"], 3, among=np.array([1, 5]))
    assert found.ids.tolist() == [[5, 1]]
    assert LexicalIndex.of(TEXTS).nearest(["the river"], 3, among=np.array([], np.int64)).ids.shape == (1, 0)


def test_the_most_frequent_words_of_a_text_are_left_out_beyond_the_budget(monkeypatch):
    index = LexicalIndex.of(TEXTS)
    monkeypatch.setattr(lexical, "_MAX_POSTINGS", 2)
    found = index.nearest(["the fox"], 7)  # "fox" is in two texts, "the" in three
    assert {row for row, cosine in zip(found.ids[0], found.scores[0], strict=True) if cosine > 0} == {0, 1}


@pytest.mark.parametrize("texts", [[""], ["?!", ""]])
def test_texts_without_words(texts):
    index = LexicalIndex.of(texts)
    assert index.nearest(["word", ""], 1).scores.tolist() == [[0.0], [0.0]]


def test_two_words_with_one_code_in_a_text():
    assert crc32(b"plumless") == crc32(b"buckeroo")
    index = LexicalIndex.of(["plumless amber", "buckeroo birch", "plumless copper copper copper"])
    found = index.nearest(["plumless buckeroo"], 2)
    assert found.ids[0].tolist() == [0, 1]
    assert found.scores[0, 0] == found.scores[0, 1] > 0


def test_stored_arrays_make_the_same_index():
    index = LexicalIndex.of(TEXTS)
    again = LexicalIndex.from_arrays(index.to_arrays(), len(TEXTS))
    found, expected = again.nearest(QUERIES, 3), index.nearest(QUERIES, 3)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-3)


def test_arrays_that_do_not_fit_are_refused():
    arrays = LexicalIndex.of(TEXTS).to_arrays()
    for name, broken in (
        ("words", arrays["words"][::-1]),
        ("word_queries", arrays["word_queries"] + 7),
        ("word_ends", arrays["word_ends"] + 1),
        ("word_weights", arrays["word_weights"].astype(np.int32)),
    ):
        with pytest.raises(ValueError):
            LexicalIndex.from_arrays(arrays | {name: broken}, len(TEXTS))


def test_words_are_remembered_up_to_a_number_and_a_length(monkeypatch):
    index = LexicalIndex.of([*TEXTS, "w" * 33])
    monkeypatch.setattr(lexical, "_REMEMBERED_WORDS", 2)
    for query in (*QUERIES, "w" * 33, *QUERIES):
        slow = slow_cosines([*TEXTS, "w" * 33], query)
        np.testing.assert_allclose(index.nearest([query], 1).scores, [[max(slow)]], atol=1e-6)
        assert len(index._postings) <= 2
    assert max(map(len, index._postings)) <= 32
