"""The static encoder: a table of token vectors, a learned weighted mean, optionally a small layer; the CPU default.

    embedding = normalize( sum over tokens t of exp(token_weight[t] + position_weight[bucket]) * table[t] )

Token weights start at the logarithm of the inverse document frequency. Position weights start at zero and learn how
much the beginning of a query counts: a title, a name, a first sentence. Hashed n-grams are more rows of the same table.
A feature is a pair (row of the table, position bucket), packed into one integer, so that texts stay plain ragged ids.

Shapes: N texts, T features of all texts end to end, U distinct rows among them, D dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from dexter.data.tokens import LimitedTokenizer, Tokens
from dexter.encoders.folder import ENCODER_FILE, read_object, write_static_folder
from dexter.encoders.vocabulary import UNKNOWN, build_vocabulary
from dexter.errors import ModelError
from dexter.files import write_json

NUM_POSITIONS = 16
"""Buckets of positions, two per doubling; the last one is for label texts, whose tokens count alike."""
_LABEL_BUCKET = NUM_POSITIONS - 1
_TOKENS_PER_BATCH = 1_000_000
_CHARACTERS_PER_TOKEN = 24
_WEIGHTS_FILE = "static.safetensors"
_TOKENIZER_FILE = "static_tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class StaticSettings:
    """What a saved static encoder must remember beside its weights."""

    normalize: bool = True
    max_length_query: int = 192
    max_length_label: int = 32
    ngrams: int = 1
    ngram_buckets: int = 0
    """Rows of the table that hashed n-grams share."""
    positions: bool = True
    hidden: int = 0
    dropout: float = 0.0


class StaticEncoder(nn.Module):
    """A weighted mean of token vectors. See the module's text for the formula."""

    def __init__(
        self, tokenizer: object, table_RD: Tensor, settings: StaticSettings, *, known_labels: Tensor | None = None
    ) -> None:
        super().__init__()
        self.known_labels: Tensor
        self.register_buffer(
            "known_labels", torch.empty(0, dtype=torch.int64) if known_labels is None else known_labels
        )
        """Hashes of the label texts that have a row of their own, ascending; their rows are the last of the table."""
        self.tokenizer = tokenizer
        self._limited_tokenizers: dict[str, LimitedTokenizer] = {}
        self.settings = settings
        self.num_rows, self.dimension = table_RD.shape
        self.sparse = False
        """Whether the table's gradient is row-sparse; the trainer decides what is faster."""
        self.tokens_per_batch = _TOKENS_PER_BATCH
        self.table = nn.Parameter(table_RD.clone())
        self.token_weights = nn.Parameter(torch.zeros(self.num_rows))
        self.position_weights = nn.Parameter(torch.zeros(NUM_POSITIONS))
        if settings.hidden:
            self.expand = nn.Linear(self.dimension, settings.hidden)
            self.contract = nn.Linear(settings.hidden, self.dimension)
            nn.init.zeros_(self.contract.weight)
            nn.init.zeros_(self.contract.bias)

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
        max_words: int = 100_000,
        min_count: int = 2,
        seed: int = 0,
    ) -> StaticEncoder:
        """An encoder with the vocabulary of the data and pretrained vectors; `weigh_tokens` completes it."""
        vocabulary = build_vocabulary(
            query_texts,
            label_texts,
            pretrained=pretrained,
            dimension=dimension,
            max_words=max_words,
            min_count=min_count,
            seed=seed,
        )
        known_labels = torch.from_numpy(np.unique(_hashes(label_texts if label_vectors else [])))
        extra_rows = settings.ngram_buckets + len(known_labels)
        table_RD = torch.cat([vocabulary.table_VD, torch.zeros(extra_rows, vocabulary.table_VD.shape[1])])
        return cls(vocabulary.tokenizer, table_RD, settings, known_labels=known_labels)

    def tokenize(
        self,
        texts: Sequence[str],
        *,
        side: Literal["query", "label"],
        progress: bool = False,
    ) -> Tokens:
        """Texts as ragged features; queries carry positions, labels a constant one."""
        tokens = self._limited_tokenizer(side).tokenize(texts, progress=progress)
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
        ids = tokens.ids.astype(np.int64)
        positions = np.arange(len(ids)) - tokens.offsets[rows]
        features = ids + self._buckets(positions, side) * self.num_rows
        features, rows = self._with_ngrams(ids, rows, positions, features, side)
        if side == "label" and len(self.known_labels):
            features, rows = self._with_label_rows(features, rows, texts)
        keep = features % self.num_rows != self.tokenizer.token_to_id(UNKNOWN)  # type: ignore[attr-defined]
        features, rows = features[keep], rows[keep]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(tokens)))]).astype(np.int64)
        return Tokens(ids=features, offsets=offsets)

    def _limited_tokenizer(self, side: Literal["query", "label"]) -> LimitedTokenizer:
        """The tokenizer with the limits of a side, made when it is first needed."""
        if side not in self._limited_tokenizers:
            length = self.settings.max_length_query if side == "query" else self.settings.max_length_label
            self._limited_tokenizers[side] = LimitedTokenizer(
                self.tokenizer,  # type: ignore[arg-type]
                max_length=length,
                max_characters=length * _CHARACTERS_PER_TOKEN,
            )
        return self._limited_tokenizers[side]

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Embed ragged features: [N, D]. A text without any known token becomes the zero vector."""
        rows_T, buckets_T = ids % self.num_rows, ids // self.num_rows
        log_weights_T = self.token_weights[rows_T]
        if self.settings.positions:
            log_weights_T = log_weights_T + self.position_weights[buckets_T]
        weights_T = log_weights_T.exp()
        if self.training and self.settings.dropout:
            kept_T = torch.rand_like(weights_T) >= self.settings.dropout
            weights_T = weights_T * (kept_T | (buckets_T == _LABEL_BUCKET))
        sums_ND = self._bags(rows_T, offsets, weights_T)
        if not (self.settings.normalize or self.settings.hidden):
            totals_N = self._bag_totals(weights_T, offsets)
            return sums_ND / totals_N.clamp_min(1e-12)[:, None]
        vectors_ND = functional.normalize(sums_ND, dim=-1)
        if self.settings.hidden:
            vectors_ND = vectors_ND + self.contract(functional.gelu(self.expand(vectors_ND)))
            vectors_ND = functional.normalize(vectors_ND, dim=-1) if self.settings.normalize else vectors_ND
        return vectors_ND

    def weigh_tokens(self, tokens: Tokens) -> None:
        """Set each token's weight to the logarithm of its inverse document frequency among the queries."""
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
        pairs = np.unique(rows * self.num_rows + tokens.ids % self.num_rows)
        counts = np.bincount(pairs % self.num_rows, minlength=self.num_rows)
        frequencies = np.log((1 + len(tokens)) / (1 + counts)) + 1
        with torch.no_grad():
            self.token_weights.copy_(torch.from_numpy(np.log(frequencies)))

    def micro_batches(self, lengths: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Cut texts into runs of at most `tokens_per_batch` features; there is no padding to avoid."""
        ends = np.cumsum(lengths, dtype=np.int64)
        groups = (np.maximum(ends - 1, 0)) // self.tokens_per_batch
        return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(groups)) + 1) if len(lengths) else []

    def save(self, folder: Path) -> None:
        """Write the encoder: our files, and a sentence-transformers folder where that can hold it exactly."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self.tokenizer
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        save_file(state, folder / _WEIGHTS_FILE)
        tokenizer.save(str(folder / _TOKENIZER_FILE))  # type: ignore[attr-defined]
        write_json(folder / ENCODER_FILE, {"kind": "static", **asdict(self.settings)})
        if self._is_plain():
            folded_RD = state["table"] * state["token_weights"].exp()[:, None]
            folded_RD[tokenizer.token_to_id(UNKNOWN)] = 0  # type: ignore[attr-defined]
            write_static_folder(folder, table=folded_RD, tokenizer=tokenizer, normalize=True)  # type: ignore[arg-type]

    @classmethod
    def load(cls, folder: Path) -> StaticEncoder:
        """Read an encoder written by `save`."""
        from tokenizers import Tokenizer

        described = read_object(folder / ENCODER_FILE)
        described.pop("kind", None)
        try:
            settings = StaticSettings(**described)
            state = load_file(folder / _WEIGHTS_FILE)
            tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER_FILE))
            encoder = cls(tokenizer, state["table"], settings, known_labels=state["known_labels"])
            encoder.load_state_dict(state)
        except (TypeError, KeyError, RuntimeError, OSError, SafetensorError) as error:
            raise ModelError(f"{folder}: not a static encoder of this version ({error})") from None
        return encoder

    def _is_plain(self) -> bool:
        """Whether a mean of fixed token vectors says it all: no positions, n-grams, label rows or layer."""
        s = self.settings
        return s.normalize and not (s.positions or s.ngram_buckets or len(self.known_labels) or s.hidden)

    def _bags(self, rows_T: Tensor, offsets: Tensor, weights_T: Tensor) -> Tensor:
        if not self.sparse:
            return functional.embedding_bag(
                rows_T, self.table, offsets, mode="sum", per_sample_weights=weights_T, include_last_offset=True
            )
        distinct_U, places_T = torch.unique(rows_T, return_inverse=True)
        vectors_UD = functional.embedding(distinct_U, self.table, sparse=True)
        return functional.embedding_bag(
            places_T, vectors_UD, offsets, mode="sum", per_sample_weights=weights_T, include_last_offset=True
        )

    @staticmethod
    def _bag_totals(weights_T: Tensor, offsets: Tensor) -> Tensor:
        return torch.segment_reduce(weights_T, "sum", lengths=offsets.diff(), unsafe=True)

    def _buckets(self, positions: NDArray[np.int64], side: str) -> NDArray[np.int64]:
        if side == "label":
            return np.full(len(positions), _LABEL_BUCKET, dtype=np.int64)
        buckets: NDArray[np.int64] = np.floor(2 * np.log2(positions + 1)).astype(np.int64)
        return buckets.clip(max=_LABEL_BUCKET - 1)

    def _with_ngrams(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        features: NDArray[np.int64],
        side: str,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Add the hashed runs of neighbouring tokens, each with the position of its first token."""
        parts, places = [features], [rows]
        first_row = self.num_rows - self.settings.ngram_buckets - len(self.known_labels)
        hashed = ids.astype(np.uint64)
        for length in range(2, self.settings.ngrams + 1):
            hashed = hashed[:-1] * np.uint64(0x9E3779B97F4A7C15) + ids[length - 1 :].astype(np.uint64) + np.uint64(1)
            inside = np.flatnonzero(rows[: len(hashed)] == rows[length - 1 :])
            bucket = (hashed[inside] >> np.uint64(20)) % np.uint64(self.settings.ngram_buckets)
            parts.append(first_row + bucket.astype(np.int64) + self._buckets(positions[inside], side) * self.num_rows)
            places.append(rows[inside])
        return _merge(parts, places)

    def _with_label_rows(
        self, features: NDArray[np.int64], rows: NDArray[np.int64], texts: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Add one feature per known label text: the row of its own. Labels that came later have their words only."""
        known, hashes = self.known_labels.cpu().numpy(), _hashes(texts)
        places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        found = np.flatnonzero(known[places] == hashes)
        own = self.num_rows - len(known) + places[found]
        return _merge([features, own + _LABEL_BUCKET * self.num_rows], [rows, found])


def _hashes(texts: Sequence[str]) -> NDArray[np.int64]:
    """A 64-bit hash of each text."""
    digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), dtype=np.int64)


def _merge(
    parts: list[NDArray[np.int64]], places: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate features and bring those of one text together again."""
    if len(parts) == 1:
        return parts[0], places[0]
    features, rows = np.concatenate(parts), np.concatenate(places)
    order = np.argsort(rows, kind="stable")
    return features[order], rows[order]
