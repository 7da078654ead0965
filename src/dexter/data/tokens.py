"""Tokenised texts as ragged token ids: one flat array with offsets, without padding; a batch is gathered from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from dexter.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BLOCK_TEXTS = 8192


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

    def part(self, rows: slice) -> Tokens:
        """Return a run of consecutive texts, sharing their memory."""
        start, stop, _ = rows.indices(len(self))
        offsets = self.offsets[start : stop + 1]
        return Tokens(ids=self.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])

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
    """A private copy of a tokenizer with its own limits. Making one takes longer than tokenising a text: keep it."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, max_characters: int, special_tokens: bool = False
    ) -> None:
        """Copy a tokenizer.

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
        self._tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)
        self._max_characters, self._special_tokens = max_characters, special_tokens
        self._dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32)

    def tokenize(self, texts: Sequence[str], *, progress: bool = False) -> Tokens:
        """Tokenise texts, on all cores unless `TOKENIZERS_PARALLELISM=false` is set.

        `progress` shows a progress bar on stderr if that is a terminal.
        """
        ids, lengths = [np.empty(0, self._dtype)], [np.zeros(1, np.int64)]
        with tqdm(total=len(texts), desc="tokenize", unit="text", disable=None if progress else True) as bar:
            # A block at a time, so that the tokenizer's own objects of one block only are in memory.
            for start in range(0, len(texts), _BLOCK_TEXTS):
                block = [
                    _replace_surrogates(text[: self._max_characters]) for text in texts[start : start + _BLOCK_TEXTS]
                ]
                encodings = self._tokenizer.encode_batch_fast(block, add_special_tokens=self._special_tokens)
                rows = [encoding.ids for encoding in encodings]
                lengths.append(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))
                count = int(lengths[-1].sum())
                ids.append(np.fromiter(chain.from_iterable(rows), dtype=self._dtype, count=count))
                bar.update(len(block))
        tokens = Tokens(ids=np.concatenate(ids), offsets=np.cumsum(np.concatenate(lengths), dtype=np.int64))
        for array in (tokens.ids, tokens.offsets):
            array.setflags(write=False)
        return tokens


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and tokenizers refuse, by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
