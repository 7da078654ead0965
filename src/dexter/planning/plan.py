"""`plan`: what a run on some data will need; `plan_counts`: the same from numbers, for data and machines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dexter.config import Config, load_config
from dexter.data import Dataset
from dexter.errors import UsageError
from dexter.planning.advice import Change, changes_that_fit, ranks_that_fit
from dexter.planning.communication import Exchange, refresh_exchanges, step_exchanges
from dexter.planning.duration import Duration, duration
from dexter.planning.operations import operations_per_step
from dexter.planning.probe import Clock, probe, timed_sample
from dexter.planning.rates import Rates
from dexter.planning.report import render, to_json
from dexter.planning.sample import draw_sample, sizes_from_data
from dexter.planning.shapes import WORD_PIECES, shape_from_config
from dexter.planning.sizes import Sizes, sizes_from_counts, steps_per_epoch
from dexter.planning.storage import disk
from dexter.planning.terms import Memory, Term, memory
from dexter.training.presets import resolve_counts

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will need."""

    config: Config
    sizes: Sizes
    memory: Memory
    disk: tuple[Term, ...]
    duration: Duration | None
    """None where nothing was measured."""
    rates: Rates | None
    operations: float
    """Floating-point operations of a step on one rank."""
    world_size: int
    exchanges: tuple[Exchange, ...]
    """What each rank sends in a step."""
    refresh_exchanges: tuple[Exchange, ...]
    limit: float | None
    """Bytes that a rank may use, if known."""
    changes: tuple[Change, ...] | None
    """Settings that make it fit; empty where it does, None where none do."""
    ranks_needed: int | None
    """Processes on which it would fit."""

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return steps_per_epoch(self.sizes, self.config)

    @property
    def peak_memory(self) -> float:
        """Most bytes at any moment on one rank: of its device if that has memory of its own, else of the process."""
        return _peak(self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the limit holds it; None without a limit."""
        return None if self.limit is None else self.peak_memory <= self.limit

    def render(self) -> str:
        """The plan for a reader."""
        return render(self)

    def to_json(self) -> dict[str, Any]:
        """The plan for a program."""
        return to_json(self)


def plan(
    data: Dataset | str | Path,
    *,
    recipe: str | Path = "dexter",
    overrides: Mapping[str, Any] | None = None,
    world_size: int = 1,
    gpu_memory: float | None = None,
    clock: Clock = time.perf_counter,
) -> Plan:
    """Predict memory, disk and time of `train` with the same arguments, from a few seconds of measuring.

    Args:
        data: a data set, or the path or name of one.
        recipe: a recipe's name or TOML file.
        overrides: settings by dotted name.
        world_size: processes that share the work.
        gpu_memory: GiB of each device; time is then not predicted, since that device is not this machine.
        clock: what measures time; a clock of processor time is right where other work disturbs the machine.
    """
    dataset = _loaded(data)
    config = _decided(recipe, overrides, len(dataset.train), dataset.num_labels, gpu_memory)
    here = replace(config, train=replace(config.train, device="cpu")) if gpu_memory is not None else config
    sample, prepared = timed_sample(draw_sample, dataset, here, clock=clock)
    sizes = sizes_from_data(dataset, config, sample)
    alone = world_size == 1 and gpu_memory is None
    rates = probe(sample, sizes, config, prepared=prepared, clock=clock) if alone else None
    return _assemble(config, sizes, rates=rates, world_size=world_size, gpu_memory=gpu_memory)


def plan_counts(
    *,
    num_queries: int,
    num_labels: int,
    tokens_per_text: float,
    tokens_per_label: float | None = None,
    labels_per_query: float = 5.0,
    recipe: str | Path = "dexter",
    overrides: Mapping[str, Any] | None = None,
    world_size: int = 1,
    gpu_memory: float | None = None,
) -> Plan:
    """Predict memory, disk, operations and bytes between ranks from counts alone; no data is read, nothing is timed."""
    config = _decided(recipe, overrides, num_queries, num_labels, gpu_memory)
    rows = WORD_PIECES + config.encoder.words + (num_labels if config.encoder.label_vectors else 0)
    shape = shape_from_config(config.encoder, table_rows=rows if config.encoder.kind == "static" else 0)
    sizes = sizes_from_counts(
        config,
        shape,
        num_queries=num_queries,
        num_labels=num_labels,
        tokens_per_text=tokens_per_text,
        tokens_per_label=tokens_per_label,
        labels_per_query=labels_per_query,
    )
    return _assemble(config, sizes, rates=None, world_size=world_size, gpu_memory=gpu_memory)


def _assemble(config: Config, sizes: Sizes, *, rates: Rates | None, world_size: int, gpu_memory: float | None) -> Plan:
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}: expected 1 or more")
    separate = gpu_memory is not None or config.train.device != "cpu"
    limit = gpu_memory * _GIB if gpu_memory is not None else _machine_memory() if not separate else None

    def peak(changed: Config, ranks: int) -> float:
        return _peak(memory(_resized(sizes, config, changed), changed, world_size=ranks, separate=separate))

    changes: list[Change] | None = []
    ranks = None
    if limit is not None and peak(config, world_size) > limit:
        changes = changes_that_fit(config, limit, lambda changed: peak(changed, world_size))
        ranks = ranks_that_fit(limit, lambda count: peak(config, count), least=world_size)
    return Plan(
        config=config,
        sizes=sizes,
        memory=memory(sizes, config, world_size=world_size, separate=separate),
        disk=tuple(disk(sizes, config)),
        duration=None if rates is None else duration(sizes, config, rates),
        rates=rates,
        operations=operations_per_step(sizes, config, world_size=world_size),
        world_size=world_size,
        exchanges=tuple(step_exchanges(sizes, config, world_size=world_size)),
        refresh_exchanges=tuple(refresh_exchanges(sizes, config, world_size=world_size)),
        limit=limit,
        changes=None if changes is None else tuple(changes),
        ranks_needed=ranks,
    )


def _resized(sizes: Sizes, config: Config, changed: Config) -> Sizes:
    """The sizes under other settings: those of the encoder and of the pool follow them."""
    encoder = sizes.encoder
    rows = encoder.table_rows
    if encoder.kind == "static":
        rows -= max(0, config.encoder.words - changed.encoder.words)
    dimension = changed.encoder.dimension or encoder.dimension
    per_query = sizes.pool_positives / max(1, config.batch.size)
    return replace(
        sizes,
        encoder=replace(encoder, dimension=dimension, table_rows=max(1, rows) if encoder.table_rows else 0),
        pool_positives=round(per_query * changed.batch.size),
    )


def _decided(
    recipe: str | Path,
    overrides: Mapping[str, Any] | None,
    num_queries: int,
    num_labels: int,
    gpu_memory: float | None,
) -> Config:
    """The settings with every open value decided, for the device that is planned for."""
    chosen = dict(overrides or {})
    if gpu_memory is not None:
        if gpu_memory <= 0:
            raise UsageError(f"--gpu-memory {gpu_memory}: expected GiB above 0")
        chosen.setdefault("train.device", "cuda")
    return resolve_counts(load_config(recipe, chosen), num_queries=num_queries, num_labels=num_labels)


def _peak(needs: Memory) -> float:
    return needs.peak("device") if needs.separate else needs.peak()


def _machine_memory() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _loaded(data: Dataset | str | Path) -> Dataset:
    if isinstance(data, Dataset):
        return data
    from dexter.data.formats import load_dataset

    return load_dataset(data)
