"""The static encoder's vocabulary: pretrained word pieces, and whole words of the data on top of them.

One WordPiece tokenizer holds both. It takes the longest match first, so a word of the data is one token with a vector
of its own, and a word never seen falls back to its pieces. A whole word starts as the mean of its pieces' vectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dexter.encoders.pretrained import locate
from dexter.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "[UNK]"
_COUNTED_WORDS = 1_000_000
_MAX_WORD_CHARACTERS = 100


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the vectors its tokens start from."""

    tokenizer: Tokenizer
    table_VD: Tensor
    """One row per token; mean zero, mean length one."""


def build_vocabulary(
    query_texts: Iterable[str],
    label_texts: Iterable[str],
    *,
    pretrained: str,
    dimension: int,
    max_words: int,
    min_count: int,
    seed: int,
) -> Vocabulary:
    """Count the words of the data, and give pieces and words their first vectors.

    Every word of a label text is kept; of the other words, those that occur `min_count` times, the most frequent first.
    """
    query_texts, label_texts = list(query_texts), list(label_texts)
    if pretrained == "none":
        pieces = _character_pieces([*query_texts, *label_texts])
        table_VD = _random_table(pieces.get_vocab_size(), dimension or 256, seed)
    else:
        pieces, table_VD = _read_pretrained(locate(pretrained))
        table_VD = _resize(table_VD, dimension or table_VD.shape[1], seed)
    known = pieces.get_vocab()
    words = _count_words(pieces, label_texts, max_words=max_words, min_count=1)
    words += _count_words(pieces, query_texts, max_words=max_words, min_count=min_count)
    new_words = [word for word in dict.fromkeys(words) if word not in known][:max_words]
    rows_WD = _mean_of_pieces(pieces, new_words, table_VD)
    return Vocabulary(_extended(pieces, new_words), torch.cat([table_VD, rows_WD]))


def _read_pretrained(folder: Path) -> tuple[Tokenizer, Tensor]:
    """The word-piece tokenizer and the centred token vectors of a Hugging Face model."""
    from safetensors import safe_open
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if not isinstance(tokenizer.model, models.WordPiece):
        raise ModelError(
            f"{folder}: its tokenizer is a {type(tokenizer.model).__name__}: the static encoder starts from models "
            "with word pieces (the BERT family); set encoder.pretrained to 'minilm' or 'none'"
        )
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        names = [name for name in weights.keys() if name.endswith("word_embeddings.weight")]  # noqa: SIM118
        if not names:
            raise ModelError(f"{folder}: no token vectors (word_embeddings.weight) in model.safetensors")
        table_VD = weights.get_tensor(names[0]).float()
    table_VD = table_VD[: tokenizer.get_vocab_size()]
    return tokenizer, _standardised(table_VD)


def _character_pieces(texts: list[str]) -> Tokenizer:
    """Pieces for use without any pretrained model: the characters of the data, within a word and at its start.

    Learned word pieces would be better pieces, but `tokenizers` numbers them in a new order in every process, and a
    resumed run must find the vocabulary it was started with.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    def tokenizer_of(vocabulary: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    words = _count_words(tokenizer_of({UNKNOWN: 0}), texts, max_words=_COUNTED_WORDS, min_count=1)
    characters = sorted({character for word in words for character in word})
    pieces = [UNKNOWN, *characters, *(f"##{character}" for character in characters)]
    return tokenizer_of({piece: position for position, piece in enumerate(pieces)})


def _count_words(pieces: Tokenizer, texts: list[str], *, max_words: int, min_count: int) -> list[str]:
    """The words of texts, as the tokenizer normalises and cuts them, most frequent first."""
    from tokenizers import Tokenizer, models, trainers

    counter = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    counter.normalizer, counter.pre_tokenizer = pieces.normalizer, pieces.pre_tokenizer
    trainer = trainers.WordLevelTrainer(vocab_size=max_words, min_frequency=min_count, show_progress=False)
    counter.train_from_iterator(texts, trainer)
    ranked = sorted(counter.get_vocab().items(), key=lambda item: item[1])
    return [word for word, _ in ranked if len(word) <= _MAX_WORD_CHARACTERS]


def _mean_of_pieces(pieces: Tokenizer, words: list[str], table_VD: Tensor) -> Tensor:
    """One vector per word: the mean over its pieces."""
    if not words:
        return table_VD.new_zeros(0, table_VD.shape[1])
    encodings = pieces.encode_batch_fast(words, add_special_tokens=False)
    lengths = np.array([len(encoding.ids) for encoding in encodings])
    flat = np.array([piece for encoding in encodings for piece in encoding.ids], dtype=np.int64)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    return torch.nn.functional.embedding_bag(torch.from_numpy(flat), table_VD, starts, mode="mean")


def _extended(pieces: Tokenizer, words: list[str]) -> Tokenizer:
    """The same tokenizer with more whole words and without special tokens, padding and truncation."""
    from tokenizers import Tokenizer, models

    vocabulary = pieces.get_vocab()
    vocabulary |= {word: len(vocabulary) + position for position, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=_MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = pieces.normalizer, pieces.pre_tokenizer
    return tokenizer


def _resize(table_VD: Tensor, dimension: int, seed: int) -> Tensor:
    """The table with fewer dimensions (its principal ones) or more (small random ones)."""
    size = table_VD.shape[1]
    if dimension == size:
        return table_VD
    if dimension < size:
        _, directions = torch.linalg.eigh(table_VD.T @ table_VD)
        return _standardised(table_VD @ directions[:, -dimension:])
    noise = _random_table(len(table_VD), dimension - size, seed) * 0.1
    return _standardised(torch.cat([table_VD, noise], dim=1))


def _random_table(rows: int, dimension: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return _standardised(torch.randn(rows, dimension, generator=generator))


def _standardised(table_VD: Tensor) -> Tensor:
    table_VD = table_VD - table_VD.mean(dim=0)
    mean_length: Tensor = torch.linalg.vector_norm(table_VD, dim=1).mean()
    return table_VD / mean_length
