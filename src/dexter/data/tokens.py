"""Tokenised texts as ragged token ids: one flat array with offsets, without padding; a batch is gathered from it.

Many texts repeat few words. Where a tokenizer never joins what white space separates (`splits_at_spaces`), each
distinct chunk between spaces is tokenised once, and texts are put together from these: the same ids in a third of the
time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dexter.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLOCK_TEXTS = 8192
_FEWEST_REPEATING_TEXTS = 64
"""Fewer texts than this repeat too few chunks: they are tokenised whole."""
_REMEMBERED_CHUNKS = 2**19
"""Distinct chunks that are remembered at a time."""
_KEPT_CHUNKS, _KEPT_CHARACTERS = 2**15, 32
"""Chunks that are remembered from few texts to the next, and the most characters of one."""
_MAX_WINDOWS = 16
"""Windows of a long text that are read."""
_CONTROLS = re.compile("[\x0b\x0c\x1c-\x1f\x85]")
"""Characters that Python splits at and a BERT normalizer removes."""
_ASCII_WORD = re.compile("[a-z0-9]+|[^a-z0-9]")


class Ragged(NamedTuple):
    """Rows of different lengths in one flat array."""

    ids: np.ndarray
    """The ids of all rows, one after the other."""
    offsets: np.ndarray
    """Row i is `ids[offsets[i]:offsets[i + 1]]`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tokens:
    """The token ids of a list of texts."""

    ids: np.ndarray
    """Flat ids, uint16 or int32 by the size of the vocabulary."""
    offsets: np.ndarray
    """int64, one more than there are texts."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of tokens of some texts."""
        return np.asarray(self.offsets[1:][rows] - self.offsets[:-1][rows])

    def part(self, rows: slice) -> Tokens:
        """Return a run of consecutive texts, sharing their memory."""
        start, stop, _ = rows.indices(len(self))
        offsets = self.offsets[start : stop + 1]
        return Tokens(ids=self.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])

    def spaced(self, maximum: int) -> Tokens:
        """Return at most this many texts at equal distances: they stand in the order of the data set."""
        rows = np.linspace(0, len(self) - 1, min(maximum, len(self))).astype(np.int64)
        return Tokens(**self.select(rows)._asdict())

    def select(self, rows: Sequence[int] | np.ndarray) -> Ragged:
        """Gather the ids of some texts in the order given, repeats allowed."""
        rows = np.asarray(rows, dtype=np.int64)
        starts = self.offsets[:-1][rows]
        lengths = self.offsets[1:][rows] - starts
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.repeat(starts - offsets[:-1], lengths)
        positions += np.arange(offsets[-1])
        return Ragged(np.asarray(self.ids[positions]), offsets)


class LimitedTokenizer:
    """A tokenizer with limits of its own. Making one may take longer than tokenising a text: keep it."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, max_characters: int, special_tokens: bool = False
    ) -> None:
        """Use a tokenizer, or a copy if that must be changed.

        Args:
            tokenizer: a fast tokenizer; its padding and truncation settings are ignored, and it is not changed.
            max_length: the most tokens of a text, special ones included.
            max_characters: the characters of a text that are tokenised; bounds the cost of very long texts.
            special_tokens: whether to add the tokenizer's own (such as [CLS] and [SEP]).
        """
        num_special = tokenizer.num_special_tokens_to_add(is_pair=False) if special_tokens else 0
        if max_length <= num_special:
            raise UsageError(
                f"max_length is {max_length}: it must exceed the {num_special} special tokens of each text"
            )
        if max_characters < 1:
            raise UsageError(f"max_characters is {max_characters}: at least 1 is needed")
        self._tokenizer = tokenizer
        if special_tokens or tokenizer.padding is not None or tokenizer.truncation is not None:
            self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(max_length)
        self._max_length, self._max_characters, self._special_tokens = max_length, max_characters, special_tokens
        self._dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32)
        has_added_tokens = bool(special_tokens or tokenizer.get_added_tokens_decoder())
        self._by_chunk = splits_at_spaces(tokenizer) and not has_added_tokens
        self._few = _ChunkIds(tokenizer) if self._by_chunk else None

    def tokenize(self, texts: Sequence[str], *, progress: bool = False) -> Tokens:
        """Tokenise texts, on all cores unless `TOKENIZERS_PARALLELISM=false` is set.

        `progress` shows a progress bar on stderr if that is a terminal.
        """
        if len(texts) < _FEWEST_REPEATING_TEXTS:
            flat = _flatten([self.token_ids(text) for text in texts])
            return Tokens(ids=flat[0].astype(self._dtype), offsets=np.append(0, np.cumsum(flat[1])))
        # Imported here because few texts do not need it, and it takes a while.
        from tqdm import tqdm

        ids, lengths = [np.empty(0, self._dtype)], [np.zeros(1, np.int64)]
        chunks = _Chunks(self._tokenizer) if self._by_chunk else None
        with tqdm(total=len(texts), desc="tokenize", unit="text", disable=None if progress else True) as bar:
            # A block at a time, so that the tokenizer's own objects of one block only are in memory.
            for start in range(0, len(texts), _BLOCK_TEXTS):
                block = [
                    _replace_surrogates(text[: self._max_characters]) for text in texts[start : start + _BLOCK_TEXTS]
                ]
                if chunks is not None and len(chunks) > _REMEMBERED_CHUNKS:
                    chunks = _Chunks(self._tokenizer)
                found = self._encode(block) if chunks is None else chunks.encode(block, self._max_length)
                ids.append(found[0].astype(self._dtype))
                lengths.append(found[1])
                bar.update(len(block))
        tokens = Tokens(ids=np.concatenate(ids), offsets=np.cumsum(np.concatenate(lengths), dtype=np.int64))
        for array in (tokens.ids, tokens.offsets):
            array.setflags(write=False)
        return tokens

    def token_ids(self, text: str) -> list[int]:
        """Tokenise one text."""
        text = _replace_surrogates(text[: self._max_characters])
        if self._few is not None:
            # What belongs to chunks beyond the limit is not looked up.
            chunks = _CONTROLS.sub("", text).split()
            return list(islice(chain.from_iterable(map(self._few.__getitem__, chunks)), self._max_length))
        return self._tokenizer.encode(text, add_special_tokens=self._special_tokens).ids[: self._max_length]

    def split(self, text: str) -> list[str]:
        """Cut a text into windows of at most `max_length` tokens each; very long texts end after 16 windows."""
        if len(text) <= self._max_length:
            return [text]
        text = _replace_surrogates(text[: _MAX_WINDOWS * self._max_characters])
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = [place for part in (encoding, *encoding.overflowing) for place in part.offsets]
        size = self._max_length - self._tokenizer.num_special_tokens_to_add(is_pair=False) * self._special_tokens
        starts = range(0, len(places), size)[:_MAX_WINDOWS]
        windows = [text[places[start][0] : places[start : start + size][-1][1]] for start in starts]
        return windows if len(windows) > 1 else [text]

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of all texts, one after the other, and the number of each."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=self._special_tokens)
        return _flatten([encoding.ids[: self._max_length] for encoding in encodings])


def _flatten(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of all rows, one after the other, and how many each has."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum())), lengths


class _ChunkIds(dict[str, list[int]]):
    """The ids of chunks of the texts so far, a bounded number of them: for few texts at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._split, self._words = _WordSplitter(tokenizer), _WordIds(tokenizer)

    def __missing__(self, chunk: str) -> list[int]:
        if len(chunk) > _KEPT_CHARACTERS:
            return [each for word in self._split(chunk) for each in self._words.find(word)]
        if len(self) >= _KEPT_CHUNKS:
            self.clear()
            self._words.clear()
        ids = self[chunk] = [each for word in self._split(chunk) for each in self._words[word]]
        return ids


class _WordIds(dict[str, list[int]]):
    """The ids of words met so far: most chunks that are new are known words with other punctuation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._pieces = tokenizer.model.tokenize

    def __missing__(self, word: str) -> list[int]:
        ids = self[word] = self.find(word)
        return ids

    def find(self, word: str) -> list[int]:
        """Tokenise a word, and do not remember it."""
        return [piece.id for piece in self._pieces(word)]


class _Chunks(dict[str, int]):
    """The numbers of the chunks met so far, and the ids of each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._split, self._words = _WordSplitter(tokenizer), _WordIds(tokenizer)
        self._ids: list[int] = []
        self._offsets = [0]

    def __missing__(self, chunk: str) -> int:
        for word in self._split(chunk):
            self._ids += self._words[word]
        self._offsets.append(len(self._ids))
        self[chunk] = number = len(self)
        return number

    def encode(self, texts: list[str], max_length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first ids of each text, one text after the other, and the number of each."""
        # Nearly every chunk has an id: chunks beyond the limit are needed only where one had none.
        rows = [_CONTROLS.sub("", text).split(None, max_length)[:max_length] for text in texts]
        ids, lengths = self._join(rows)
        short = [row for row, length in enumerate(lengths.tolist()) if length < max_length == len(rows[row])]
        if short:
            for row in short:
                rows[row] = _CONTROLS.sub("", texts[row]).split()
            ids, lengths = self._join(rows)
        places = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return ids[places < max_length], np.minimum(lengths, max_length)

    def _join(self, rows: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of rows of chunks, one row after the other, and the number of each row."""
        counts = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        numbers = np.fromiter(map(self.__getitem__, chain.from_iterable(rows)), np.int64, count=int(counts.sum()))
        known = Tokens(ids=np.array(self._ids, dtype=np.int32), offsets=np.array(self._offsets))
        ids, offsets = known.select(numbers)
        return ids, np.diff(offsets[np.concatenate([[0], np.cumsum(counts)])])


class _WordSplitter:
    """Splits a chunk of text into words as a tokenizer does, those of plain ASCII without calling it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        normalizer = tokenizer.normalizer
        self._normalize = str if normalizer is None else normalizer.normalize_str
        self._split = tokenizer.pre_tokenizer.pre_tokenize_str
        self._is_lower = splits_at_spaces(tokenizer) and normalizer.lowercase

    def __call__(self, chunk: str) -> list[str]:
        """Return the normalised words of a chunk, in order."""
        if self._is_lower and chunk.isascii() and chunk.isprintable():
            return _ASCII_WORD.findall(chunk.lower())
        return [word for word, _ in self._split(self._normalize(_replace_surrogates(chunk)))]


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer treats chunks between white space independently, as those of the BERT family do."""
    from tokenizers import normalizers, pre_tokenizers

    return (
        isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
        and tokenizer.normalizer.clean_text
        and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
    )


def count_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """Count the words of texts, normalised and split as by the tokenizer."""
    chunks: Counter[str] = Counter()
    if splits_at_spaces(tokenizer):
        for text in texts:
            chunks.update(_CONTROLS.sub("", text).split())
    else:
        chunks.update(texts)
    split = _WordSplitter(tokenizer)
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word in split(chunk):
            words[word] += count
    return words


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and tokenizers refuse, by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
