"""What a run leaves on disk: the published model, two checkpoints (three while one is written), its metrics."""

from __future__ import annotations

from dexter.config import Config
from dexter.planning.sizes import Sizes, steps_per_epoch
from dexter.planning.terms import FLOAT, Term, keeps_training_queries, score_width

KEPT_CHECKPOINTS = 2
_RECORD_BYTES = 200
_STEPS_PER_RECORD = 10
_LABEL_LINE_BYTES = 60
"""Quotes, names and the count beside a label's id and text."""
_TOKENIZER_BYTES_PER_ROW = 25
_KEPT_CHARACTERS = 300
"""Of every training query's text, where the model keeps them."""


def weights_bytes(sizes: Sizes, config: Config) -> int:
    """Encoder, heads and classifier, as both the model and a checkpoint hold them."""
    encoder, head = sizes.encoder, config.head
    heads = (2 if head.classifier else 1) * head.projection * (encoder.dimension + 1)
    prior = sizes.num_labels * (2 if head.classifier else 1) if config.loss.prior else 0
    total = FLOAT * (encoder.table_elements + encoder.weights + heads + prior)
    if head.classifier:
        total += sizes.num_labels * score_width(sizes, config) * (FLOAT if head.storage == "float32" else 2)
    return total


def checkpoint_bytes(sizes: Sizes, config: Config) -> int:
    """Weights, and two moments of each; what is stored in bfloat16 has float32 moments."""
    total = 3 * weights_bytes(sizes, config)
    if config.head.classifier:
        elements = sizes.num_labels * score_width(sizes, config)
        total += elements * (4 if config.head.storage == "bfloat16" else 0) + FLOAT * sizes.num_labels
    if config.batch.hard_negatives:
        kept = min(config.batch.hard_negatives * config.batch.refresh, sizes.num_labels)
        total += 4 * kept * sizes.num_queries
    if config.batch.order == "clustered":
        total += 8 * sizes.num_queries
    return total


def model_bytes(sizes: Sizes, config: Config) -> int:
    """Weights, label representations, label texts and the tokenizer."""
    labels = sizes.num_labels * (FLOAT * sizes.encoder.dimension + _LABEL_LINE_BYTES)
    texts = round(sizes.num_label_texts * sizes.tokens_per_label * 5)
    return weights_bytes(sizes, config) + labels + texts + _TOKENIZER_BYTES_PER_ROW * sizes.encoder.table_rows


def training_query_bytes(sizes: Sizes, config: Config) -> int:
    """Training queries kept with the model: vectors in half precision, labels, beginnings of texts."""
    if not keeps_training_queries(sizes, config):
        return 0
    kept = min(_KEPT_CHARACTERS, round(sizes.characters_per_query))
    return sizes.num_queries * (2 * sizes.encoder.dimension + kept + 24) + 4 * sizes.num_pairs


def disk(sizes: Sizes, config: Config) -> list[Term]:
    """What the run folder holds in the end."""
    checkpoint, model = checkpoint_bytes(sizes, config), model_bytes(sizes, config)
    records = config.train.epochs * (steps_per_epoch(sizes, config) // _STEPS_PER_RECORD + 1)
    formula = f"{KEPT_CHECKPOINTS} kept x {checkpoint:,} (one more while it is written)"
    kept = training_query_bytes(sizes, config)
    terms = [
        Term("checkpoints", KEPT_CHECKPOINTS * checkpoint, formula, "encoder.words, head.projection"),
        Term("model", model, "weights, label representations and texts", "encoder.dimension"),
        Term(
            "training queries",
            kept,
            f"{sizes.num_queries:,} training queries, kept with the model",
            "scoring.neighbours",
        ),
        Term("metrics", _RECORD_BYTES * records, f"{records:,} records"),
    ]
    return [term for term in terms if term.bytes]
