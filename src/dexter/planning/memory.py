"""Peak memory and disk of a run, term by term: each a formula of sizes and settings, with the setting that shrinks it.

A term belongs to a phase. Terms of the phase `always` add up, and so do those of `trained` (the optimiser's moments)
after the first step; of the other phases (start, step, refresh of clusters and hard negatives, validation, tuning at
the end) only the one that needs most counts. With an accelerator, texts and tokens stay in the memory of the process
and everything else is on the device.

The constants were found by running with one thing changed at a time and reading the peak (bench/planner.py compares
the sum with real runs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dexter.batches.mining import shortlist_length
from dexter.config import KEPT_BY_WORDS, Config
from dexter.index import exact as search
from dexter.losses.streaming import Streaming, plan_tiles
from dexter.model.word_weights import MAX_WEIGHTS
from dexter.planning.sizes import (
    Sizes,
    batch_size,
    needs_refresh,
    num_heads,
    pool_size,
    score_width,
    steps_per_epoch,
    texts_per_step,
)

Phase = Literal["always", "trained", "start", "step", "refresh", "validation", "tuning"]
Location = Literal["process", "first", "device"]
"""The memory of every process, of the first process only, or of a device."""
PHASES: tuple[Phase, ...] = ("start", "step", "refresh", "validation", "tuning")

MIB = 2**20
FLOAT = 4
_MOMENTS = 8
"""Bytes of the two numbers that Adam keeps per weight."""
_LIBRARIES = 265 * MIB
"""Python, NumPy, SciPy, torch and this package, imported."""
_TRANSFORMERS = 80 * MIB
"""Added by importing transformers and building a model."""
_MICRO_BATCHES = 100 * MIB
"""Kept by the allocator of a process that encodes micro-batches of different shapes."""
_TOKENIZER, _TOKENIZER_PER_ROW = 60 * MIB, 1_024
"""A tokenizer, the one that counted its words, and the pretrained file they came from; for each of its words."""
_CUDA_CONTEXT = 600 * MIB
_HEAP_BYTES_PER_TOKEN = 40
_LARGEST_ON_HEAP = 4_000_000
"""Arrays below 32 MB that are freed after tokenising stay with the process: four million 64-bit numbers each."""
_TOKENIZING_BYTES_PER_TOKEN = 64
"""64-bit arrays alive at once while the static encoder's features are made and counted."""
_LABEL_COPIES = 6
"""Arrays of a step with a row per label: output, its graph, the cached copy, the prior's column, and two gradients."""
_ASSEMBLED_COPIES = 1.25
"""Further copies where labels share texts and their rows are gathered."""
_ACTIVATIONS_PER_LAYER = 14
"""Arrays of hidden size that a transformer layer keeps for its backward pass, beside two of its inner width."""
_HALF_ACTIVATIONS = 0.73
"""Bytes of these in half precision, relative to float32: the inputs of normalisations and sums stay float32 (counted
from the tensors that autograd saves of a DistilBERT layer under autocast)."""
_SECOND_TOKENIZER = 40 * MIB
"""Added by the tokenizer of a model that is loaded."""
_STORED_BYTES_PER_WORD = 6
"""Of a word of a training query in the model's folder: which query, and its weight."""
_BYTES_PER_WORD = 40
"""Of a word of a training query while its index is made: code, place, weight, and copies of these in another order."""
_LABELS_TOLD_APART = 13
"""Of a training query, by its words: its own, and ten others."""


@dataclass(frozen=True)
class Term:
    """One use of memory or disk."""

    name: str
    bytes: float
    formula: str = ""
    """The factors of the bytes."""
    setting: str = ""
    """The settings that make it smaller."""
    phase: Phase = "always"
    location: Location = "device"


@dataclass(frozen=True)
class MemoryEstimate:
    """The terms of one process, and their peak."""

    terms: tuple[Term, ...]
    separate: bool
    """Whether the device has memory of its own."""

    def peak(self, *locations: Location) -> float:
        """Peak memory in bytes, optionally restricted to the given locations."""
        return max(sum(term.bytes for term in self._present(phase, locations)) for phase in PHASES)

    @property
    def limiting(self) -> float:
        """Peak of the memory that runs out first: the device's if it has its own, else that of the process."""
        return self.peak(*self._limiting_locations)

    @property
    def busiest(self) -> Phase:
        """The phase that needs most of the memory that runs out first."""
        locations = self._limiting_locations
        return max(PHASES, key=lambda phase: sum(term.bytes for term in self._present(phase, locations)))

    def at_peak(self) -> list[Term]:
        """The terms that make up the peak, the largest first; with a device, those in its memory."""
        return sorted(self._present(self.busiest, self._limiting_locations), key=lambda term: -term.bytes)

    @property
    def largest(self) -> Term:
        """The largest term at the peak that a setting shrinks."""
        terms = self.at_peak()
        return next((term for term in terms if term.setting), terms[0])

    @property
    def _limiting_locations(self) -> tuple[Location, ...]:
        return ("device",) if self.separate else ()

    def _present(self, phase: Phase, locations: tuple[Location, ...]) -> list[Term]:
        """The terms that hold memory in a phase; the optimiser's moments are not there yet at the start."""
        phases = ("always", phase) if phase == "start" else ("always", "trained", phase)
        return [
            term for term in self.terms if term.phase in phases and term.location in (locations or (term.location,))
        ]


def estimate_memory(sizes: Sizes, config: Config, *, world_size: int = 1, separate: bool = False) -> MemoryEstimate:
    """Estimate the memory of one process; labels are split over the processes, the encoder is in each."""
    labels = math.ceil(sizes.num_labels / world_size)
    parts = (
        _process(sizes, separate=separate),
        _encoder(sizes),
        _heads(sizes, config, labels),
        _step(sizes, config, world_size, separate=separate),
        _start(sizes, config, labels),
        _refresh(sizes, config, labels),
        _validation(sizes, config, labels),
        _publish(sizes, config, world_size),
    )
    return MemoryEstimate(tuple(term for part in parts for term in part if term.bytes > 0), separate)


def _product(
    name: str, *factors: float, setting: str = "", phase: Phase = "always", location: Location = "device"
) -> Term:
    """Return a term whose bytes are a product."""
    return Term(name, math.prod(factors), " x ".join(f"{factor:,}" for factor in factors), setting, phase, location)


def _process(sizes: Sizes, *, separate: bool) -> Iterator[Term]:
    """Texts, tokens and the interpreter: in every process, whatever the device."""
    is_static, tokens = sizes.encoder.kind == "static", sizes.query_tokens + sizes.label_tokens
    libraries = _LIBRARIES + _TOKENIZER
    libraries += _TOKENIZER_PER_ROW * sizes.encoder.table_rows if is_static else _TRANSFORMERS
    yield Term("Python, libraries and tokenizer", libraries, location="process")
    yield Term("texts and pairs", sizes.text_bytes, location="process")
    offsets = 8 * (sizes.num_queries + sizes.num_label_texts)
    bytes_of_tokens = (8 if is_static else 2) * tokens + offsets
    yield Term("tokens", bytes_of_tokens, setting="encoder.max_length_query", location="process")
    if is_static:
        kept = min(tokens, _LARGEST_ON_HEAP) * _HEAP_BYTES_PER_TOKEN
        yield Term("left over from tokenising", kept, location="process")
        work = _TOKENIZING_BYTES_PER_TOKEN * tokens - kept
        yield Term("tokenising", work, setting="encoder.max_length_query", phase="start", location="process")
    elif not separate:
        yield Term("left over from micro-batches", _MICRO_BATCHES, location="process")
    if separate:
        yield Term("CUDA context", _CUDA_CONTEXT)


def _encoder(sizes: Sizes) -> Iterator[Term]:
    """Weights and optimiser state; gradients come with the step."""
    encoder, setting = sizes.encoder, "encoder.words, encoder.dimension"
    table = (encoder.table_rows, encoder.dimension)
    yield _product("token table", *table, FLOAT, setting=setting)
    yield _product("token table's Adam moments", *table, _MOMENTS, setting=setting, phase="trained")
    yield _product("encoder weights", encoder.weights, FLOAT, setting="encoder.pretrained")
    yield _product("encoder's Adam moments", encoder.weights, _MOMENTS, setting="encoder.pretrained", phase="trained")


def _heads(sizes: Sizes, config: Config, labels: int) -> Iterator[Term]:
    """Projections, the prior, and the classifier's rows with their state."""
    weights = num_heads(config) * _projection_weights(sizes, config)
    yield _product("head projections", weights, 4 * FLOAT, setting="head.projection")
    if config.loss.prior:
        yield _product("label prior", labels, num_heads(config), 3 * FLOAT)
    if config.head.classifier:
        width, stored, setting = score_width(sizes, config), _stored_bytes(config), "head.storage, head.projection"
        yield _product("classifier table", labels, width, stored, setting=setting)
        # Moments are stored like the table; a row's count of updates takes 4 bytes more.
        row = 2 * stored * width + FLOAT
        yield _product("classifier's Adam moments", labels, row, setting=setting, phase="trained")


def _step(sizes: Sizes, config: Config, world_size: int, *, separate: bool) -> Iterator[Term]:
    """What exists only during a step."""
    encoder, queries = sizes.encoder, batch_size(sizes, config)
    labels, texts = (math.ceil(count(sizes, config) / world_size) for count in (pool_size, texts_per_step))
    copies = _LABEL_COPIES + (_ASSEMBLED_COPIES if sizes.num_label_texts != sizes.num_labels else 0)
    copies += 2 if config.head.projection else 0
    step = partial(_product, phase="step")
    setting = "encoder.dimension" if config.batch.pool == "all" else "batch.size"
    width = encoder.dimension
    yield step("label representations and gradients", copies, texts, width, FLOAT, setting=setting)
    yield step("query representations and gradients", _LABEL_COPIES, queries, width, FLOAT, setting="batch.size")
    yield Term("score tiles", tile_bytes(config, queries, labels, separate=separate), phase="step")
    yield step("encoder gradients", encoder.weights, FLOAT, setting="encoder.pretrained")
    if sizes.sparse:
        yield step("token table's gradient", 4, sizes.touched_rows, width, FLOAT, setting="batch.size")
    else:  # both sides of a step make a gradient as large as the table before they are summed
        sides, setting = 2 if texts else 1, "encoder.words, encoder.dimension"
        yield step("token table's gradient", sides, encoder.table_rows, width, FLOAT, setting=setting)
    if encoder.kind == "transformer":
        tokens, numbers = _tokens_with_graph(sizes, config, world_size), activations_per_token(sizes, config)
        yield step("activations", tokens, numbers, FLOAT, setting="train.tokens_per_micro_batch")
        if is_half_precision(config):
            yield step("half-precision weights", encoder.weights, 2)
    if config.head.classifier:
        scored = score_width(sizes, config)
        yield step("classifier rows of the step", 4, labels, scored, FLOAT, setting="head.projection")


def _start(sizes: Sizes, config: Config, labels: int) -> Iterator[Term]:
    """The classifier starts from all queries and labels.

    (The token table is copied when it is built, but its moments, which are as large, are not there yet.)
    """
    if config.head.classifier:
        width = score_width(sizes, config)
        numbers = sizes.num_queries * (sizes.encoder.dimension + width) + 4 * labels * width
        yield _product("classifier's starting rows", numbers, FLOAT, setting="head.projection", phase="start")


def _refresh(sizes: Sizes, config: Config, labels: int) -> Iterator[Term]:
    """All queries and labels as vectors, and a search of the labels nearest to each query."""
    if not needs_refresh(config):
        return
    width, projected, queries = sizes.encoder.dimension, config.head.projection, sizes.num_queries
    numbers = queries * (width + projected) + labels * (width + 2 * projected)
    yield _product("vectors to mine and cluster", numbers, FLOAT, setting="encoder.dimension", phase="refresh")
    encoded = min(queries, math.ceil(config.train.tokens_per_micro_batch / max(1.0, sizes.tokens_per_query)))
    at_once = 2 * FLOAT * width * encoded
    searched = search_bytes(queries, labels) if config.batch.hard_negatives else 0
    setting = "train.tokens_per_micro_batch" if at_once > searched else ""
    yield Term("search and encoding", max(at_once, searched), setting=setting, phase="refresh")
    pairs = (queries, shortlist_length(config.batch, sizes.num_labels))
    yield _product("hard negatives found", *pairs, 16, setting="batch.refresh", phase="refresh", location="process")
    yield _product("hard negatives", *pairs, 4, setting="batch.refresh", location="process")
    if config.batch.order == "clustered":
        yield _product("clusters", queries, 40, phase="refresh", location="process")


def _validation(sizes: Sizes, config: Config, labels: int) -> Iterator[Term]:
    """All labels encoded anew, the held-out queries, and the search."""
    if not sizes.num_validation:
        return
    width, searched = sizes.encoder.dimension, score_width(sizes, config) * num_heads(config)
    numbers = labels * (width + 2 * searched) + sizes.num_validation * (width + searched)
    setting = "head.projection, encoder.dimension"
    yield _product("vectors to validate with", numbers, FLOAT, setting=setting, phase="validation")
    yield Term("search tiles", search_bytes(sizes.num_validation, labels), phase="validation")


def _publish(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """The published model with all labels: given its training queries, and tuned. One process has most of it already.

    Of several processes the first does this, in its own memory: the labels of all may be too many for one device.
    """
    location: Location = "device" if world_size == 1 else "first"
    encoder, labels = sizes.encoder, sizes.num_labels
    searched = score_width(sizes, config) * num_heads(config)
    if world_size > 1 and sizes.num_validation:
        yield _product(
            "published model", labels, searched, FLOAT, setting="head.projection", phase="validation", location="first"
        )
    weights = labels * (encoder.dimension + (score_width(sizes, config) if config.head.classifier else 0))
    is_read = world_size > 1
    needed = FLOAT * (weights + is_read * (encoder.table_elements + encoder.weights)) + is_read * _SECOND_TOKENIZER
    yield Term("published model", needed, "", "encoder.dimension", "tuning", location)
    tuning = partial(_product, phase="tuning", location=location)
    yield tuning("vectors to tune with", 2, labels, searched, FLOAT, setting="head.projection")
    if keeps_vectors(sizes, config):
        yield tuning("training queries", sizes.num_queries, encoder.dimension, 10, setting="scoring.neighbours")
        yield tuning("weights of words", num_word_weights(sizes), 2, FLOAT, setting="scoring.neighbours")
    if keeps_words(sizes, config):
        yield tuning("words of training queries", sizes.query_tokens, _BYTES_PER_WORD, setting="scoring.neighbours")


def keeps_vectors(sizes: Sizes, config: Config) -> bool:
    """Whether the published model keeps the vectors of its training queries."""
    return sizes.num_queries <= config.scoring.neighbours


def num_word_weights(sizes: Sizes) -> int:
    """Estimate the weights of words for labels, as if all labels had as many (`dexter.training.words`)."""
    words = sizes.query_tokens * _LABELS_TOLD_APART
    return min(MAX_WEIGHTS, int(8.0 * float(sizes.num_labels) ** 0.25 * float(words) ** 0.75))


def keeps_words(sizes: Sizes, config: Config) -> bool:
    """Whether the published model keeps the words of its training queries, where these vote."""
    return sizes.num_queries <= KEPT_BY_WORDS * config.scoring.neighbours


def tile_bytes(config: Config, queries: int, labels: int, *, separate: bool = False) -> int:
    """Bytes of the scores that exist at a time, and of the work buffers of some losses."""
    streaming = Streaming(memory_budget=config.loss.memory_megabytes * MIB)
    tiles = plan_tiles(streaming, queries, labels, device_type="cuda" if separate else "cpu")
    held = tiles.row_block * (labels if tiles.keep else tiles.label_chunk)
    work = 3 * tiles.row_block * min(tiles.label_chunk, labels)
    return FLOAT * (held + work)


def search_bytes(queries: int, labels: int) -> int:
    """Bytes of the scores of an exact search that exist at a time, and of whether each is above its floor."""
    return (FLOAT + 1) * min(queries, search.ROWS) * min(labels, search.COLUMNS)


def _tokens_with_graph(sizes: Sizes, config: Config, world_size: int) -> int:
    """Most tokens whose activations exist at once.

    Gradient caching keeps the graph of queries, or labels, that fit in one micro-batch through the step; others are
    encoded again one micro-batch at a time. The backward pass of the queries comes first.
    """
    budget = config.train.tokens_per_micro_batch
    queries = math.ceil(batch_size(sizes, config) * sizes.tokens_per_query / world_size)
    labels = math.ceil(texts_per_step(sizes, config) * sizes.tokens_per_label / world_size)
    if labels <= budget:
        return min(budget, queries) + labels
    return min(budget, max(queries, labels))


def activations_per_token(sizes: Sizes, config: Config) -> int:
    """Numbers that a transformer keeps of a token for its backward pass, in units of 4 bytes."""
    encoder = sizes.encoder
    layer = 2 * encoder.intermediate + _ACTIVATIONS_PER_LAYER * encoder.hidden
    if is_half_precision(config):
        layer = round(_HALF_ACTIVATIONS * layer)
    if config.train.activation_checkpointing:  # the input of every layer, and one layer computed again
        return encoder.layers * encoder.hidden + layer
    return encoder.layers * layer


def is_half_precision(config: Config) -> bool:
    """Whether the transformer computes in half precision; weights and what leaves it stay float32."""
    return config.encoder.kind == "transformer" and config.train.precision in ("bfloat16", "float16")


KEPT_CHECKPOINTS = 2
_RECORD_BYTES = 200
_STEPS_PER_RECORD = 10
_LABEL_LINE_BYTES = 60
"""Quotes, names and the count beside a label's id and text."""
_TOKENIZER_BYTES_PER_ROW = 25
_KEPT_CHARACTERS = 300
"""Characters of a training query's text that are kept with the model."""


def estimate_disk(sizes: Sizes, config: Config) -> tuple[Term, ...]:
    """Estimate what the run folder holds: its checkpoints (phase `step`) while it trains, the rest for good."""
    encoder = sizes.encoder
    labels = sizes.num_labels * (FLOAT * encoder.dimension + _LABEL_LINE_BYTES) + 5 * sizes.label_tokens
    model = weights_bytes(sizes, config) + labels + _TOKENIZER_BYTES_PER_ROW * encoder.table_rows
    records = config.train.epochs * (steps_per_epoch(sizes, config) // _STEPS_PER_RECORD + 1)
    kept = 0
    if keeps_words(sizes, config):
        characters = min(_KEPT_CHARACTERS, round(sizes.characters_per_query))
        kept = sizes.num_queries * (characters + 24) + 4 * sizes.num_pairs + _STORED_BYTES_PER_WORD * sizes.query_tokens
        if keeps_vectors(sizes, config):
            kept += 2 * (sizes.num_queries * encoder.dimension + num_word_weights(sizes))
    factors = (KEPT_CHECKPOINTS, checkpoint_bytes(sizes, config))
    terms = (
        _product("checkpoints", *factors, setting="encoder.words, head.projection", phase="step"),
        Term("model", model, setting="encoder.dimension"),
        Term("training queries", kept, setting="scoring.neighbours"),
        _product("metrics", records, _RECORD_BYTES),
    )
    return tuple(term for term in terms if term.bytes)


def weights_bytes(sizes: Sizes, config: Config) -> int:
    """Bytes of encoder, heads and classifier, in a model as in a checkpoint."""
    encoder = sizes.encoder
    per_head = _projection_weights(sizes, config) + (sizes.num_labels if config.loss.prior else 0)
    total = FLOAT * (encoder.table_elements + encoder.weights + num_heads(config) * per_head)
    if config.head.classifier:
        total += _stored_bytes(config) * sizes.num_labels * score_width(sizes, config)
    return total


def checkpoint_bytes(sizes: Sizes, config: Config) -> int:
    """Bytes of a checkpoint: weights and two moments of each, hard negatives and clusters."""
    total = 3 * weights_bytes(sizes, config) + 4 * sizes.num_queries * shortlist_length(config.batch, sizes.num_labels)
    if config.head.classifier:
        total += FLOAT * sizes.num_labels
    if config.batch.order == "clustered":
        total += 8 * sizes.num_queries
    return total


def _projection_weights(sizes: Sizes, config: Config) -> int:
    return config.head.projection * (sizes.encoder.dimension + 1)


def _stored_bytes(config: Config) -> int:
    """Bytes of a number of the classifier's table and of its moments."""
    return FLOAT if config.head.storage == "float32" else 2
