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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dexter.config import MAX_TUNING_QUERIES, Config
from dexter.index import exact as search
from dexter.losses.streaming import TILE_ELEMENTS, Streaming, plan_tiles
from dexter.planning.sizes import (
    Sizes,
    batch_size,
    needs_refresh,
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
_MOMENTS = 2
"""Adam keeps two numbers per weight."""
_LIBRARIES = 265 * MIB
"""Python, NumPy, SciPy, torch and this package, imported."""
_TRANSFORMERS = 30 * MIB
"""Added by importing transformers and building a model."""
_MICRO_BATCHES = 100 * MIB
"""Kept by the allocator of a process that encodes micro-batches of different shapes."""
_TOKENIZER = 110 * MIB
"""A tokenizer of some ten thousand words, the one that counted them, and the pretrained file they came from."""
_CUDA_CONTEXT = 600 * MIB
_HEAP_BYTES_PER_TOKEN = 40
_LARGEST_ON_HEAP = 4_000_000
"""Arrays below 32 MB that are freed after tokenising stay with the process: four million 64-bit numbers each."""
_TOKENIZING_BYTES_PER_TOKEN = 64
"""64-bit arrays alive at once while the static encoder's features are made and counted."""
_LABEL_COPIES = 6.0
"""Arrays of a step with a row per label: output, its graph, the cached copy, the prior's column, and two gradients."""
_ASSEMBLED_COPIES = 1.25
"""Further copies where labels share texts and their rows are gathered."""
_ACTIVATIONS_PER_LAYER = 14
"""Arrays of hidden size that a transformer layer keeps for its backward pass, beside two of its inner width."""
_SECOND_TOKENIZER = 40 * MIB
"""Added by the tokenizer of a model that is loaded."""
_NEIGHBOURS = 200
"""Most training queries that vote for the labels of a text."""
_DISTINCT_VOTES = 0.6
"""Share of distinct labels among those of a query's neighbours."""
_VOTED_PAIRS = 2**16
"""Pairs of a query and a voted label whose vectors are gathered at a time."""


@dataclass(frozen=True)
class Term:
    """One use of memory or disk."""

    name: str
    bytes: float
    formula: str
    """How the bytes are computed, in numbers."""
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
        chosen = [term for term in self.terms if not locations or term.location in locations]
        return max(_total(chosen, phase) for phase in PHASES)

    @property
    def limiting(self) -> float:
        """Peak of the memory that runs out first: the device's if it has its own, else that of the process."""
        return self.peak("device") if self.separate else self.peak()

    @property
    def busiest(self) -> Phase:
        """The phase that needs most."""
        chosen = [term for term in self.terms if not self.separate or term.location == "device"]
        return max(PHASES, key=lambda phase: _total(chosen, phase))

    def at_peak(self) -> list[Term]:
        """The terms that make up the peak, the largest first; with a device, those in its memory."""
        terms = [term for term in self.terms if not self.separate or term.location == "device"]
        return sorted(_present(terms, self.busiest), key=lambda term: -term.bytes)

    @property
    def largest(self) -> Term:
        """The largest term at the peak that a setting shrinks."""
        terms = self.at_peak()
        return next((term for term in terms if term.setting), terms[0])


def estimate_memory(sizes: Sizes, config: Config, *, world_size: int = 1, separate: bool = False) -> MemoryEstimate:
    """Estimate the memory of one process; labels are split over the processes, the encoder is in each."""
    parts = (
        _process(sizes, config, separate=separate),
        _encoder(sizes),
        _heads(sizes, config, world_size),
        _step(sizes, config, world_size),
        _start(sizes, config, world_size),
        _refresh(sizes, config, world_size),
        _validation(sizes, config, world_size),
        _tuning(sizes, config, world_size),
    )
    terms = tuple(term for part in parts for term in part if term.bytes > 0)
    if separate:
        terms = (*terms, Term("CUDA context", _CUDA_CONTEXT, "driver, kernels, libraries"))
    return MemoryEstimate(terms, separate)


def _process(sizes: Sizes, config: Config, *, separate: bool) -> Iterator[Term]:
    """Texts, tokens and the interpreter: in every process, whatever the device."""
    static = sizes.encoder.kind == "static"
    libraries = _LIBRARIES + (0 if static else _TRANSFORMERS)
    yield Term("Python and libraries", libraries, "measured once", location="process")
    yield Term("tokenizer", _TOKENIZER, "measured once", location="process")
    yield Term("texts and pairs", sizes.text_bytes, "strings, identifiers, relevance", location="process")
    tokens = sizes.query_tokens + sizes.label_tokens
    width = 8 if static else 2
    offsets = 8 * (sizes.num_queries + sizes.num_label_texts)
    formula = f"{tokens:,} tokens x {width}"
    yield Term("tokens", width * tokens + offsets, formula, "encoder.max_length_query", location="process")
    if static:
        kept = min(tokens, _LARGEST_ON_HEAP) * _HEAP_BYTES_PER_TOKEN
        yield Term("left over from tokenising", kept, "freed, not returned", location="process")
        formula = f"{tokens:,} tokens x {_TOKENIZING_BYTES_PER_TOKEN}"
        work = max(0, _TOKENIZING_BYTES_PER_TOKEN * tokens - kept)
        yield Term("tokenising", work, formula, "encoder.max_length_query", "start", "process")
    elif not separate:
        yield Term("left over from micro-batches", _MICRO_BATCHES, "freed, not returned", location="process")


def _encoder(sizes: Sizes) -> Iterator[Term]:
    """Weights and optimiser state; gradients come with the step."""
    encoder = sizes.encoder
    if encoder.table_elements:
        rows = f"{encoder.table_rows:,} rows x {encoder.dimension}"
        setting = "encoder.words, encoder.dimension"
        yield Term("token table", FLOAT * encoder.table_elements, f"{rows} x 4", setting)
        moments = _MOMENTS * FLOAT * encoder.table_elements
        yield Term("token table's Adam moments", moments, f"{rows} x 8", setting, "trained")
    weights = encoder.weights
    yield Term("encoder weights", FLOAT * weights, f"{weights:,} x 4", "encoder.pretrained")
    moments = _MOMENTS * FLOAT * weights
    yield Term("encoder's Adam moments", moments, f"{weights:,} x 8", "encoder.pretrained", "trained")


def _heads(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """Projections, the prior, and the classifier's rows with their state."""
    head, labels = config.head, _share(sizes.num_labels, world_size)
    num_heads = 2 if head.classifier else 1
    weights = num_heads * _projection_weights(sizes, config)
    yield Term("head projections", 4 * FLOAT * weights, f"{weights:,} x 16", "head.projection")
    if config.loss.prior:
        yield Term("label prior", 3 * FLOAT * labels * num_heads, f"{labels:,} labels x 12")
    if head.classifier:
        width, stored = score_width(sizes, config), _stored_bytes(config)
        rows = f"{labels:,} labels x {width}"
        yield Term("classifier table", stored * labels * width, f"{rows} x {stored}", "head.storage, head.projection")
        # Moments are stored like the table; a row's count of updates takes 4 bytes more.
        moments = labels * (_MOMENTS * stored * width + FLOAT)
        formula = f"{rows} x {_MOMENTS * stored}"
        yield Term("classifier's Adam moments", moments, formula, "head.storage, head.projection", "trained")


def _step(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """What exists only during a step."""
    encoder, queries = sizes.encoder, batch_size(sizes, config)
    labels = _share(pool_size(sizes, config), world_size)
    texts = _share(texts_per_step(sizes, config), world_size)
    copies = _LABEL_COPIES + (_ASSEMBLED_COPIES if sizes.num_label_texts != sizes.num_labels else 0)
    copies += 2 if config.head.projection else 0
    width = encoder.dimension
    yield Term(
        "label representations and gradients",
        copies * FLOAT * texts * width,
        f"{copies:g} x {texts:,} texts x {width} x 4",
        "encoder.dimension" if config.batch.pool == "all" else "batch.size",
        "step",
    )
    yield Term(
        "query representations and gradients",
        _LABEL_COPIES * FLOAT * queries * width,
        f"{_LABEL_COPIES:g} x {queries:,} queries x {width} x 4",
        "batch.size",
        "step",
    )
    yield Term("score tiles", tile_bytes(config, queries, labels), "loss.memory_megabytes at most", "", "step")
    yield from _encoder_gradients(sizes, config)
    if encoder.kind == "transformer":
        tokens = min(config.train.tokens_per_micro_batch, max(1, sizes.query_tokens))
        per_token = activation_bytes_per_token(sizes)
        formula = f"{tokens:,} tokens x {per_token:,} bytes"
        yield Term("activations", tokens * per_token, formula, "train.tokens_per_micro_batch", "step")
    if config.head.classifier:
        wide = score_width(sizes, config)
        formula = f"4 x {labels:,} labels x {wide} x 4"
        yield Term("classifier rows of the step", 4 * FLOAT * labels * wide, formula, "head.projection", "step")


def _encoder_gradients(sizes: Sizes, config: Config) -> Iterator[Term]:
    """Dense gradients are as large as the weights; both sides of a step make one before they are summed."""
    encoder = sizes.encoder
    weights = encoder.weights
    yield Term("encoder gradients", FLOAT * weights, f"{weights:,} x 4", "encoder.pretrained", "step")
    if not encoder.table_elements:
        return
    if sizes.sparse:
        touched = sizes.touched_rows * encoder.dimension
        formula = f"4 x {sizes.touched_rows:,} rows x {encoder.dimension} x 4"
        yield Term("token table's gradient", 4 * FLOAT * touched, formula, "batch.size", "step")
    else:
        sides = 2 if texts_per_step(sizes, config) else 1
        formula = f"{sides} x {encoder.table_rows:,} rows x {encoder.dimension} x 4"
        setting = "encoder.words, encoder.dimension"
        yield Term("token table's gradient", sides * FLOAT * encoder.table_elements, formula, setting, "step")


def _start(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """The classifier starts from all queries and labels.

    (The token table is copied when it is built, but its moments, which are as large, are not there yet.)
    """
    if config.head.classifier:
        width = score_width(sizes, config)
        vectors = sizes.num_queries * (sizes.encoder.dimension + width)
        vectors += 4 * _share(sizes.num_labels, world_size) * width
        formula = f"{sizes.num_queries:,} queries and {sizes.num_labels:,} labels"
        yield Term("classifier's starting rows", FLOAT * vectors, formula, "head.projection", "start")


def _refresh(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """All queries and labels as vectors, and a search of the ones among the others."""
    if not needs_refresh(config):
        return
    width, labels, queries = sizes.encoder.dimension, _share(sizes.num_labels, world_size), sizes.num_queries
    projected = config.head.projection
    numbers = queries * (width + projected) + labels * (width + 2 * projected)
    formula = f"{queries:,} queries and {labels:,} labels x {width}" + (f" + {projected}" if projected else "")
    yield Term("vectors to mine and cluster", FLOAT * numbers, formula, "encoder.dimension", "refresh")
    at_once = 2 * FLOAT * width * _embedded_at_once(sizes, config)
    searched = search_bytes(queries, labels) if config.batch.hard_negatives else 0
    formula = "a tile of scores, or texts encoded at once"
    setting = "train.tokens_per_micro_batch" if at_once > searched else ""
    yield Term("search and encoding", max(at_once, searched), formula, setting, "refresh")
    if config.batch.hard_negatives:
        kept = min(config.batch.hard_negatives * config.batch.refresh, sizes.num_labels)
        formula = f"{queries:,} queries x {kept}"
        yield Term(
            "hard negatives found", 16 * queries * kept, f"{formula} x 16", "batch.refresh", "refresh", "process"
        )
        yield Term("hard negatives", 4 * queries * kept, f"{formula} x 4", "batch.refresh", location="process")
    if config.batch.order == "clustered":
        yield Term("clusters", 40 * queries, f"{queries:,} x 40", "", "refresh", "process")


def _validation(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """All labels encoded anew, the held-out queries, and the search."""
    if not sizes.num_validation:
        return
    labels, width = _share(sizes.num_labels, world_size), sizes.encoder.dimension
    searched = score_width(sizes, config) * (2 if config.head.classifier else 1)
    numbers = labels * (width + 2 * searched) + sizes.num_validation * (width + searched)
    formula = f"{labels:,} labels and {sizes.num_validation:,} queries x {searched}"
    yield Term("vectors to validate with", FLOAT * numbers, formula, "head.projection, encoder.dimension", "validation")
    tiles = search_bytes(sizes.num_validation, labels)
    yield Term("search tiles", tiles, "a tile of scores", "", "validation")
    if world_size > 1:
        whole = sizes.num_labels * searched
        formula = f"{sizes.num_labels:,} labels x {searched} x 4, in the first process"
        yield Term("published model", FLOAT * whole, formula, "head.projection", "validation", "first")


def _tuning(sizes: Sizes, config: Config, world_size: int) -> Iterator[Term]:
    """The published model is read again, gets its training queries, and is scored in some ways.

    Of several processes the first does this, in its own memory: the labels of all may be too many for one device.
    """
    location: Location = "device" if world_size == 1 else "first"
    encoder, width, labels = sizes.encoder, score_width(sizes, config), sizes.num_labels
    weights = encoder.table_elements + encoder.weights + labels * encoder.dimension
    weights += labels * width if config.head.classifier else 0
    formula = f"{labels:,} labels, read again to be tuned"
    needed = FLOAT * weights + _SECOND_TOKENIZER
    yield Term("published model", needed, formula, "encoder.dimension", "tuning", location)
    searched = width * (2 if config.head.classifier else 1)
    formula = f"2 x {labels:,} labels x {searched} x 4"
    yield Term("vectors to tune with", 2 * FLOAT * labels * searched, formula, "head.projection", "tuning", location)
    if keeps_training_queries(sizes, config):
        vectors = (FLOAT + FLOAT + 2) * sizes.num_queries * encoder.dimension
        formula = f"{sizes.num_queries:,} queries x {encoder.dimension} x 10"
        yield Term("training queries", vectors, formula, "scoring.neighbours", "tuning", location)
        pairs = voted_pairs(sizes, config)
        formula = f"2 x {pairs:,} pairs x {searched} x 4"
        yield Term(
            "votes of neighbours", 2 * FLOAT * pairs * searched, formula, "scoring.neighbours", "tuning", location
        )


def voted_pairs(sizes: Sizes, config: Config) -> int:
    """Pairs of a validation query and a label that its neighbours vote for, as many as are scored at a time."""
    tried = min(sizes.num_validation, MAX_TUNING_QUERIES)
    neighbours = min(_NEIGHBOURS, sizes.num_queries)
    voted = _DISTINCT_VOTES * neighbours * sizes.num_pairs / max(1, sizes.num_queries)
    return min(_VOTED_PAIRS, round(tried * min(voted, sizes.num_labels)))


def keeps_training_queries(sizes: Sizes, config: Config) -> bool:
    """Whether the published model keeps its training queries."""
    return sizes.num_queries <= config.scoring.neighbours


def _embedded_at_once(sizes: Sizes, config: Config) -> int:
    """Queries that an encoder without a graph takes in one micro-batch."""
    return min(sizes.num_queries, math.ceil(config.train.tokens_per_micro_batch / max(1.0, sizes.tokens_per_query)))


def tile_bytes(config: Config, queries: int, labels: int) -> int:
    """Bytes of the scores that exist at a time, and of the work buffers of some losses."""
    streaming = Streaming(memory_budget=config.loss.memory_megabytes * MIB)
    tiles = plan_tiles(streaming, queries, labels)
    held = tiles.row_block * (labels if tiles.keep else tiles.label_chunk)
    work = 2 * min(TILE_ELEMENTS, tiles.row_block * tiles.label_chunk)
    return FLOAT * (held + work)


def search_bytes(queries: int, labels: int) -> int:
    """Bytes of the scores of an exact search that exist at a time."""
    return FLOAT * min(queries, search.ROWS) * min(labels, search.COLUMNS)


def activation_bytes_per_token(sizes: Sizes) -> int:
    """Bytes that a transformer keeps of a token for its backward pass."""
    encoder = sizes.encoder
    wide = 2 * encoder.intermediate + _ACTIVATIONS_PER_LAYER * encoder.hidden
    return FLOAT * encoder.layers * wide


def _present(terms: Iterable[Term], phase: Phase) -> list[Term]:
    """The terms that hold memory in a phase."""
    there = ("always", phase) if phase == "start" else ("always", "trained", phase)
    return [term for term in terms if term.phase in there]


def _total(terms: Iterable[Term], phase: Phase) -> float:
    return sum(term.bytes for term in _present(terms, phase))


def _share(count: int, world_size: int) -> int:
    """The largest part when a count is split over processes."""
    return math.ceil(count / world_size)


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
    checkpoint, encoder = checkpoint_bytes(sizes, config), sizes.encoder
    labels = sizes.num_labels * (FLOAT * encoder.dimension + _LABEL_LINE_BYTES) + 5 * sizes.label_tokens
    model = weights_bytes(sizes, config) + labels + _TOKENIZER_BYTES_PER_ROW * encoder.table_rows
    records = config.train.epochs * (steps_per_epoch(sizes, config) // _STEPS_PER_RECORD + 1)
    formula = f"{KEPT_CHECKPOINTS} kept x {checkpoint:,} (one more while it is written)"
    kept = 0
    if keeps_training_queries(sizes, config):
        characters = min(_KEPT_CHARACTERS, round(sizes.characters_per_query))
        kept = sizes.num_queries * (2 * encoder.dimension + characters + 24) + 4 * sizes.num_pairs
    terms = (
        Term("checkpoints", KEPT_CHECKPOINTS * checkpoint, formula, "encoder.words, head.projection", "step"),
        Term("model", model, "weights, label representations and texts", "encoder.dimension"),
        Term("training queries", kept, f"{sizes.num_queries:,}, kept with the model", "scoring.neighbours"),
        Term("metrics", _RECORD_BYTES * records, f"{records:,} records"),
    )
    return tuple(term for term in terms if term.bytes)


def weights_bytes(sizes: Sizes, config: Config) -> int:
    """Bytes of encoder, heads and classifier, in a model as in a checkpoint."""
    encoder, head = sizes.encoder, config.head
    num_heads = 2 if head.classifier else 1
    prior = sizes.num_labels * num_heads if config.loss.prior else 0
    total = FLOAT * (encoder.table_elements + encoder.weights + num_heads * _projection_weights(sizes, config) + prior)
    return total + (_stored_bytes(config) * sizes.num_labels * score_width(sizes, config) if head.classifier else 0)


def checkpoint_bytes(sizes: Sizes, config: Config) -> int:
    """Bytes of a checkpoint: weights and two moments of each, hard negatives and clusters."""
    total = 3 * weights_bytes(sizes, config)
    if config.head.classifier:
        total += FLOAT * sizes.num_labels
    if config.batch.hard_negatives:
        total += 4 * sizes.num_queries * min(config.batch.hard_negatives * config.batch.refresh, sizes.num_labels)
    if config.batch.order == "clustered":
        total += 8 * sizes.num_queries
    return total


def _projection_weights(sizes: Sizes, config: Config) -> int:
    return config.head.projection * (sizes.encoder.dimension + 1)


def _stored_bytes(config: Config) -> int:
    """Bytes of a number of the classifier's table and of its moments."""
    return FLOAT if config.head.storage == "float32" else 2
