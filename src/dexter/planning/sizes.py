"""The numbers that memory, disk, network and time follow from: counts of queries, labels, tokens and weights.

They come from a data set (`sizes_from_data`: exact counts, text lengths of a sample) or from counts alone
(`sizes_from_counts`), for data and encoders that are not on this machine.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dexter.batches import order
from dexter.batches.pool import expected_label_counts
from dexter.config import MAX_VALIDATION_QUERIES, Config, EncoderConfig
from dexter.data import Dataset
from dexter.encoders import build_encoder
from dexter.encoders.static import MIN_WORD_COUNT
from dexter.encoders.static_arrays import count_label_rows
from dexter.errors import UsageError
from dexter.training.optimizers import MAX_SPARSE_SHARE

if TYPE_CHECKING:
    from dexter.encoders import TrainableEncoder

SAMPLE_TEXTS = 1_024
WORD_PIECES = 30_522
"""Tokens of the BERT vocabulary, from which the static encoder starts."""
_DIMENSION, _DIMENSION_WITHOUT_PRETRAINING = 384, 256
_COUNTED_CHARACTERS = 8_000_000
_WORD = re.compile(r"[^\W_]+")
_STRING_BYTES, _POINTER_BYTES = 56, 8
"""What Python needs for a string beside its characters, and for a reference to it."""
_CHARACTERS_PER_TOKEN = 5.0
_DISTINCT_IN_CLUSTERS = 0.4
"""Share of distinct labels among those that the queries of a clustered batch draw: 0.25 to 0.5 in real runs."""
_DISTILBERT = {"layers": 6, "hidden": 768, "intermediate": 3072, "vocabulary": WORD_PIECES}
_TRANSFORMERS: dict[str, dict[str, int]] = {
    "minilm": {"layers": 6, "hidden": 384, "intermediate": 1536, "vocabulary": WORD_PIECES},
    "distilbert-base-uncased": _DISTILBERT,
    "sentence-transformers/msmarco-distilbert-base-v4": _DISTILBERT,
    "bert-base-uncased": {"layers": 12, "hidden": 768, "intermediate": 3072, "vocabulary": WORD_PIECES},
    "roberta-base": {"layers": 12, "hidden": 768, "intermediate": 3072, "vocabulary": 50_265},
}
"""Encoders that can be planned for without their files."""


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The sizes of an encoder."""

    kind: Literal["static", "transformer"]
    dimension: int
    """Size of an embedding."""
    table_rows: int = 0
    """Static: rows of the token table."""
    weights: int = 0
    """Parameters beside the token table: all of a transformer's."""
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    """Transformer: width of the feed-forward layer."""

    @property
    def table_elements(self) -> int:
        """Numbers in the token table."""
        return self.table_rows * self.dimension

    @property
    def operations_per_token(self) -> int:
        """Floating-point operations of a forward pass per token, without attention between tokens."""
        if self.kind == "static":
            return 2 * self.dimension
        return 2 * self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a run."""

    encoder: EncoderShape
    num_queries: int
    """Training queries without those held out for validation."""
    num_validation: int
    num_labels: int
    num_label_texts: int
    """Distinct label texts; equal texts are encoded once."""
    num_pairs: int
    """Pairs of a training query and a relevant label."""
    tokens_per_query: float
    """Mean tokens of a query after truncation."""
    tokens_per_label: float
    characters_per_query: float
    text_bytes: int
    """Texts, identifiers and relevance of all splits in memory."""
    pool_positives: int
    """Distinct labels among the positives that a batch draws (pools that do not hold all labels)."""
    touched_rows: int = 0
    """Static: rows of the token table that a step updates."""
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
    return max(1, min(sizes.num_labels, drawn + batch.random_labels, batch.cap or sizes.num_labels))


def texts_per_step(sizes: Sizes, config: Config) -> int:
    """Label texts that a step encodes; none where only the classifier is trained."""
    if config.head.classifier and config.head.encoder_weight == 0.0:
        return 0
    return min(pool_size(sizes, config), sizes.num_label_texts)


def steps_per_epoch(sizes: Sizes, config: Config) -> int:
    """Number of batches of an epoch."""
    return order.steps_per_epoch(sizes.num_queries, config.batch.size, is_clustered=config.batch.order == "clustered")


def batch_size(sizes: Sizes, config: Config) -> int:
    """Queries of a step: an epoch is split into equal batches."""
    return math.ceil(sizes.num_queries / steps_per_epoch(sizes, config))


def needs_refresh(config: Config) -> bool:
    """Whether clusters or hard negatives are recomputed during the run."""
    return (
        config.batch.order == "clustered" or config.batch.hard_negatives > 0
    ) and config.batch.start < config.train.epochs


def num_heads(config: Config) -> int:
    """Heads of the model: the encoder's, and the classifier if there is one."""
    return 2 if config.head.classifier else 1


def score_width(sizes: Sizes, config: Config) -> int:
    """Dimensions of the vectors that a loss scores."""
    return config.head.projection or sizes.encoder.dimension


def operations_per_step(sizes: Sizes, config: Config, *, world_size: int = 1) -> float:
    """Floating-point operations of a step in one process: its share of the texts, and of the labels scored.

    Gradient caching encodes a text twice and its backward pass costs two more (4 passes, 5 where activations are
    computed again); a loss needs the scores twice and the gradients of both sides (4 products).
    """
    queries = batch_size(sizes, config)
    tokens = queries * sizes.tokens_per_query + texts_per_step(sizes, config) * sizes.tokens_per_label
    scoring = 2 * queries * pool_size(sizes, config) * score_width(sizes, config) * num_heads(config)
    passes = 5 if config.train.activation_checkpointing else 4
    return (passes * tokens * sizes.encoder.operations_per_token + 4 * scoring) / world_size


def sizes_from_counts(
    config: Config,
    encoder: EncoderShape,
    *,
    num_queries: int,
    num_labels: int,
    tokens_per_text: float,
    tokens_per_label: float | None = None,
    labels_per_query: float = 5.0,
) -> Sizes:
    """Return sizes without data; label texts are taken to be distinct.

    Tokens are means before truncation; a label has those of a query if left out.
    """
    for name, value in (("queries", num_queries), ("labels", num_labels), ("tokens-per-text", tokens_per_text)):
        if value <= 0:
            raise UsageError(f"--{name} {value}: expected a number above 0")
    held_out = min(round(config.validation.fraction * num_queries), MAX_VALIDATION_QUERIES, num_queries - 1)
    label_length = tokens_per_text if tokens_per_label is None else tokens_per_label
    characters = round((num_queries * tokens_per_text + num_labels * label_length) * _CHARACTERS_PER_TOKEN)
    num_pairs = round(num_queries * labels_per_query)
    drawn = min(labels_per_query, config.batch.positives or labels_per_query)
    return Sizes(
        encoder=encoder,
        num_queries=num_queries - held_out + (num_labels if config.batch.label_queries else 0),
        num_validation=held_out,
        num_labels=num_labels,
        num_label_texts=num_labels,
        num_pairs=num_pairs,
        tokens_per_query=min(tokens_per_text, config.encoder.max_length_query),
        tokens_per_label=min(label_length, config.encoder.max_length_label),
        characters_per_query=tokens_per_text * _CHARACTERS_PER_TOKEN,
        text_bytes=characters
        + 2 * (_STRING_BYTES + 2 * _POINTER_BYTES) * (num_queries + num_labels)
        + _relevance_bytes(num_pairs, num_queries),
        pool_positives=min(num_labels, round(config.batch.size * drawn)),
        touched_rows=encoder.table_rows,
    )


def sizes_from_data(dataset: Dataset, config: Config) -> Sizes:
    """Sizes of a run on a data set: exact counts, and text lengths of a sample that the encoder tokenises."""
    queries, labels = (spread(texts, SAMPLE_TEXTS) for texts in (dataset.train.texts, dataset.label_texts))
    device = "cpu" if config.train.device.startswith("cuda") else config.train.device
    encoder = build_encoder(config.encoder, queries, labels, device=device, seed=config.seed)
    held_out = min(round(config.validation.fraction * len(dataset.train)), MAX_VALIDATION_QUERIES)
    num_label_texts = len(set(dataset.label_texts))
    relevance = dataset.train.relevance
    drawn = expected_label_counts(relevance, sample_positives=config.batch.positives or dataset.num_labels)
    chances = 1 - np.exp(-config.batch.size * drawn / max(1, len(dataset.train)))
    sizes = Sizes(
        encoder=shape_of(encoder),
        num_queries=len(dataset.train) - held_out + (dataset.num_labels if config.batch.label_queries else 0),
        num_validation=held_out,
        num_labels=dataset.num_labels,
        num_label_texts=num_label_texts,
        num_pairs=int(relevance.nnz),
        tokens_per_query=float(np.mean(encoder.tokenize(queries, side="query").lengths)),
        tokens_per_label=float(np.mean(encoder.tokenize(labels, side="label").lengths)),
        characters_per_query=sum(map(len, dataset.train.texts)) / max(1, len(dataset.train)),
        text_bytes=_text_bytes(dataset),
        pool_positives=round(float(np.sum(chances))),
    )
    return _with_table(sizes, dataset, config) if config.encoder.kind == "static" else sizes


def _text_bytes(dataset: Dataset) -> int:
    """Texts, identifiers and relevance of all splits; the training split exists twice and shares its strings."""
    total = _strings_bytes(dataset.label_texts) + _strings_bytes(dataset.label_ids)
    for split in dataset.splits.values():
        total += _strings_bytes(split.texts) + _strings_bytes(split.uids)
        total += _relevance_bytes(int(split.relevance.nnz), len(split))
    num_queries = len(dataset.train)
    return total + 2 * _POINTER_BYTES * num_queries + _relevance_bytes(int(dataset.train.relevance.nnz), num_queries)


def _strings_bytes(texts: Sequence[str]) -> int:
    return sum(map(str.__sizeof__, texts)) + _POINTER_BYTES * len(texts)


def _relevance_bytes(num_pairs: int, num_queries: int) -> int:
    """A CSR matrix with float32 weights and 32-bit columns."""
    return 8 * num_pairs + 4 * num_queries


def _with_table(sizes: Sizes, dataset: Dataset, config: Config) -> Sizes:
    """The rows of a static encoder's token table, and those that a step touches.

    The vocabulary follows from the words of all texts, so words are counted (lower case, letters and digits) in up to
    8 million characters of the queries and extrapolated by Heaps' law: distinct words grow as a power of the words
    read. Training decides between row-sparse and dense updates by the queries of its first step, and by the labels too
    where all of them are in every step.
    """
    known, of_labels = _pretrained_words(config.encoder.pretrained), set(_count_words(dataset.label_texts))
    frequent = _frequent_words(dataset.train.texts, _COUNTED_CHARACTERS, config)
    growth = 1.0
    total = sum(map(len, dataset.train.texts))
    if total > _COUNTED_CHARACTERS and frequent:
        in_half = max(1, len(_frequent_words(dataset.train.texts, _COUNTED_CHARACTERS // 2, config)))
        growth = (total / _COUNTED_CHARACTERS) ** min(1.0, max(0.0, math.log2(len(frequent) / in_half)))
    num_words = round(len((of_labels | frequent) - known) + (growth - 1) * len(frequent - known))
    rows = table_rows(config.encoder, min(config.encoder.words, num_words), sizes.num_label_texts)
    shape = replace(sizes.encoder, table_rows=rows, weights=shape_from_config(config.encoder, table_rows=rows).weights)
    sizes = replace(sizes, encoder=shape)
    vocabulary, texts = known | of_labels | frequent, texts_per_step(sizes, config)
    of_batch = set(_count_words(spread(dataset.train.texts, config.batch.size))) & vocabulary
    of_pool = set(_count_words(spread(dataset.label_texts, texts))) if texts else set()
    touched = len(of_batch | of_pool) + min(texts, label_rows(config.encoder, sizes.num_label_texts))
    deciding = touched if config.batch.pool == "all" else len(of_batch)
    return replace(sizes, touched_rows=min(touched, rows), sparse=deciding < MAX_SPARSE_SHARE * rows)


def table_rows(config: EncoderConfig, num_words: int, num_label_texts: int) -> int:
    """Return the rows of a static encoder's token table: words, word pieces, word n-grams and labels."""
    rows = num_words + (0 if config.pretrained == "none" else WORD_PIECES)
    rows += config.ngram_buckets if config.ngrams > 1 else 0
    return rows + label_rows(config, num_label_texts)


def label_rows(config: EncoderConfig, num_label_texts: int) -> int:
    """Return how many of these rows belong to labels."""
    return count_label_rows(num_label_texts, config.labels_per_vector) if config.label_vectors else 0


def _frequent_words(texts: Sequence[str], characters: int, config: Config) -> set[str]:
    """The words that are frequent enough for a vector of their own, in a sample of about this many characters."""
    total = max(1, sum(map(len, texts)))
    sample = spread(texts, max(1, math.ceil(len(texts) * min(1.0, characters / total))))
    return {word for word, count in _count_words(sample).items() if count >= MIN_WORD_COUNT}


def _count_words(texts: Iterable[str]) -> Counter[str]:
    counter: Counter[str] = Counter()
    for text in texts:
        counter.update(_WORD.findall(text.lower()))
    return counter


def _pretrained_words(pretrained: str) -> set[str]:
    if pretrained == "none":
        return set()
    from tokenizers import Tokenizer

    from dexter.encoders.pretrained import locate

    return set(Tokenizer.from_file(str(locate(pretrained) / "tokenizer.json")).get_vocab())


def spread(texts: Sequence[str], size: int) -> Sequence[str]:
    """At most `size` texts at equal distances."""
    return texts if len(texts) <= size else [texts[place] for place in spread_rows(len(texts), size)]


def spread_rows(count: int, size: int) -> np.ndarray:
    """At most `size` numbers below `count` at equal distances."""
    return np.linspace(0, count - 1, min(size, count)).astype(np.int64)


def shape_from_config(config: EncoderConfig, *, table_rows: int = 0) -> EncoderShape:
    """The shape of the encoder that the settings name; a static encoder's rows follow from the data and are given."""
    if config.kind == "static":
        default = _DIMENSION_WITHOUT_PRETRAINING if config.pretrained == "none" else _DIMENSION
        return EncoderShape(
            kind="static", dimension=config.dimension or default, table_rows=table_rows, weights=table_rows + 16
        )
    if config.pretrained in _TRANSFORMERS:
        return _transformer(**_TRANSFORMERS[config.pretrained], dimension=config.dimension)
    if Path(config.pretrained).is_dir():
        from dexter.files import read_object

        settings = read_object(Path(config.pretrained) / "config.json")
        return _transformer(
            **_read_layers(settings), vocabulary=_first(settings, "vocab_size"), dimension=config.dimension
        )
    raise UsageError(
        f"encoder.pretrained {config.pretrained!r}: its size is not known here: give a folder with a config.json, or "
        f"one of {', '.join(_TRANSFORMERS)}"
    )


def shape_of(encoder: TrainableEncoder) -> EncoderShape:
    """The shape of an encoder that exists."""
    from dexter.encoders.static import StaticEncoder

    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    if isinstance(encoder, StaticEncoder):
        rows, width = encoder.num_rows, encoder.dimension
        return EncoderShape(kind="static", dimension=width, table_rows=rows, weights=parameters - rows * width)
    settings = vars(encoder.model.config)
    return EncoderShape(kind="transformer", dimension=encoder.dimension, weights=parameters, **_read_layers(settings))


def _transformer(*, layers: int, hidden: int, intermediate: int, vocabulary: int, dimension: int = 0) -> EncoderShape:
    """A BERT-like encoder, with its position vectors, norms and biases."""
    block = 4 * hidden**2 + 2 * hidden * intermediate + 9 * hidden + intermediate
    weights = (vocabulary + 512 + 4) * hidden + layers * block + hidden * dimension
    return EncoderShape(
        kind="transformer",
        dimension=dimension or hidden,
        weights=weights,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
    )


def _read_layers(settings: dict[str, Any]) -> dict[str, int]:
    """Layers and widths from a Hugging Face configuration, with the names of BERT or of DistilBERT."""
    return {
        "layers": _first(settings, "num_hidden_layers", "n_layers"),
        "hidden": _first(settings, "hidden_size", "dim"),
        "intermediate": _first(settings, "intermediate_size", "hidden_dim"),
    }


def _first(settings: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(value := settings.get(name), int):
            return value
    raise UsageError(f"encoder.pretrained: its config.json has none of {', '.join(names)}: choose a BERT-like encoder")
