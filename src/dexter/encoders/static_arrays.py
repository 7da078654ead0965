"""The static encoder in use: token ids, a table of token vectors and a weighted mean, on arrays; and its folder.

    embedding = normalize( sum over tokens t of exp(token_weight[t] + position_weight[bucket]) * table[t] )

Hashed n-grams are more rows of the same table. A feature is a pair (row of the table, position bucket), packed into one
integer, so that a text is a list of ids. `dexter.encoders.static` trains one; nothing here needs torch.

Shapes: N texts, T features of all texts end to end, R rows of the table, D dimensions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dexter.data.tokens import LimitedTokenizer, Tokens
from dexter.encoders.folder import ENCODER_FILE, write_static_folder
from dexter.encoders.head_arrays import unit_rows
from dexter.errors import ModelError
from dexter.files import read_object, write_json
from dexter.tensor_files import read_tensors, write_tensors
from dexter.types import Side

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "[UNK]"
NUM_POSITIONS = 16
"""Position buckets, two per doubling; the last one is for label texts, whose tokens have equal weight."""
LABEL_BUCKET = NUM_POSITIONS - 1
_CHARACTERS_PER_TOKEN = 24
_WEIGHTS_FILE = "static.safetensors"
_TOKENIZER_FILE = "static_tokenizer.json"
_TINY = 1e-12
_NO_LABELS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class StaticSettings:
    """Settings that a saved static encoder needs beside its weights."""

    normalize: bool = True
    max_length_query: int = 192
    max_length_label: int = 32
    ngrams: int = 1
    ngram_buckets: int = 0
    """Number of rows of the table that hashed n-grams share."""
    positions: bool = True
    token_dropout: float = 0.0


class StaticTokenizer:
    """Turns texts into features.

    Args:
        tokenizer: without padding and truncation.
        settings: lengths, n-grams.
        num_rows: of the table.
        known_labels: hashes of the label texts that have a row beside their words, ascending; these rows are the last
            of the table.
        label_rows: which of these rows each of them has, counted from the first; one each, in order, if None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: StaticSettings,
        *,
        num_rows: int,
        known_labels: NDArray[np.int64] = _NO_LABELS,
        label_rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.tokenizer, self.settings, self.num_rows, self.known_labels = tokenizer, settings, num_rows, known_labels
        self.label_rows = np.arange(len(known_labels)) if label_rows is None else label_rows
        lengths: dict[Side, int] = {"query": settings.max_length_query, "label": settings.max_length_label}
        self._limited: dict[Side, LimitedTokenizer] = {
            side: LimitedTokenizer(tokenizer, max_length=length, max_characters=length * _CHARACTERS_PER_TOKEN)
            for side, length in lengths.items()
        }
        self._unknown = tokenizer.token_to_id(UNKNOWN)
        self._query_buckets = _buckets(np.arange(settings.max_length_query), "query") * num_rows

    def tokenize(self, texts: Sequence[str], *, side: Side, progress: bool = False) -> Tokens:
        """Turn texts into ragged features; those of labels all have the same position bucket."""
        if len(texts) == 1 and side == "query" and self.settings.ngrams == 1:
            ids = np.array(self._limited[side].token_ids(texts[0]), dtype=np.int64)
            features = (ids + self._query_buckets[: len(ids)])[ids != self._unknown]
            return Tokens(ids=features, offsets=np.array([0, len(features)]))
        tokens = self._limited[side].tokenize(texts, progress=progress)
        rows = np.repeat(np.arange(len(tokens)), tokens.lengths)
        ids = tokens.ids.astype(np.int64)
        positions = np.arange(len(ids)) - tokens.offsets[rows]
        features = ids + _buckets(positions, side) * self.num_rows
        features, rows = self._add_ngrams(ids, rows, positions, features, side)
        if side == "label" and len(self.known_labels):
            features, rows = self._add_label_rows(features, rows, texts)
        keep = features % self.num_rows != self._unknown
        features, rows = features[keep], rows[keep]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(tokens)))]).astype(np.int64)
        return Tokens(ids=features, offsets=offsets)

    def split_query(self, text: str) -> list[str]:
        """Cut a query text into windows of the length that is read."""
        return self._limited["query"].split(text)

    @property
    def first_label_row(self) -> int:
        """The first row of the table that belongs to labels."""
        return self.num_rows - (int(self.label_rows.max()) + 1 if len(self.label_rows) else 0)

    def share_label_rows(self, label_texts: Sequence[str], clusters: Sequence[NDArray[np.integer]]) -> None:
        """Let the labels of a cluster have one row in common; clusters hold places among all known label texts."""
        places = np.searchsorted(self.known_labels, hash_texts(label_texts))
        owners = np.repeat(np.arange(len(clusters)), [len(members) for members in clusters])
        self.label_rows[places[np.concatenate(clusters)]] = owners

    def _add_ngrams(
        self,
        ids: NDArray[np.int64],
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        features: NDArray[np.int64],
        side: Side,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Add hashed n-grams, each with the position of its first token."""
        parts, owners = [features], [rows]
        first_row = self.first_label_row - self.settings.ngram_buckets
        hashed = ids.astype(np.uint64)
        for length in range(2, self.settings.ngrams + 1):
            hashed = hashed[:-1] * np.uint64(0x9E3779B97F4A7C15) + ids[length - 1 :].astype(np.uint64) + np.uint64(1)
            inside = np.flatnonzero(rows[: len(hashed)] == rows[length - 1 :])
            bucket = (hashed[inside] >> np.uint64(20)) % np.uint64(self.settings.ngram_buckets)
            parts.append(first_row + bucket.astype(np.int64) + _buckets(positions[inside], side) * self.num_rows)
            owners.append(rows[inside])
        return _merge(parts, owners)

    def _add_label_rows(
        self, features: NDArray[np.int64], rows: NDArray[np.int64], texts: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Add to each label text that was known when the encoder was built the feature of its own or shared row."""
        known, hashes = self.known_labels, hash_texts(texts)
        places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        found = np.flatnonzero(known[places] == hashes)
        own = self.first_label_row + self.label_rows[places[found]]
        return _merge([features, own + LABEL_BUCKET * self.num_rows], [rows, found])


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticArrays:
    """A static encoder that only encodes."""

    tokens: StaticTokenizer
    table_RD: NDArray[np.float32]
    token_weights_R: NDArray[np.float32]
    """Logarithms of the weights."""
    position_weights: NDArray[np.float32]

    @property
    def dimension(self) -> int:
        """Size of a vector."""
        return int(self.table_RD.shape[1])

    def tokenize(self, texts: Sequence[str], *, side: Side, progress: bool = False) -> Tokens:
        """Turn texts into ragged features."""
        return self.tokens.tokenize(texts, side=side, progress=progress)

    def split_query(self, text: str) -> list[str]:
        """Cut a query text into windows of the length that is read."""
        return self.tokens.split_query(text)

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Embed texts given as features: [N, D]. A text without any known token gives the zero vector."""
        buckets_T, rows_T = np.divmod(tokens.ids, self.tokens.num_rows)
        logarithms_T = self.token_weights_R[rows_T]
        if self.tokens.settings.positions:
            logarithms_T += self.position_weights[buckets_T]
        weights_T = np.exp(logarithms_T)
        if len(tokens) == 1:
            sums_ND = (weights_T @ np.take(self.table_RD, rows_T, axis=0))[None]
        else:
            # Imported here because one text does not need it, and it takes a while.
            from scipy.sparse import csr_matrix

            weights = csr_matrix((weights_T, rows_T, tokens.offsets), shape=(len(tokens), len(self.table_RD)))
            sums_ND = weights @ self.table_RD
        if self.tokens.settings.normalize:
            return unit_rows(sums_ND)
        if len(tokens) == 1:
            return np.asarray(sums_ND / max(weights_T.sum(), np.float32(_TINY)))
        owners_T = np.repeat(np.arange(len(tokens)), tokens.lengths)
        totals_N = np.bincount(owners_T, weights=weights_T, minlength=len(tokens))
        return np.asarray(sums_ND / np.maximum(totals_N, _TINY)[:, None], dtype=np.float32)

    def save(self, folder: Path) -> None:
        """Write the encoder, and a sentence-transformers folder beside it if that format can express it exactly."""
        folder.mkdir(parents=True, exist_ok=True)
        settings, tokenizer = self.tokens.settings, self.tokens.tokenizer
        arrays: dict[str, NDArray[Any]] = {
            "known_labels": self.tokens.known_labels,
            "label_rows": self.tokens.label_rows,
            "position_weights": self.position_weights,
            "table": self.table_RD,
            "token_weights": self.token_weights_R,
        }
        write_tensors(folder / _WEIGHTS_FILE, arrays)
        tokenizer.save(str(folder / _TOKENIZER_FILE))
        write_json(folder / ENCODER_FILE, {"kind": "static", **asdict(settings)})
        if settings.normalize and self.is_plain:
            self.write_mean(folder)

    @property
    def is_plain(self) -> bool:
        """Whether a text's direction is that of a mean of fixed token vectors: no positions, n-grams or label rows."""
        settings = self.tokens.settings
        return not (settings.positions or settings.ngram_buckets or len(self.tokens.known_labels))

    def plain(self) -> StaticArrays:
        """Return the encoder without positions, n-grams and label rows, with vectors of length one."""
        num_tokens = self.tokens.tokenizer.get_vocab_size()
        settings = replace(self.tokens.settings, normalize=True, positions=False, ngrams=1, ngram_buckets=0)
        return replace(
            self,
            tokens=StaticTokenizer(self.tokens.tokenizer, settings, num_rows=num_tokens),
            table_RD=self.table_RD[:num_tokens],
            token_weights_R=self.token_weights_R[:num_tokens],
        )

    def write_mean(self, folder: Path) -> None:
        """Write a plain encoder as a folder that sentence-transformers and model2vec load."""
        assert self.is_plain
        tokenizer, length = self.tokens.tokenizer, self.tokens.settings.max_length_query
        folded_RD = self.table_RD * np.exp(self.token_weights_R)[:, None]
        folded_RD[tokenizer.token_to_id(UNKNOWN)] = 0
        write_static_folder(folder, table_RD=folded_RD, tokenizer=tokenizer, normalize=True, max_length=length)

    @classmethod
    def load(cls, folder: Path) -> StaticArrays:
        """Read an encoder written by `save`; the table is read from the disk where it is used."""
        from tokenizers import Tokenizer

        described = read_object(folder / ENCODER_FILE)
        described.pop("kind", None)
        arrays = read_tensors(folder / _WEIGHTS_FILE)
        try:
            table_RD, known_labels = arrays["table"], arrays["known_labels"]
            label_rows = arrays.get("label_rows", np.arange(len(known_labels)))
            token_weights_R, position_weights = arrays["token_weights"], arrays["position_weights"]
            found = (table_RD.ndim, token_weights_R.shape, position_weights.shape, known_labels.dtype.kind)
            if found != (2, table_RD.shape[:1], (NUM_POSITIONS,), "i") or label_rows.shape != known_labels.shape:
                raise KeyError("shapes")
            if len(label_rows) and not 0 <= label_rows.min() <= label_rows.max() < len(table_RD):
                raise KeyError("label_rows")
            settings = StaticSettings(**described)
            tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER_FILE))
        except Exception as error:  # `tokenizers` raises plain exceptions
            raise ModelError(f"{folder}: not a static encoder of this version ({error})") from None
        return cls(
            tokens=StaticTokenizer(
                tokenizer, settings, num_rows=len(table_RD), known_labels=known_labels, label_rows=label_rows
            ),
            table_RD=table_RD,
            token_weights_R=token_weights_R,
            position_weights=position_weights,
        )


def hash_texts(texts: Sequence[str]) -> NDArray[np.int64]:
    """Return a 64-bit hash of each text."""
    digests = (hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), dtype=np.int64)


def count_label_rows(num_labels: int, labels_per_vector: int) -> int:
    """Return how many rows labels have: one each, or one for each of 2^n clusters of at most so many labels."""
    if labels_per_vector == 1 or not num_labels:
        return num_labels
    return 1 << max(0, math.ceil(math.log2(num_labels / labels_per_vector)))


def _buckets(positions: NDArray[np.int64], side: Side) -> NDArray[np.int64]:
    if side == "label":
        return np.full(len(positions), LABEL_BUCKET, dtype=np.int64)
    buckets: NDArray[np.int64] = np.floor(2 * np.log2(positions + 1)).astype(np.int64)
    return buckets.clip(max=LABEL_BUCKET - 1)


def _merge(
    parts: list[NDArray[np.int64]], owners: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Concatenate features and sort them by text."""
    if len(parts) == 1:
        return parts[0], owners[0]
    features, rows = np.concatenate(parts), np.concatenate(owners)
    order = np.argsort(rows, kind="stable")
    return features[order], rows[order]
