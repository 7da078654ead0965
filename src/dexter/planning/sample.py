"""A few hundred texts of a data set, encoded as a run would: what sizes are estimated from and speed is measured on.

Only word counts look at more than the sample, since the token table follows from them; they stop after some megabytes
of text and go on by Heaps' law (distinct words grow as a power of the words read).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dexter.config import Config, EncoderConfig
from dexter.data import Dataset
from dexter.data.tokens import Tokens
from dexter.encoders import build_encoder
from dexter.planning.counts import characters, characters_per_query, pool_positives, text_bytes
from dexter.planning.shapes import WORD_PIECES, EncoderShape, shape_from_config, shape_of
from dexter.planning.sizes import Sizes, texts_per_step
from dexter.training.parts import SPARSE_BELOW

if TYPE_CHECKING:
    from dexter.encoders import TextEncoder

SAMPLE_TEXTS = 1_024
_COUNTED_CHARACTERS = 8_000_000
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """Some texts of each side, with an encoder whose vocabulary was made from them."""

    encoder: TextEncoder
    queries: Sequence[str]
    labels: Sequence[str]
    query_tokens: Tokens
    label_tokens: Tokens

    @property
    def characters(self) -> int:
        """Characters of the sampled texts."""
        return sum(map(len, self.queries)) + sum(map(len, self.labels))


def draw_sample(dataset: Dataset, config: Config, *, size: int = SAMPLE_TEXTS) -> Sample:
    """Texts at equal distances through the data set, and an encoder built from them alone."""
    queries, labels = _spread(dataset.train.texts, size), _spread(dataset.label_texts, size)
    encoder = build_encoder(config.encoder, queries, labels, device=config.train.device, seed=config.seed)
    encoder.tokens_per_batch = config.train.tokens_per_micro_batch
    return Sample(
        encoder=encoder,
        queries=queries,
        labels=labels,
        query_tokens=encoder.tokenize(queries, side="query"),
        label_tokens=encoder.tokenize(labels, side="label"),
    )


def sizes_from_data(dataset: Dataset, config: Config, sample: Sample) -> Sizes:
    """The sizes of a run on this data; lengths are those of the sample, counts those of the data."""
    held_out = min(round(config.validation.fraction * len(dataset.train)), config.validation.maximum)
    num_label_texts = len(set(dataset.label_texts))
    trained = len(dataset.train) - held_out
    words = _words(dataset, config) if config.encoder.kind == "static" else _Words(0, frozenset())
    encoder = _shape(sample, config.encoder, words.vocabulary, num_label_texts)
    sizes = Sizes(
        encoder=encoder,
        num_queries=trained + (dataset.num_labels if config.batch.label_queries else 0),
        num_validation=held_out,
        num_labels=dataset.num_labels,
        num_label_texts=num_label_texts,
        num_pairs=int(dataset.train.relevance.nnz),
        tokens_per_query=float(np.mean(sample.query_tokens.lengths)),
        tokens_per_label=float(np.mean(sample.label_tokens.lengths)),
        characters=characters(dataset),
        characters_per_query=characters_per_query(dataset),
        text_bytes=text_bytes(dataset),
        pool_positives=pool_positives(dataset, config),
    )
    return _with_touched_rows(sizes, dataset, config, words) if encoder.table_rows else sizes


def _with_touched_rows(sizes: Sizes, dataset: Dataset, config: Config, words: _Words) -> Sizes:
    """The rows of the token table that a step touches, and whether that is few enough for row-sparse updates.

    Training decides by the queries of its first step, and by the labels too where all are in every step.
    """
    texts = texts_per_step(sizes, config)
    own_rows = texts if config.encoder.label_vectors else 0
    of_queries = words.of(_spread(dataset.train.texts, config.batch.size))
    of_labels = words.of(_spread(dataset.label_texts, texts)) if texts else set()
    rows = sizes.encoder.table_rows
    touched = min(len(of_queries | of_labels) + own_rows, rows)
    deciding = touched if config.batch.pool == "all" else len(of_queries)
    return replace(sizes, touched_rows=touched, sparse=deciding < SPARSE_BELOW * rows)


@dataclass(frozen=True)
class _Words:
    """Whole words of the data."""

    vocabulary: int
    """How many of them get a vector."""
    known: frozenset[str]
    """Those that are found to have one, and those that are pieces anyway."""

    def of(self, texts: Iterable[str]) -> set[str]:
        """The known words of some texts."""
        return set(_count(texts)) & self.known


def _shape(sample: Sample, config: EncoderConfig, num_words: int, num_label_texts: int) -> EncoderShape:
    if config.kind == "transformer":
        return shape_of(sample.encoder)
    rows = num_words + (0 if config.pretrained == "none" else WORD_PIECES)
    rows += config.ngram_buckets if config.ngrams > 1 else 0
    rows += num_label_texts if config.label_vectors else 0
    from_sample = shape_of(sample.encoder)
    chosen = shape_from_config(config, table_rows=rows)
    return EncoderShape(
        kind="static", dimension=from_sample.dimension, table_rows=chosen.table_rows, weights=chosen.weights
    )


def _words(dataset: Dataset, config: Config) -> _Words:
    """Count whole words as the static encoder's vocabulary does, roughly: lower case, letters and digits."""
    of_labels = _count(dataset.label_texts)
    of_queries = _count(_up_to(dataset.train.texts, _COUNTED_CHARACTERS))
    known = _known_words(config.encoder.pretrained)
    frequent = {word for word, count in of_queries.items() if count >= config.encoder.word_min_count}
    growth = _heaps_growth(dataset.train.texts, config.encoder.word_min_count, len(frequent))
    new = len((set(of_labels) | frequent) - known)
    vocabulary = min(config.encoder.words, round(new + (growth - 1) * len(frequent - known)))
    return _Words(vocabulary, frozenset(known | frequent | set(of_labels)))


def _heaps_growth(texts: Sequence[str], min_count: int, found: int) -> float:
    """How many times more words all texts have than the part that was counted."""
    total = sum(map(len, texts))
    if total <= _COUNTED_CHARACTERS or not found:
        return 1.0
    half = _count(_up_to(texts, _COUNTED_CHARACTERS // 2))
    found_in_half = max(1, sum(count >= min_count for count in half.values()))
    exponent = min(1.0, max(0.0, math.log2(found / found_in_half)))
    return float((total / _COUNTED_CHARACTERS) ** exponent)


def _known_words(pretrained: str) -> set[str]:
    if pretrained == "none":
        return set()
    from tokenizers import Tokenizer

    from dexter.encoders.pretrained import locate

    return set(Tokenizer.from_file(str(locate(pretrained) / "tokenizer.json")).get_vocab())


def _count(texts: Iterable[str]) -> Counter[str]:
    counter: Counter[str] = Counter()
    for text in texts:
        counter.update(_WORD.findall(text.lower()))
    return counter


def _up_to(texts: Sequence[str], characters: int) -> Sequence[str]:
    """Texts at equal distances, as many as make about so many characters."""
    total = max(1, sum(map(len, texts)))
    return _spread(texts, max(1, math.ceil(len(texts) * min(1.0, characters / total))))


def _spread(texts: Sequence[str], size: int) -> Sequence[str]:
    if len(texts) <= size:
        return texts
    return [texts[place] for place in np.linspace(0, len(texts) - 1, size).astype(np.int64)]
