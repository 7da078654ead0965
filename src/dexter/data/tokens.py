"""Texts tokenised once, into ragged ids with offsets: no padding is stored, and batches are gathered without a loop.

With a cache folder the ids are memory-mapped from disk, under a name made of everything they depend on: the tokenizer,
the texts and the settings. A cache entry that does not match its manifest is rebuilt, never trusted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tqdm import tqdm

from dexter.errors import ModelError, UsageError
from dexter.files import atomic_folder, verify_manifest, write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_BLOCK_TEXTS = 8192
_LAYOUT = 1
"""Part of every cache key: a change of the files' layout makes old entries unknown, not wrong."""
_IDS, _OFFSETS, _FACTS = "ids.bin", "offsets.npy", "tokens.json"


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
    """Flat ids, uint16 or int32 by the size of the vocabulary; a read-only memory map when cached."""
    offsets: np.ndarray
    """int64, one more than there are texts."""
    num_truncated: int
    """Texts that lost characters or tokens to a limit."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text."""
        return np.diff(self.offsets)

    def row(self, row: int) -> np.ndarray:
        """The ids of one text; negative numbers count from the end."""
        row = range(len(self))[row]
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def part(self, rows: slice) -> Tokens:
        """A run of neighbouring texts, sharing their memory."""
        start, stop, _ = rows.indices(len(self))
        offsets = self.offsets[start : stop + 1]
        return Tokens(ids=self.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0], num_truncated=0)

    def select(self, rows: Sequence[int] | np.ndarray) -> Ragged:
        """The ids of some texts, in the order given, repeats allowed."""
        rows = np.asarray(rows, dtype=np.int64)
        starts = self.offsets[:-1][rows]
        lengths = self.offsets[1:][rows] - starts
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.repeat(starts - offsets[:-1], lengths)
        positions += np.arange(offsets[-1])
        return Ragged(np.asarray(self.ids[positions]), offsets)


def cache_key(texts: Sequence[str], facts: dict[str, str | int]) -> str:
    """The name of a cache entry: a hash of the texts and of everything else that decides the ids."""
    digest = hashlib.sha256(json.dumps(facts | {"layout": _LAYOUT}, sort_keys=True).encode())
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:40]


def load_tokens(folder: Path) -> Tokens:
    """Open a cache entry; `ModelError` if anything in it differs from its manifest."""
    verify_manifest(folder)
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        offsets = np.load(folder / _OFFSETS, allow_pickle=False)
        dtype = np.dtype({"uint16": np.uint16, "int32": np.int32}[facts["dtype"]])
        # An empty file cannot be mapped.
        ids = np.memmap(folder / _IDS, dtype=dtype, mode="r") if offsets[-1] else np.empty(0, dtype)
        num_truncated = int(facts["num_truncated"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ModelError(f"{folder}: not a readable token cache ({error}): delete it") from error
    if len(ids) != offsets[-1]:
        raise ModelError(f"{folder}: holds {len(ids)} ids where its offsets promise {offsets[-1]}: delete it")
    return Tokens(ids=ids, offsets=offsets, num_truncated=num_truncated)


@dataclass(frozen=True, eq=False)
class _Block:
    """The ids of some consecutive texts."""

    ids: np.ndarray
    lengths: np.ndarray
    num_truncated: int


class LimitedTokenizer:
    """A private copy of a tokenizer with limits of its own. To make one takes longer than to tokenise a text."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, max_characters: int, special_tokens: bool = False
    ) -> None:
        """Copy a tokenizer.

        Args:
            tokenizer: a fast tokenizer; its own padding and truncation settings are ignored, and it is not changed.
            max_length: most tokens of a text, special ones included.
            max_characters: characters of a text that it gets to see; cuts the cost of very long texts.
            special_tokens: add its own (as [CLS] and [SEP]): transformers want them, a static encoder does not.
        """
        num_special = tokenizer.num_special_tokens_to_add(is_pair=False) if special_tokens else 0
        if max_length <= num_special:
            raise UsageError(
                f"max_length is {max_length}: it must exceed the {num_special} special tokens of each text"
            )
        if max_characters < 1:
            raise UsageError(f"max_characters is {max_characters}: at least 1 is needed")
        description = tokenizer.to_str()
        self._tokenizer = type(tokenizer).from_str(description)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length)
        self._max_length, self._max_characters, self._special_tokens = max_length, max_characters, special_tokens
        self.dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.int32)
        self.facts: dict[str, str | int] = {
            "tokenizer": hashlib.sha256(description.encode()).hexdigest(),
            "max_length": max_length,
            "max_characters": max_characters,
            "special_tokens": int(special_tokens),
        }

    def tokenize(self, texts: Sequence[str], *, cache: Path | None = None, progress: bool = False) -> Tokens:
        """The token ids of texts, made on all cores unless `TOKENIZERS_PARALLELISM=false` is set.

        Args:
            texts: the texts.
            cache: folder that holds cached results; None keeps the ids in memory.
            progress: show a bar on stderr, if that is a terminal.
        """
        if cache is None:
            return _in_memory(texts, self, progress=progress)
        folder = Path(cache) / cache_key(texts, self.facts)
        if folder.is_dir():
            try:
                return load_tokens(folder)
            except ModelError as error:
                logger.warning("token cache is damaged and will be rebuilt: %s", error)
        with atomic_folder(folder, replace=True) as temporary:
            _write(temporary, texts, self, progress=progress)
        return load_tokens(folder)

    def blocks(self, texts: Sequence[str], *, progress: bool) -> Iterator[_Block]:
        """Encode the texts a block at a time."""
        with tqdm(total=len(texts), desc="tokenize", unit="text", disable=None if progress else True) as bar:
            for start in range(0, len(texts), _BLOCK_TEXTS):
                block = texts[start : start + _BLOCK_TEXTS]
                yield self._encode(block)
                bar.update(len(block))

    def _encode(self, texts: Sequence[str]) -> _Block:
        cut = [_valid(text[: self._max_characters]) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(cut, add_special_tokens=self._special_tokens)
        rows = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        truncated = np.fromiter((len(text) > self._max_characters for text in texts), dtype=bool, count=len(rows))
        for row in np.flatnonzero(lengths == self._max_length):
            truncated[row] |= bool(encodings[row].overflowing)
        ids = np.fromiter(chain.from_iterable(rows), dtype=self.dtype, count=int(lengths.sum()))
        return _Block(ids, lengths, int(truncated.sum()))


def _valid(text: str) -> str:
    """The text with lone surrogates, which JSON can smuggle in and tokenizers refuse, replaced by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _in_memory(texts: Sequence[str], tokenizer: LimitedTokenizer, *, progress: bool) -> Tokens:
    blocks = list(tokenizer.blocks(texts, progress=progress))
    ids = np.concatenate([np.empty(0, tokenizer.dtype), *(block.ids for block in blocks)])
    ids.setflags(write=False)
    return Tokens(
        ids=ids,
        offsets=_offsets([block.lengths for block in blocks]),
        num_truncated=sum(block.num_truncated for block in blocks),
    )


def _write(folder: Path, texts: Sequence[str], tokenizer: LimitedTokenizer, *, progress: bool) -> None:
    """Write a cache entry a block at a time, so that only the offsets are ever held in memory."""
    lengths, num_truncated = [], 0
    with open(folder / _IDS, "wb") as handle:
        for block in tokenizer.blocks(texts, progress=progress):
            block.ids.tofile(handle)
            lengths.append(block.lengths)
            num_truncated += block.num_truncated
    np.save(folder / _OFFSETS, _offsets(lengths), allow_pickle=False)
    write_json(folder / _FACTS, tokenizer.facts | {"dtype": tokenizer.dtype.name, "num_truncated": num_truncated})


def _offsets(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """Where each text starts, and where the last one ends."""
    offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)
    offsets.setflags(write=False)
    return offsets
