"""The static encoder, the default on a CPU, as it is trained: a learned weighted mean of token vectors.

The formula is in `dexter.encoders.static_arrays`, which tokenises, reads and writes the folder, and encodes once it is
trained. Token weights start at the logarithm of the inverse document frequency. Position weights start at zero and
learn how much the beginning of a query counts: a title, a name, a first sentence.

The vocabulary is one WordPiece tokenizer with pretrained pieces and the whole words of the data. It takes the longest
match, so that a word of the data is one token with a vector of its own, initialised with the mean of its pieces'
vectors; any other word is split into pieces.

Shapes: N texts, T features of all texts end to end, U distinct rows among them, R rows of the table, V tokens, W words,
D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dexter.data.tokens import Tokens, count_words
from dexter.encoders import embed
from dexter.encoders.pretrained import locate
from dexter.encoders.static_arrays import (
    LABEL_BUCKET,
    NUM_POSITIONS,
    UNKNOWN,
    StaticArrays,
    StaticSettings,
    StaticTokenizer,
    count_label_rows,
    hash_texts,
)
from dexter.errors import ModelError
from dexter.types import Side

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_WORD_COUNT = 2
"""A word of the queries needs this many training queries to get a vector; words of labels always get one."""
_TOKENS_PER_BATCH = 1_000_000
_COUNTED_WORDS = 1_000_000
_MAX_WORD_CHARACTERS = 100
_TINY = 1e-12
"""Smallest sum of weights that a text's weights are divided by."""


class StaticEncoder(nn.Module):
    """A weighted mean of token vectors; `tokens` are made by the tokenizer given, the table starts as given."""

    def __init__(self, tokens: StaticTokenizer, table_RD: Tensor) -> None:
        super().__init__()
        self.tokens, self.settings = tokens, tokens.settings
        self.num_rows, self.dimension = table_RD.shape
        self.sparse = False
        """Whether the table's gradient is row-sparse; set by the trainer."""
        self.tokens_per_batch = _TOKENS_PER_BATCH
        self.table = nn.Parameter(table_RD.clone())
        self.token_weights = nn.Parameter(torch.zeros(self.num_rows))
        self.position_weights = nn.Parameter(torch.zeros(NUM_POSITIONS))

    @classmethod
    def build(
        cls,
        query_texts: Sequence[str],
        label_texts: Sequence[str],
        settings: StaticSettings,
        *,
        pretrained: str = "minilm",
        dimension: int = 0,
        label_vectors: bool = False,
        labels_per_vector: int = 1,
        max_words: int = 100_000,
        min_count: int = MIN_WORD_COUNT,
        seed: int = 0,
    ) -> StaticEncoder:
        """Build an encoder with the vocabulary of the data and pretrained vectors; call `weigh_tokens` next.

        Which labels share a vector, if more than one does, is to be set by `tokens.share_label_rows`; all these vectors
        are zero at first.
        """
        vocabulary = build_vocabulary(
            query_texts,
            label_texts,
            pretrained=pretrained,
            dimension=dimension,
            max_words=max_words,
            min_count=min_count,
            seed=seed,
        )
        known_labels = np.unique(hash_texts(label_texts if label_vectors else []))
        num_label_rows = count_label_rows(len(known_labels), labels_per_vector)
        extra_rows = settings.ngram_buckets + num_label_rows
        table_RD = torch.cat([vocabulary.table_VD, torch.zeros(extra_rows, vocabulary.table_VD.shape[1])])
        tokens = StaticTokenizer(
            vocabulary.tokenizer,
            settings,
            num_rows=len(table_RD),
            known_labels=known_labels,
            label_rows=np.arange(len(known_labels)) % max(1, num_label_rows),
        )
        return cls(tokens, table_RD)

    def tokenize(self, texts: Sequence[str], *, side: Side, progress: bool = False) -> Tokens:
        """Turn texts into ragged features; those of labels all have the same position bucket."""
        return self.tokens.tokenize(texts, side=side, progress=progress)

    def split_query(self, text: str) -> list[str]:
        """Cut a query text into windows of the length that is read."""
        return self.tokens.split_query(text)

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Embed texts without dropout and return an array."""
        vectors_ND: NDArray[np.float32] = embed(self, tokens).numpy()
        return vectors_ND

    def arrays(self) -> StaticArrays:
        """Return the encoder as it is now, for use without training; on a CPU it shares the weights."""
        table_RD, token_weights_R, position_weights = (
            parameter.detach().float().cpu().numpy()
            for parameter in (self.table, self.token_weights, self.position_weights)
        )
        return StaticArrays(
            tokens=self.tokens,
            table_RD=table_RD,
            token_weights_R=token_weights_R,
            position_weights=position_weights,
        )

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Embed ragged features: [N, D]. A text without any known token gives the zero vector."""
        rows_T, buckets_T = ids % self.num_rows, ids // self.num_rows
        log_weights_T = self.token_weights[rows_T]
        if self.settings.positions:
            log_weights_T = log_weights_T + self.position_weights[buckets_T]
        weights_T = log_weights_T.exp()
        if self.training and self.settings.token_dropout:
            kept_T = torch.rand_like(weights_T) >= self.settings.token_dropout
            weights_T = weights_T * (kept_T | (buckets_T == LABEL_BUCKET))
        if self.settings.normalize:
            return functional.normalize(self._sum_bags(rows_T, offsets, weights_T), dim=-1)
        # A weight is divided by the sum of its text: that is one number for each feature, the sums of vectors have D.
        lengths_N = offsets.diff()
        totals_N = torch.segment_reduce(weights_T, "sum", lengths=lengths_N, unsafe=True).clamp_min(_TINY)
        shares_T = weights_T / totals_N.repeat_interleave(lengths_N, output_size=len(weights_T))
        return self._sum_bags(rows_T, offsets, shares_T)

    def weigh_tokens(self, tokens: Tokens) -> None:
        """Set each token's weight to the logarithm of its inverse document frequency in the queries."""
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
        # np.unique takes ten times as long: it hashes.
        pairs = np.sort(rows * self.num_rows + tokens.ids % self.num_rows)
        pairs = pairs[np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]
        counts = np.bincount(pairs % self.num_rows, minlength=self.num_rows)
        frequencies = np.log((1 + len(tokens)) / (1 + counts)) + 1
        with torch.no_grad():
            self.token_weights.copy_(torch.from_numpy(np.log(frequencies)))

    def micro_batches(self, lengths: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Split texts, in order, into batches of about `tokens_per_batch` features; there is no padding to avoid."""
        ends = np.cumsum(lengths, dtype=np.int64)
        groups = (np.maximum(ends - 1, 0)) // self.tokens_per_batch
        return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(groups)) + 1) if len(lengths) else []

    def save(self, folder: Path) -> None:
        """Write the encoder for use."""
        self.arrays().save(folder)

    @classmethod
    def load(cls, folder: Path) -> StaticEncoder:
        """Read an encoder written by `save`, to train it further."""
        arrays = StaticArrays.load(folder)
        encoder = cls(arrays.tokens, torch.tensor(arrays.table_RD))
        with torch.no_grad():
            encoder.token_weights.copy_(torch.tensor(arrays.token_weights_R))
            encoder.position_weights.copy_(torch.tensor(arrays.position_weights))
        return encoder

    def _sum_bags(self, rows_T: Tensor, offsets: Tensor, weights_T: Tensor) -> Tensor:
        if not self.sparse:
            return functional.embedding_bag(
                rows_T, self.table, offsets, mode="sum", per_sample_weights=weights_T, include_last_offset=True
            )
        distinct_U, places_T = torch.unique(rows_T, return_inverse=True)
        vectors_UD = functional.embedding(distinct_U, self.table, sparse=True)
        return functional.embedding_bag(
            places_T, vectors_UD, offsets, mode="sum", per_sample_weights=weights_T, include_last_offset=True
        )


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and the initial vectors of its tokens."""

    tokenizer: Tokenizer
    table_VD: Tensor
    """One row per token; the mean row is zero, the mean length of the pretrained rows one."""


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
    """Collect the words of the data and initialise the vectors of pieces and words.

    All words of label texts come first, then the words that occur at least `min_count` times in queries; both by
    falling frequency, together at most `max_words`.
    """
    query_texts, label_texts = list(query_texts), list(label_texts)
    if pretrained == "none":
        pieces = _character_pieces([*query_texts, *label_texts])
        table_VD = _random_table(pieces.get_vocab_size(), dimension or 256, seed)
    else:
        pieces, table_VD = _read_pretrained(locate(pretrained))
        table_VD = _resize(table_VD, dimension or table_VD.shape[1], seed)
    known = pieces.get_vocab()
    words = _frequent_words(pieces, label_texts, max_words=max_words, min_count=1)
    words += _frequent_words(pieces, query_texts, max_words=max_words, min_count=min_count)
    new_words = [word for word in dict.fromkeys(words) if word not in known][:max_words]
    rows_WD = _mean_of_pieces(pieces, new_words, table_VD)
    return Vocabulary(_extended(pieces, new_words), torch.cat([table_VD, rows_WD]))


def _read_pretrained(folder: Path) -> tuple[Tokenizer, Tensor]:
    """Read the WordPiece tokenizer and the standardised token vectors of a Hugging Face model."""
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
    """Return a tokenizer for use without a pretrained model, whose pieces are the characters of the data.

    Learned word pieces would be better, but `tokenizers` numbers them differently in every process, and a resumed run
    needs the vocabulary it was started with.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    def make_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    words = _frequent_words(make_tokenizer({UNKNOWN: 0}), texts, max_words=_COUNTED_WORDS, min_count=1)
    characters = sorted({character for word in words for character in word})
    pieces = [UNKNOWN, *characters, *(f"##{character}" for character in characters)]
    return make_tokenizer({piece: position for position, piece in enumerate(pieces)})


def _frequent_words(pieces: Tokenizer, texts: list[str], *, max_words: int, min_count: int) -> list[str]:
    """Return the words of texts, normalised and split as by the tokenizer, most frequent first."""
    counts = count_words(pieces, texts)
    ranked = sorted((-count, word) for word, count in counts.items() if count >= min_count)[:max_words]
    return [word for _, word in ranked if len(word) <= _MAX_WORD_CHARACTERS]


def _mean_of_pieces(pieces: Tokenizer, words: list[str], table_VD: Tensor) -> Tensor:
    """Return one vector per word: the mean over its pieces."""
    if not words:
        return table_VD.new_zeros(0, table_VD.shape[1])
    encodings = pieces.encode_batch_fast(words, add_special_tokens=False)
    lengths = np.array([len(encoding.ids) for encoding in encodings])
    flat = np.array([piece for encoding in encodings for piece in encoding.ids], dtype=np.int64)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    return torch.nn.functional.embedding_bag(torch.from_numpy(flat), table_VD, starts, mode="mean")


def _extended(pieces: Tokenizer, words: list[str]) -> Tokenizer:
    """Return a tokenizer with whole words added and without special tokens, padding and truncation."""
    from tokenizers import Tokenizer, models

    vocabulary = pieces.get_vocab()
    vocabulary |= {word: len(vocabulary) + position for position, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=_MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = pieces.normalizer, pieces.pre_tokenizer
    return tokenizer


def _resize(table_VD: Tensor, dimension: int, seed: int) -> Tensor:
    """Reduce the table to its principal dimensions, or add dimensions of small random numbers."""
    size = table_VD.shape[1]
    if dimension == size:
        return table_VD
    if dimension < size:
        _, directions = torch.linalg.eigh(table_VD.T @ table_VD)
        return _standardised(table_VD @ directions[:, -dimension:])
    noise = _random_table(len(table_VD), dimension - size, seed) * 0.1
    return _standardised(torch.cat([table_VD, noise], dim=1))


def _random_table(rows: int, dimension: int, seed: int) -> Tensor:
    """Return standardised random vectors."""
    generator = torch.Generator().manual_seed(seed)
    return _standardised(torch.randn(rows, dimension, generator=generator))


def _standardised(table_VD: Tensor) -> Tensor:
    """Subtract the mean row and scale rows to mean length one."""
    table_VD = table_VD - table_VD.mean(dim=0)
    mean_length: Tensor = torch.linalg.vector_norm(table_VD, dim=1).mean()
    return table_VD / mean_length
