"""Tokens: the same ids as the plain tokenizer, gathered without a loop, within the limits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, Whitespace
from tokenizers.processors import TemplateProcessing

from dexter.data import tokens as tokens_module
from dexter.data.tokens import LimitedTokenizer, count_words
from dexter.errors import UsageError

WORDS = [f"w{number}" for number in range(50)]


def tokenize(texts, tokenizer, *, progress=False, **limits):
    return LimitedTokenizer(tokenizer, **limits).tokenize(texts, progress=progress)


def row_ids(tokens, row):
    return tokens.ids[tokens.offsets[row] : tokens.offsets[row + 1]].tolist()


def make_tokenizer(extra: int = 0) -> Tokenizer:
    names = ["[UNK]", "[CLS]", "[SEP]", *WORDS, *(f"x{number}" for number in range(extra))]
    tokenizer = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return tokenizer


@pytest.fixture
def texts():
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, size)) for size in generator.integers(0, 12, 301)] + [
        "",
        "unknown",
        "é w1",
    ]


@pytest.mark.parametrize("special_tokens", [False, True])
def test_equal_to_the_plain_tokenizer(texts, special_tokens, monkeypatch):
    monkeypatch.setattr(tokens_module, "_BLOCK_TEXTS", 37)
    tokenizer = make_tokenizer()
    found = tokenize(texts, tokenizer, max_length=64, max_characters=1000, special_tokens=special_tokens)
    expected = [tokenizer.encode(text, add_special_tokens=special_tokens).ids for text in texts]
    assert len(found) == len(texts)
    assert found.ids.dtype == np.uint16
    assert [row_ids(found, row) for row in range(len(texts))] == expected
    assert found.lengths.tolist() == [len(ids) for ids in expected]


def test_equal_to_the_plain_tokenizer_where_chunks_are_remembered(monkeypatch):
    monkeypatch.setattr(tokens_module, "_REMEMBERED_CHUNKS", 500)
    monkeypatch.setattr(tokens_module, "_KEPT_CHUNKS", 70)
    monkeypatch.setattr(tokens_module, "_BLOCK_TEXTS", 37)
    generator = np.random.default_rng(0)
    pieces = ["[UNK]", *"abcdefghij0123456789.,-", *(f"##{letter}" for letter in "abcdefghij"), "ab", "##cde", "fgh"]
    tokenizer = Tokenizer(WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    plain, odd = list("abcdeFGHij.,- \t\n"), [chr(code) for code in range(0x3100)] + list("\ufffd\u4e00\uff0c😀")
    texts = ["".join(generator.choice(plain, 40)) for _ in range(200)]
    texts += ["".join(generator.choice(plain + odd, 60)) for _ in range(200)] + ["\u200b " * 30 + "ab cd"]
    for max_length in (9, 200):
        found = tokenize(texts, tokenizer, max_length=max_length, max_characters=1000)
        rows = [row_ids(found, row) for row in range(len(texts))]
        assert rows == [tokenizer.encode(text).ids[:max_length] for text in texts]
        few = LimitedTokenizer(tokenizer, max_length=max_length, max_characters=1000)
        assert [few.tokenize([text]).ids.tolist() for text in texts] == rows
        assert len(few._few) <= 70
    lowered = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    lowered.normalizer, lowered.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    normal = [lowered.normalizer.normalize_str(text) for text in texts]
    words = [word for text in normal for word, _ in lowered.pre_tokenizer.pre_tokenize_str(text)]
    assert count_words(lowered, texts) == Counter(words)


def test_select_equals_a_loop(texts):
    found = tokenize(texts, make_tokenizer(), max_length=64, max_characters=1000)
    generator = np.random.default_rng(1)
    empty_row = texts.index("")
    assert found.lengths_of(np.array([5, 5, empty_row])).tolist() == [*[found.lengths[5]] * 2, 0]
    for rows in (generator.integers(0, len(texts), 97), [], [empty_row], [len(texts) - 1, 0, 0, -1]):
        selected = found.select(rows)
        expected = [row_ids(found, range(len(texts))[row]) for row in rows]
        assert selected.ids.tolist() == [token for ids in expected for token in ids]
        assert selected.offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
        ids, offsets = selected
        assert len(ids) == offsets[-1]


def test_truncation_keeps_special_tokens():
    texts = ["w1 w2 w3", "w1 w2 w3 w4", "w1 w2 w3 w4 w5", "w1 " + " " * 200 + "w2", "w1"]
    found = tokenize(texts, make_tokenizer(), max_length=3, max_characters=100)
    assert found.lengths.tolist() == [3, 3, 3, 1, 1]
    special = tokenize(texts, make_tokenizer(), max_length=3, max_characters=100, special_tokens=True)
    assert row_ids(special, 1) == [1, 4, 2]


def test_characters_are_cut_before_tokenising():
    found = tokenize(["w1 w23"], make_tokenizer(), max_length=10, max_characters=5)
    assert row_ids(found, 0) == make_tokenizer().encode("w1 w2", add_special_tokens=False).ids


def test_limits_of_the_given_tokenizer_are_ignored_and_kept(texts):
    tokenizer = make_tokenizer()
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(2)
    before = tokenizer.to_str()
    found = tokenize(texts, tokenizer, max_length=64, max_characters=1000)
    assert tokenizer.to_str() == before
    assert found.lengths.max() == 11


def test_large_vocabularies_get_wider_ids():
    found = tokenize(["x69999 w1"], make_tokenizer(extra=70_000), max_length=4, max_characters=100)
    assert found.ids.dtype == np.int32
    assert row_ids(found, 0) == [70_052, 4]


def test_lone_surrogates_do_not_stop_it():
    found = tokenize(["w1 \ud800 w2"], make_tokenizer(), max_length=8, max_characters=100)
    assert row_ids(found, 0) == [4, 0, 5]


def test_no_texts():
    found = tokenize([], make_tokenizer(), max_length=8, max_characters=100)
    assert len(found) == 0
    assert found.select([]).ids.tolist() == []


@pytest.mark.parametrize(("max_length", "max_characters"), [(2, 10), (0, 10), (8, 0)])
def test_impossible_limits(max_length, max_characters):
    with pytest.raises(UsageError, match="max_"):
        tokenize(["w1"], make_tokenizer(), max_length=max_length, max_characters=max_characters, special_tokens=True)


def test_progress_is_silent_off_a_terminal(texts, capfd):
    tokenize(texts, make_tokenizer(), max_length=8, max_characters=100, progress=True)
    assert capfd.readouterr().err == ""
