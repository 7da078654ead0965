"""What is large about a run: counts of queries, labels, tokens and pairs, from the data or from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dexter.config import Config
from dexter.errors import UsageError
from dexter.planning.shapes import EncoderShape

_STRING_BYTES = 56
"""What Python needs for a string beside its characters."""
_DISTINCT_IN_CLUSTERS = 0.4
"""Of the positives and hard negatives of queries that are alike, those that are not another's too: 0.25 to 0.5."""
_POINTER_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that every formula is made of."""

    encoder: EncoderShape
    num_queries: int
    """Training queries, those held out for validation not counted."""
    num_validation: int
    num_labels: int
    num_label_texts: int
    """Distinct texts among them: equal texts are encoded once."""
    num_pairs: int
    """Relevant pairs of the training queries."""
    tokens_per_query: float
    tokens_per_label: float
    """Tokens that are kept of a text, on average."""
    characters: int
    """Characters of the training queries and of the labels."""
    characters_per_query: float
    text_bytes: int
    """Texts, identifiers and relevance of all splits, as Python holds them."""
    pool_positives: int
    """Distinct labels that the positives of a batch bring into a pool that is not of all labels."""
    touched_rows: int = 0
    """Static: rows of the token table that a step touches."""
    sparse: bool = False
    """Static: whether the table is updated row by row."""

    @property
    def query_tokens(self) -> int:
        """Tokens of all training queries."""
        return round(self.num_queries * self.tokens_per_query)

    @property
    def label_tokens(self) -> int:
        """Tokens of all distinct label texts."""
        return round(self.num_label_texts * self.tokens_per_label)


def pool_size(sizes: Sizes, config: Config) -> int:
    """Labels that a step scores."""
    batch = config.batch
    if batch.pool == "all":
        return sizes.num_labels
    drawn = sizes.pool_positives + batch.hard_negatives * batch_size(sizes, config)
    if batch.order == "clustered":
        drawn = round(_DISTINCT_IN_CLUSTERS * drawn)
    drawn += batch.random_labels
    if batch.fill:
        drawn = batch.cap
    return max(1, min(sizes.num_labels, drawn, batch.cap or sizes.num_labels))


def texts_per_step(sizes: Sizes, config: Config) -> int:
    """Label texts that a step encodes."""
    if config.head.classifier and config.head.encoder_weight == 0.0:
        return 0
    if config.batch.pool != "all":
        return min(pool_size(sizes, config), sizes.num_label_texts)
    return math.ceil(sizes.num_label_texts / config.train.label_refresh)


def steps_per_epoch(sizes: Sizes, config: Config) -> int:
    """Batches of an epoch; a power of two where batches are clusters."""
    batches = math.ceil(sizes.num_queries / config.batch.size)
    if config.batch.order != "clustered":
        return batches
    return 1 << min(math.ceil(math.log2(batches)), math.floor(math.log2(sizes.num_queries)))


def batch_size(sizes: Sizes, config: Config) -> int:
    """Queries that a step has: the epoch in equal parts."""
    return math.ceil(sizes.num_queries / steps_per_epoch(sizes, config))


def needs_refresh(config: Config) -> bool:
    """Whether clusters or hard negatives are made anew during the run."""
    wanted = config.batch.order == "clustered" or config.batch.hard_negatives > 0
    return wanted and config.batch.start < config.train.epochs


def strings_bytes(texts: Sequence[str]) -> int:
    """What Python needs for some strings and the tuple that holds them."""
    return sum(map(str.__sizeof__, texts)) + _POINTER_BYTES * len(texts)


def sizes_from_counts(
    config: Config,
    encoder: EncoderShape,
    *,
    num_queries: int,
    num_labels: int,
    tokens_per_text: float,
    tokens_per_label: float | None = None,
    labels_per_query: float = 5.0,
    characters_per_token: float = 5.0,
) -> Sizes:
    """Sizes without data. Texts are cut at the settings' lengths; every label text is taken to be its own.

    Args:
        config: settings whose open values are decided.
        encoder: its shape.
        num_queries: training queries.
        num_labels: labels.
        tokens_per_text: tokens of an average text.
        tokens_per_label: tokens of an average label text; as those of a query if left out.
        labels_per_query: relevant labels of an average query.
        characters_per_token: characters that an average token stands for.
    """
    for name, value in (("queries", num_queries), ("labels", num_labels), ("tokens-per-text", tokens_per_text)):
        if value <= 0:
            raise UsageError(f"--{name} {value}: expected a number above 0")
    held_out = min(round(config.validation.fraction * num_queries), config.validation.maximum, num_queries - 1)
    trained = num_queries - held_out + (num_labels if config.batch.label_queries else 0)
    label_length = tokens_per_text if tokens_per_label is None else tokens_per_label
    characters = round((num_queries * tokens_per_text + num_labels * label_length) * characters_per_token)
    num_pairs = round(num_queries * labels_per_query)
    drawn = min(labels_per_query, config.batch.positives or labels_per_query)
    return Sizes(
        encoder=encoder,
        num_queries=trained,
        num_validation=held_out,
        num_labels=num_labels,
        num_label_texts=num_labels,
        num_pairs=num_pairs,
        tokens_per_query=min(tokens_per_text, config.encoder.max_length_query),
        tokens_per_label=min(label_length, config.encoder.max_length_label),
        characters=characters,
        characters_per_query=tokens_per_text * characters_per_token,
        text_bytes=characters
        + 2 * (_STRING_BYTES + 2 * _POINTER_BYTES) * (num_queries + num_labels)
        + relevance_bytes(num_pairs, num_queries),
        pool_positives=min(num_labels, round(config.batch.size * drawn)),
        touched_rows=encoder.table_rows,
        sparse=False,
    )


def relevance_bytes(num_pairs: int, num_queries: int) -> int:
    """A CSR matrix with float32 weights and 32-bit columns."""
    return 8 * num_pairs + 4 * num_queries
