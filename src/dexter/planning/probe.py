"""A few seconds of the real work on a sample: how long this machine takes for each part of a run.

Every measurement runs the code that training runs (encoder, objective, optimisers, search, clusters, files) at the
run's own batch size, on fewer labels. The best of a few repeats counts. Random states are left as they were.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dexter.batches.clusters import balanced_clusters
from dexter.batches.pool import Pool
from dexter.config import Config
from dexter.data.tokens import Tokens
from dexter.encoders.classifier import ClassifierTable
from dexter.encoders.embed import embed
from dexter.encoders.heads import ClassifierHead, DualHead, LabelPrior
from dexter.encoders.static import StaticEncoder
from dexter.files import atomic_folder
from dexter.index.exact import search
from dexter.planning.rates import Rates
from dexter.planning.sample import Sample, draw_sample
from dexter.planning.sizes import Sizes, batch_size, needs_refresh, pool_size
from dexter.planning.terms import MIB, score_width
from dexter.positives import Positives
from dexter.training.gradcache import Side, backward
from dexter.training.objective import Objective
from dexter.training.rows import RowOptimizer

Clock = Callable[[], float]
_SCORED = 2.0e9
"""Multiply-adds of queries x labels x dimensions that the loss is measured on."""
_FEWEST_LABELS, _MOST_LABELS = 64, 20_000
_TRANSFORMER_TOKENS = 2_048
_DENSE_ELEMENTS = 4_000_000
_TOUCHED_ROWS = 4_096
_CLUSTERED_POINTS = 8_192
_WRITTEN_BYTES = 16 * MIB
_POSITIVES = 3


def probe(sample: Sample, sizes: Sizes, config: Config, *, prepared: float, clock: Clock = time.perf_counter) -> Rates:
    """Measure every rate; `prepared` is how long the sample took to make."""
    with _unchanged_randomness():
        torch.set_num_threads(config.train.threads)
        query, label = (
            _encoding(sample.encoder, tokens, clock) for tokens in (sample.query_tokens, sample.label_tokens)
        )
        clustered = config.batch.order == "clustered" and needs_refresh(config)
        return Rates(
            per_character=prepared / max(1, sample.characters),
            per_query=query.both,
            per_query_forward=query.forward,
            per_label=label.both,
            per_label_forward=label.forward,
            per_score=_scoring(sizes, config, clock),
            per_dense_weight=_dense_update(clock, config.train.device),
            per_row_element=_row_update(sizes.encoder.dimension, clock, config.train.device),
            per_search=_searching(sizes, config, clock),
            per_clustered=_clustering(sizes.encoder.dimension, clock) if clustered else 0.0,
            per_byte=_writing(clock),
        )


def timed_sample(
    draw: Callable[..., Sample] = draw_sample, *arguments: object, clock: Clock = time.perf_counter
) -> tuple[Sample, float]:
    """A sample, and the seconds it took beyond those of an all but empty one, which are no matter of text."""
    started = clock()
    draw(*arguments, size=1)
    between = clock()
    sample = draw(*arguments)
    return sample, max(0.0, clock() - between - (between - started))


@dataclass(frozen=True)
class _Encoding:
    forward: float
    both: float


def _encoding(encoder: object, tokens: Tokens, clock: Clock) -> _Encoding:
    """Seconds per text of a pass without graph, and of the passes that a step makes."""
    assert isinstance(encoder, torch.nn.Module)
    rows = _rows_to_encode(encoder, tokens)
    if isinstance(encoder, StaticEncoder):
        encoder.sparse = True
    device = next(encoder.parameters()).device

    def encode(positions: np.ndarray) -> Tensor:
        ids, offsets = tokens.select(rows[positions])
        return encoder(  # type: ignore[no-any-return]
            torch.from_numpy(ids.astype(np.int64)).to(device), torch.from_numpy(offsets).to(device)
        )

    lengths = tokens.lengths[rows]
    chosen = Tokens(ids=tokens.select(rows).ids, offsets=np.concatenate([[0], np.cumsum(lengths)]))
    side = Side(encode=encode, micro_batches=encoder.micro_batches(lengths))  # type: ignore[operator]

    def step() -> None:
        encoder.train()
        backward(lambda vectors: vectors.square().sum(), side)
        encoder.zero_grad(set_to_none=True)

    forward = _best(lambda: embed(encoder, chosen, device=device), clock)  # type: ignore[arg-type]
    return _Encoding(forward / len(rows), _best(step, clock) / len(rows))


def _rows_to_encode(encoder: torch.nn.Module, tokens: Tokens) -> np.ndarray:
    """All texts of the sample for a static encoder; for a transformer as many as make a few micro-batches."""
    if isinstance(encoder, StaticEncoder):
        return np.arange(len(tokens))
    enough = int(np.searchsorted(np.cumsum(tokens.lengths), _TRANSFORMER_TOKENS)) + 1
    return np.arange(min(enough, len(tokens)))


def _scoring(sizes: Sizes, config: Config, clock: Clock) -> float:
    """Seconds per query and label of the objective and its gradients, at the run's batch size."""
    queries, width, device = batch_size(sizes, config), sizes.encoder.dimension, config.train.device
    fitting = int(_SCORED / (queries * width))
    labels = max(1, min(pool_size(sizes, config), max(_FEWEST_LABELS, min(fitting, _MOST_LABELS))))
    objective = _objective(config, width, labels).to(device).train()
    random = np.random.default_rng(0)
    rows = np.repeat(np.arange(queries), _POSITIVES)
    pool = Pool(None, labels, Positives(rows, random.integers(0, labels, len(rows))))
    queries_BD = torch.randn(queries, width, device=device, requires_grad=True)
    labels_MD = torch.randn(labels, width, device=device, requires_grad=True)

    def step() -> None:
        objective(queries_BD, labels_MD, pool).backward()
        objective.zero_grad(set_to_none=True)

    return _best(step, clock) / (queries * labels)


def _objective(config: Config, width: int, num_labels: int) -> Objective:
    """The heads and the loss of the settings, with weights that do not matter."""
    head, loss = config.head, config.loss
    counts = np.ones(num_labels, dtype=np.int64)

    def prior() -> LabelPrior | None:
        return LabelPrior(counts, num_labels) if loss.prior else None

    shared = {"temperature": loss.temperature, "input_size": width, "projection": head.projection}
    dual = DualHead(
        **shared,  # type: ignore[arg-type]
        prior=prior(),
        dropout=head.dropout,
        normalize=head.classifier or head.projection > 0 or config.encoder.normalize,
    )
    classifier = None
    if head.classifier:
        table = ClassifierTable(num_labels, head.projection or width, storage=head.storage, dropout=head.row_dropout)
        classifier = ClassifierHead(table, **shared, dropout=head.dropout, prior=prior())  # type: ignore[arg-type]
    return Objective(dual, classifier, loss, head, num_labels=num_labels)


def _dense_update(clock: Clock, device: str) -> float:
    """Seconds per weight: a gradient of zeros, a sum into it, and fused AdamW."""
    weight = torch.nn.Parameter(torch.zeros(_DENSE_ELEMENTS // 256, 256, device=device))
    optimizer = torch.optim.AdamW([weight], lr=0.0, fused=True)

    def step() -> None:
        weight.grad = torch.zeros_like(weight)
        weight.grad.add_(torch.zeros_like(weight))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _best(step, clock) / weight.numel()


def _row_update(width: int, clock: Clock, device: str) -> float:
    """Seconds per number in a touched row."""
    table = torch.nn.Parameter(torch.zeros(4 * _TOUCHED_ROWS, width, device=device))
    optimizer = RowOptimizer([table], lr=0.0)
    rows = torch.arange(0, len(table), 4, device=device)
    gradient = torch.zeros(len(rows), width, device=device)

    def step() -> None:
        table.grad = torch.sparse_coo_tensor(rows[None], gradient, table.shape, check_invariants=False)
        optimizer.step()

    return _best(step, clock) / gradient.numel()


def _searching(sizes: Sizes, config: Config, clock: Clock) -> float:
    """Seconds per query, label and dimension of an exact search."""
    width, labels = score_width(sizes, config), min(sizes.num_labels, _MOST_LABELS)
    queries_ND, labels_LD = torch.randn(512, width), torch.randn(labels, width)
    taken = _best(lambda: search(queries_ND, labels_LD, min(30, labels)), clock)
    return taken / (len(queries_ND) * labels * width)


def _clustering(width: int, clock: Clock) -> float:
    """Seconds per query, halving and dimension."""
    points = np.random.default_rng(0).standard_normal((_CLUSTERED_POINTS, width), dtype=np.float32)
    halvings = 4
    taken = _best(lambda: balanced_clusters(points, len(points) >> halvings, seed=0), clock, repeats=1)
    return taken / (len(points) * halvings * width)


def _writing(clock: Clock) -> float:
    """Seconds per byte of a folder that is written, hashed and flushed."""
    content = bytes(_WRITTEN_BYTES)
    with tempfile.TemporaryDirectory() as place:

        def write() -> None:
            with atomic_folder(Path(place) / "written", replace=True) as folder:
                (folder / "bytes").write_bytes(content)

        return _best(write, clock, repeats=1) / len(content)


def _best(work: Callable[[], object], clock: Clock, *, repeats: int = 2) -> float:
    """The shortest of a few times, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


@contextmanager
def _unchanged_randomness() -> Iterator[None]:
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
