"""Words that texts share: an inverted index of the training queries, and those most similar to a text by TF-IDF; and
the share of a new label's words that a text contains.

    weight of a word in a text = (1 + log count) * idf,   idf = 1 + log((1 + M) / (1 + training queries with the word))
    similarity = cosine of the two texts' weights

A word is a run of letters and digits in lower case, known by its CRC-32, so that no strings are stored. A text's words
are looked up from the rarest on while their postings fit a budget: frequent words hardly change which training queries
are nearest, and a text costs the same among a million of them.

Shapes: N texts, M training queries, V words.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from dexter.index.prefix import largest_scores
from dexter.tensor_files import row_starts
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

_WORD = re.compile(r"\w+")
_MAX_CHARACTERS = 2_000
"""Characters of a text that are read: about what an encoder reads."""
_MAX_POSTINGS = 2**15
"""Postings that are read for a text; its most frequent words are left out where it has more."""
_REMEMBERED_WORDS, _REMEMBERED_CHARACTERS = 2**16, 32
"""Words whose postings need not be looked up again, and the most characters of one."""
_PAIRED_AFTER = 2**10
"""Words after which all postings are paired, for which the first texts must not wait (see `_pair`)."""
_BLOCK_TEXTS = 4_096
"""Texts whose words are Python objects at a time."""


@dataclass(frozen=True, eq=False)
class LexicalIndex:
    """For each word the training queries that contain it."""

    words: NDArray[np.int64]
    """The CRC-32 of each word, ascending."""
    starts_V: NDArray[np.int64]
    """Where the postings of each word begin, and the end of the last."""
    queries: NDArray[np.int32]
    """The training query of each posting."""
    weights: NDArray[np.floating]
    """The TF-IDF weight of each posting, each training query of length one, in single or half precision."""
    num_queries: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> LexicalIndex:
        """Index the training queries."""
        # Imported here because looking up words does not need it, and it takes a while.
        from scipy.sparse import csr_matrix

        words, columns, ends = _words_of(texts)
        counts_MV = csr_matrix((np.ones(len(columns), np.float32), columns, ends), shape=(len(texts), len(words)))
        counts_MV.sum_duplicates()
        frequencies_V = np.bincount(counts_MV.indices, minlength=len(words))
        distinct, places = np.unique(frequencies_V, return_inverse=True)
        rarities_V = np.array([_rarity(frequency, len(texts)) for frequency in distinct.tolist()], np.float32)[places]
        counts_MV.data = (1 + np.log(counts_MV.data)) * rarities_V[counts_MV.indices]
        lengths_M = np.sqrt(np.asarray(counts_MV.power(2).sum(axis=1))).ravel()
        counts_MV.data /= np.repeat(np.maximum(lengths_M, 1e-12), np.diff(counts_MV.indptr)).astype(np.float32)
        postings_VM = csr_matrix(counts_MV.T)
        starts_V = postings_VM.indptr.astype(np.int64)
        return cls(words, starts_V, postings_VM.indices, postings_VM.data, len(texts))

    def nearest(
        self,
        texts: Sequence[str],
        k: int,
        *,
        among: NDArray[np.int64] | None = None,
        known: Sequence[KnownWords] | None = None,
    ) -> TopK:
        """Find the k most similar training queries of each text and their cosines, only `among` some rows if given.

        Where fewer share a word with the text, the places left have row 0 and cosine 0. `known` is what `look_up` gives
        for each text, where it was looked up already.
        """
        k = min(k, self.num_queries if among is None else len(among))
        found = TopK(np.zeros((len(texts), k), np.int64), np.zeros((len(texts), k), np.float32))
        for row in range(len(texts) if k else 0):
            cosines = self._cosines(self.look_up(split_words(texts[row])) if known is None else known[row])
            values = cosines if among is None else cosines[among]
            near = largest_scores(values, k)
            positive = values[near] > 0
            near = near if positive.all() else near[positive]
            best = near[np.argsort(-values[near], kind="stable")[:k]]
            found.ids[row, : len(best)] = best if among is None else among[best]
            found.scores[row, : len(best)] = values[best]
        return found

    def look_up(self, words: Sequence[str]) -> KnownWords:
        """Return each word that training queries have with its weight in a text of these words, rarest first."""
        # A text has few words: plain numbers are faster than arrays.
        look_up, counts = self._postings.__getitem__, Counter(words)
        return sorted(
            [
                word if count == 1 else (*word[:3], (1.0 + math.log(count)) * word[3], *word[4:])
                for word, count in zip(map(look_up, counts), counts.values(), strict=True)
                if word[0]
            ]
        )

    @staticmethod
    def weigh(known: KnownWords) -> TextWords:
        """Return the words of a text that training queries have with their TF-IDF weights, of length one."""
        if not known:
            return TextWords(np.empty(0, np.int64), np.empty(0, np.float32))
        _, _, _, weights, codes, _ = zip(*known, strict=True)
        return TextWords(np.array(codes, np.int64), np.array(weights, np.float32) / np.float32(math.hypot(*weights)))

    def weights_by_query(self) -> csr_matrix:
        """Return the TF-IDF weights of the training queries, queries x words."""
        from scipy.sparse import csr_matrix

        shape = len(self.words), self.num_queries
        return csr_matrix(csr_matrix((self.weights.astype(np.float32), self.queries, self.starts_V), shape=shape).T)

    def _cosines(self, known: KnownWords) -> NDArray[np.float32]:
        """Return the cosine of a text with every training query [M], from the words that fit the budget of postings."""
        cosines_M = np.zeros(self.num_queries, np.float32)
        if not known:
            return cosines_M
        lengths, _, _, weights, _, postings = zip(*known, strict=True)
        num_read = bisect_right(list(accumulate(lengths)), _MAX_POSTINGS)
        if num_read:
            pairs = np.concatenate(postings[:num_read])
            scaled = np.array(weights[:num_read], np.float32) / np.float32(math.hypot(*weights))
            products = pairs[:, 1] * scaled.repeat(lengths[:num_read])
            np.add.at(cosines_M, pairs.view(np.int32)[:, 0].astype(np.intp), products)
        return cosines_M

    @cached_property
    def _postings(self) -> _Postings:
        return _Postings(self)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are stored; cosines are kept in half precision."""
        return {
            "words": self.words,
            "word_ends": self.starts_V[1:],
            "word_queries": self.queries.astype(np.int32),
            "word_weights": self.weights.astype(np.float16),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], num_queries: int) -> LexicalIndex:
        """Make it from stored arrays; raises KeyError or ValueError where they do not fit together."""
        words, queries, weights = arrays["words"], arrays["word_queries"], arrays["word_weights"]
        starts_V = row_starts(arrays["word_ends"], queries, num_queries)
        if len(starts_V) != len(words) + 1 or len(weights) != len(queries):
            raise ValueError("words without postings, or postings without weights")
        if weights.dtype.kind != "f" or words.dtype != np.int64 or (np.diff(words) <= 0).any():
            raise ValueError("weights that are no fractions, or words out of order")
        return cls(words, starts_V, queries, weights, num_queries)


KnownWord = tuple[int, int, int, float, int, NDArray[np.float32]]
"""A word that was looked up: the number of its postings, where they begin, a number of its own (by which words with one
CRC-32 are told apart), its weight in a text where it occurs once, its CRC-32, and its postings, each the bits of a
training query and a weight."""
KnownWords = list[KnownWord]
"""The words of a text as `LexicalIndex.look_up` gives them, each with its weight in that text."""


class TextWords(NamedTuple):
    """The words of a text that training queries have."""

    codes: NDArray[np.int64]
    """Their CRC-32."""
    weights: NDArray[np.float32]
    """Their TF-IDF weights, of length one."""


class LabelWords:
    """The words of some labels, and which share of each label's words a text contains.

    Args:
        rows: positions of the labels among those of the model.
        texts: their texts.
    """

    def __init__(self, rows: NDArray[np.int64], texts: Sequence[str]) -> None:
        words = [distinct_words(text) for text in texts]
        self._rows, self._sizes = rows, np.array([max(1, len(each)) for each in words])
        labels: defaultdict[str, list[int]] = defaultdict(list)
        for label, each in enumerate(words):
            for word in each:
                labels[word].append(label)
        self._labels = {word: np.array(each) for word, each in labels.items()}

    def shares(self, words: Iterable[str]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the rows, ascending, of the labels that share a word with a text, and the share of their words."""
        postings = [self._labels[word] for word in self._labels.keys() & words]
        if not postings:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        labels, counts = np.unique(np.concatenate(postings), return_counts=True)
        return self._rows[labels], (counts / self._sizes[labels]).astype(np.float32)


def distinct_words(text: str) -> frozenset[str]:
    """Return the different words of a text."""
    return frozenset(split_words(text))


def split_words(text: str) -> list[str]:
    """Return the words of a text, in order."""
    return _WORD.findall(text[:_MAX_CHARACTERS].lower())


class _Numbers(dict[str, int]):
    """The numbers of words, in order of first occurrence."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class _Postings(dict[str, KnownWord]):
    """The words that were looked up last."""

    def __init__(self, index: LexicalIndex) -> None:
        # Views give plain numbers, in a tenth of the time of an array.
        self._words, self._starts = index.words.data, index.starts_V.data
        self._queries, self._weights, self._num_queries = index.queries, index.weights, index.num_queries
        self._paired: NDArray[np.float32] | None = None
        self._num_missed = 0

    def __missing__(self, word: str) -> KnownWord:
        code = crc32(word.encode("utf-8", "surrogatepass"))
        row = bisect_left(self._words, code)
        start, end = 0, 0
        if row < len(self._words) and self._words[row] == code:
            start, end = self._starts[row], self._starts[row + 1]
        pairs, rarity = self._pairs(start, end), _rarity(end - start, self._num_queries)
        found = end - start, start, self._num_missed, rarity, code, pairs
        if len(word) <= _REMEMBERED_CHARACTERS:
            if len(self) >= _REMEMBERED_WORDS:
                self.clear()
            self[word] = found
        return found

    def _pairs(self, start: int, end: int) -> NDArray[np.float32]:
        """Return some postings, each as the bits of its training query and its weight."""
        self._num_missed += 1
        if self._num_missed >= _PAIRED_AFTER and self._paired is None:
            self._paired = _pair(self._queries, self._weights)
            self.clear()
        if self._paired is not None:
            return self._paired[start:end]
        return _pair(self._queries[start:end], self._weights[start:end])


def _pair(queries: NDArray[np.int32], weights: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return the bits of integers and numbers as one array: they are picked together, and used at once."""
    pairs = np.empty((len(queries), 2), np.float32)
    pairs.view(np.int32)[:, 0], pairs[:, 1] = queries, weights
    return pairs


def _words_of(texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Return the CRC-32 of every word, ascending, the words of all texts one after the other as positions among these,
    and where those of each text end, from 0 on.
    """
    numbers, flat, lengths = _Numbers(), [np.empty(0, np.int32)], [0]
    for start in range(0, len(texts), _BLOCK_TEXTS):
        rows = [split_words(text) for text in texts[start : start + _BLOCK_TEXTS]]
        flat.append(np.fromiter(map(numbers.__getitem__, chain.from_iterable(rows)), dtype=np.int32))
        lengths += map(len, rows)
    codes = np.fromiter((crc32(word.encode("utf-8", "surrogatepass")) for word in numbers), dtype=np.int64)
    words, places = np.unique(codes, return_inverse=True)
    return words, places.astype(np.int32)[np.concatenate(flat)], np.cumsum(lengths, dtype=np.int64)


def _rarity(frequency: int, num_queries: int) -> float:
    """Return the IDF of a word by the training queries that contain it."""
    return 1.0 + math.log((1.0 + num_queries) / (1.0 + frequency))
