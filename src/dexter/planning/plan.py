"""What a run will need: `plan` from data, `plan_counts` from numbers alone, `describe_needs` in one line.

A plan that does not fit into the memory at hand comes with the change of settings, or the number of processes, with
which it does.
"""

from __future__ import annotations

import dataclasses
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dexter.config import Config, load_config
from dexter.data import Dataset, load_dataset
from dexter.errors import UsageError
from dexter.planning.memory import MemoryEstimate, Term, estimate_disk, estimate_memory
from dexter.planning.network import Exchange, refresh_exchanges, step_exchanges
from dexter.planning.sizes import (
    Sizes,
    operations_per_step,
    shape_from_config,
    sizes_from_counts,
    sizes_from_data,
    steps_per_epoch,
    table_rows,
)
from dexter.planning.timing import Clock, Duration, time_run
from dexter.recipes import DEFAULT_RECIPE
from dexter.training.presets import resolve_counts, resolve_presets

_GIB = 2**30
_MOST_PROCESSES = 1 << 20
_SHOWN_TERMS = 8
_PHASES = {
    "step": "in a step",
    "refresh": "while mining",
    "validation": "in a validation",
    "start": "at the start",
    "tuning": "at the end",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will need."""

    config: Config
    sizes: Sizes
    memory: MemoryEstimate
    disk: tuple[Term, ...]
    duration: Duration | None
    """None where nothing was timed."""
    operations: float
    """Floating-point operations of a step in one process."""
    world_size: int
    """Processes that share the labels."""
    exchanges: tuple[Exchange, ...]
    """What each process sends in a step."""
    refresh_exchanges: tuple[Exchange, ...]
    """What each process sends in a refresh of clusters and hard negatives."""
    limit: float | None
    """Bytes of memory for each process, if known."""
    changes: tuple[str, ...] | None
    """Settings (KEY=VALUE) that make it fit; empty where it fits as it is, None where none are known."""
    processes_needed: int | None
    """Fewest processes with which it fits, where it does not."""

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return steps_per_epoch(self.sizes, self.config)

    @property
    def peak_memory(self) -> float:
        """Peak bytes of one process: on its device if that has memory of its own, else of the process."""
        return self.memory.limiting

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None without a limit."""
        return None if self.limit is None else self.peak_memory <= self.limit

    @property
    def disk_after(self) -> float:
        """Bytes of a finished run, whose checkpoints are deleted unless --keep-checkpoints is given."""
        return sum(term.bytes for term in self.disk if term.phase == "always")

    def render(self) -> str:
        """The plan as text."""
        parts = (_head, _memory, _fit, _disk, _time, _network)
        return "\n".join(line for part in parts for line in part(self))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values; bytes and seconds throughout."""
        memory, duration = self.memory, self.duration
        process, first = (memory.peak("process"), memory.peak("process", "first")) if memory.separate else (None, None)
        return {
            "sizes": dataclasses.asdict(self.sizes),
            "steps_per_epoch": self.num_steps,
            "memory": {
                "peak": round(self.peak_memory),
                "process": round(self.peak_memory if process is None else process),
                "first_process": round(self.peak_memory if first is None else first),
                "phase": memory.busiest,
                "terms": [dataclasses.asdict(term) for term in memory.terms],
                "largest": dataclasses.asdict(memory.largest),
            },
            "disk": {
                "total": round(sum(term.bytes for term in self.disk)),
                "after": round(self.disk_after),
                "terms": [dataclasses.asdict(term) for term in self.disk],
            },
            "time": None
            if duration is None
            else {
                "prepare": duration.prepare,
                "step": duration.step,
                "epoch": duration.epoch,
                "tune": duration.tune,
                "total": duration.total,
                "terms": [dataclasses.asdict(term) for term in duration.terms],
            },
            "operations_per_step": self.operations,
            "world_size": self.world_size,
            "sent_per_step": [dataclasses.asdict(exchange) for exchange in self.exchanges],
            "sent_per_refresh": [dataclasses.asdict(exchange) for exchange in self.refresh_exchanges],
            "limit": self.limit,
            "fits": self.fits,
            "changes": None if self.changes is None else list(self.changes),
            "processes_needed": self.processes_needed,
        }


def plan(
    data: Dataset | str | Path,
    *,
    recipe: str | Path = DEFAULT_RECIPE,
    overrides: Mapping[str, Any] | None = None,
    world_size: int = 1,
    gpu_memory: float | None = None,
    clock: Clock = time.perf_counter,
) -> Plan:
    """Predict memory, disk and time of `train` with the same arguments, from a few real steps.

    Nothing is timed with a `world_size` above 1 or with `gpu_memory` (GiB of each device), which are not this machine.
    `clock` returns seconds: give `time.process_time` where other work disturbs the machine.
    """
    dataset = data if isinstance(data, Dataset) else load_dataset(data)
    config = _resolve(
        recipe,
        overrides,
        num_queries=len(dataset.train),
        num_labels=dataset.num_labels,
        world_size=world_size,
        gpu_memory=gpu_memory,
    )
    sizes = sizes_from_data(dataset, config)
    duration = time_run(dataset, config, sizes, clock=clock) if world_size == 1 and gpu_memory is None else None
    return _assemble(config, sizes, duration=duration, world_size=world_size, gpu_memory=gpu_memory)


def plan_counts(
    *,
    num_queries: int,
    num_labels: int,
    tokens_per_text: float,
    tokens_per_label: float | None = None,
    labels_per_query: float = 5.0,
    recipe: str | Path = DEFAULT_RECIPE,
    overrides: Mapping[str, Any] | None = None,
    world_size: int = 1,
    gpu_memory: float | None = None,
) -> Plan:
    """Predict memory, disk, operations and bytes between processes from counts; no data is read, nothing is timed."""
    config = _resolve(
        recipe, overrides, num_queries=num_queries, num_labels=num_labels, world_size=world_size, gpu_memory=gpu_memory
    )
    sizes = sizes_from_counts(
        config,
        shape_from_config(config.encoder, table_rows=table_rows(config.encoder, config.encoder.words, num_labels)),
        num_queries=num_queries,
        num_labels=num_labels,
        tokens_per_text=tokens_per_text,
        tokens_per_label=tokens_per_label,
        labels_per_query=labels_per_query,
    )
    return _assemble(config, sizes, duration=None, world_size=world_size, gpu_memory=gpu_memory)


def describe_needs(
    dataset: Dataset,
    *,
    recipe: str | Path = DEFAULT_RECIPE,
    overrides: Mapping[str, Any] | None = None,
    world_size: int = 1,
) -> str:
    """Say in one line what a run needs: peak memory, its largest part and the setting that shrinks it, and disk."""
    config = resolve_presets(load_config(recipe, overrides or {}), dataset, num_processes=world_size)
    sizes = sizes_from_data(dataset, config)
    memory = estimate_memory(sizes, config, world_size=world_size, separate=config.train.device != "cpu")
    largest = memory.largest
    remedy = f"; smaller with {largest.setting}" if largest.setting else ""
    return (
        f"needs about {in_bytes(memory.limiting)} of memory{' per process' if world_size > 1 else ''} (largest: "
        f"{largest.name}, {in_bytes(largest.bytes)}{remedy}) and "
        f"{in_bytes(sum(term.bytes for term in estimate_disk(sizes, config)))} of disk"
    )


def _assemble(
    config: Config, sizes: Sizes, *, duration: Duration | None, world_size: int, gpu_memory: float | None
) -> Plan:
    separate = gpu_memory is not None or config.train.device != "cpu"
    limit = None if gpu_memory is None else gpu_memory * _GIB
    if not separate:
        limit = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    def peak(changed: Config, processes: int = world_size) -> float:
        resized = _resize(sizes, config, changed)
        return estimate_memory(resized, changed, world_size=processes, separate=separate).limiting

    fits = limit is None or peak(config) <= limit
    return Plan(
        config=config,
        sizes=sizes,
        memory=estimate_memory(sizes, config, world_size=world_size, separate=separate),
        disk=estimate_disk(sizes, config),
        duration=duration,
        operations=operations_per_step(sizes, config, world_size=world_size),
        world_size=world_size,
        exchanges=tuple(step_exchanges(sizes, config, world_size=world_size)),
        refresh_exchanges=tuple(refresh_exchanges(sizes, config, world_size=world_size)),
        limit=limit,
        changes=() if fits or limit is None else find_changes(config, limit, peak),
        processes_needed=None
        if fits or limit is None
        else count_processes(limit, lambda count: peak(config, count), fewest=world_size),
    )


def _resize(sizes: Sizes, config: Config, changed: Config) -> Sizes:
    """The sizes under other settings of the encoder and the batch."""
    encoder = sizes.encoder
    rows = encoder.table_rows
    if encoder.kind == "static":
        rows = max(1, rows - max(0, config.encoder.words - changed.encoder.words))
    positives = sizes.pool_positives * changed.batch.size / max(1, config.batch.size)
    shape = replace(encoder, dimension=changed.encoder.dimension or encoder.dimension, table_rows=rows)
    return replace(sizes, encoder=shape, pool_positives=round(positives))


def _resolve(
    recipe: str | Path,
    overrides: Mapping[str, Any] | None,
    *,
    num_queries: int,
    num_labels: int,
    world_size: int,
    gpu_memory: float | None,
) -> Config:
    """The settings with every open value decided, for the device that is planned for."""
    chosen = dict(overrides or {})
    if gpu_memory is not None:
        if gpu_memory <= 0:
            raise UsageError(f"--gpu-memory {gpu_memory}: expected GiB above 0")
        chosen.setdefault("train.device", "cuda")
    if world_size < 1:
        raise UsageError(f"--world-size {world_size}: expected 1 or more")
    config = load_config(recipe, chosen)
    return resolve_counts(config, num_queries=num_queries, num_labels=num_labels, num_processes=world_size)


_SHRINKABLE = (
    ("train.tokens_per_micro_batch", 512),
    ("loss.memory_megabytes", 16),
    ("head.storage", 0),
    ("batch.size", 32),
    ("encoder.words", 1_000),
    ("head.projection", 32),
    ("encoder.dimension", 32),
)
"""Settings that save memory and their smallest values: first those that cost speed, then those that change what is
learned."""


def find_changes(config: Config, limit: float, peak: Callable[[Config], float]) -> tuple[str, ...] | None:
    """The first single change (KEY=VALUE) with which the peak is within the limit, else several; None if none are.

    Several changes are the smallest value of each setting, the one that saves most first.
    """
    if peak(config) <= limit:
        return ()
    for setting, least in _SHRINKABLE:
        for value in _smaller_values(config, setting, least):
            if peak(_change(config, setting, value)) <= limit:
                return (f"{setting}={value}",)
    chosen: list[str] = []
    remaining = dict(_SHRINKABLE)
    while peak(config) > limit:
        smallest = {
            name: values[-1] for name, least in remaining.items() if (values := _smaller_values(config, name, least))
        }
        peaks = {name: peak(_change(config, name, value)) for name, value in smallest.items()}
        best = min(peaks, key=lambda name: peaks[name], default="")
        if not best or peaks[best] >= peak(config):
            return None
        chosen.append(f"{best}={smallest[best]}")
        config = _change(config, best, smallest[best])
        del remaining[best]
    return tuple(chosen)


def count_processes(limit: float, peak: Callable[[int], float], *, fewest: int = 1) -> int | None:
    """The fewest processes with which each stays within the limit; None where no number is enough."""
    counts = range(fewest, _MOST_PROCESSES + 1)
    position = bisect_left(counts, True, key=lambda count: peak(count) <= limit)
    return counts[position] if position < len(counts) else None


def _smaller_values(config: Config, setting: str, least: int) -> list[Any]:
    """Smaller values of a setting, the nearest first: halves, or the smaller storage of a classifier."""
    if setting == "head.storage":
        return ["bfloat16"] if config.head.classifier and config.head.storage == "float32" else []
    if setting == "encoder.words" and config.encoder.kind != "static":
        return []
    section, _, name = setting.partition(".")
    value = getattr(getattr(config, section), name) or (1_024 if setting == "encoder.dimension" else 0)
    values = []
    while value // 2 >= least:
        value //= 2
        values.append(value)
    return values


def _change(config: Config, setting: str, value: Any) -> Config:
    """The configuration with one setting changed; unchanged where the settings do not allow the value."""
    section, _, name = setting.partition(".")
    try:
        part: Any = replace(getattr(config, section), **{name: value})
        return dataclasses.replace(config, **{section: part})
    except UsageError:
        return config


def in_bytes(count: float) -> str:
    """A number of bytes with three digits: 12.3 MB, 1.25 GB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"


def in_time(seconds: float) -> str:
    """A number of seconds in ms, s, min, h or days."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6_000:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 200_000 else f"{seconds / 86_400:.3g} days"


def _head(plan: Plan) -> Iterator[str]:
    sizes, config = plan.sizes, plan.config
    yield (
        f"recipe {config.recipe}: {sizes.num_queries:,} queries of {sizes.tokens_per_query:.0f} tokens, "
        f"{sizes.num_labels:,} labels of {sizes.tokens_per_label:.0f}; {config.encoder.kind} encoder of size "
        f"{sizes.encoder.dimension}; {config.train.epochs} epochs of {plan.num_steps:,} steps"
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    share = f" per process of {plan.world_size:,}" if plan.world_size > 1 else ""
    place = " on the device" if memory.separate else ""
    yield f"memory   {in_bytes(memory.limiting)}{place}{share}, most {_PHASES[memory.busiest]}"
    if memory.separate:
        first = in_bytes(memory.peak("process", "first"))
        published = f"; {first} in the first, to publish the model" if plan.world_size > 1 else ""
        yield f"         and {in_bytes(memory.peak('process'))} in each process (texts, tokens, libraries){published}"
    terms = memory.at_peak()
    for term in terms[:_SHOWN_TERMS]:
        formula = f" ({term.formula})" if term.formula else ""
        yield f"  {in_bytes(term.bytes):>10}  {term.name}{formula}"
    if rest := terms[_SHOWN_TERMS:]:
        yield f"  {in_bytes(sum(term.bytes for term in rest)):>10}  {len(rest)} smaller"
    if memory.largest.setting:
        yield f"         to shrink the largest ({memory.largest.name}): {memory.largest.setting}"


def _fit(plan: Plan) -> Iterator[str]:
    if plan.limit is None:
        return
    if plan.fits:
        yield f"fits     in {in_bytes(plan.limit)}"
        return
    remedies = []
    if plan.changes:
        remedies.append("it fits with " + " ".join(f"--set {change}" for change in plan.changes))
    if plan.processes_needed:
        remedies.append(f"it fits on {plan.processes_needed:,} processes")
    yield f"DOES NOT FIT in {in_bytes(plan.limit)}: {'; or '.join(remedies) or 'no setting known here makes it fit'}"


def _disk(plan: Plan) -> Iterator[str]:
    parts = ", ".join(f"{term.name} {in_bytes(term.bytes)}" for term in plan.disk)
    total = in_bytes(sum(term.bytes for term in plan.disk))
    yield f"disk     {total} while training, {in_bytes(plan.disk_after)} after: {parts}"


def _time(plan: Plan) -> Iterator[str]:
    duration = plan.duration
    if duration is None:
        yield f"time     not measured; {plan.operations:.3g} floating-point operations per step and process"
        return
    yield (
        f"time     {in_time(duration.total)}: {in_time(duration.prepare)} to prepare, then {duration.epochs} epochs of "
        f"{in_time(duration.epoch)} ({in_time(duration.step)} per step), then {in_time(duration.tune)} to tune"
    )
    for term in sorted(duration.terms, key=lambda term: -term.seconds)[:_SHOWN_TERMS]:
        if term.seconds >= 0.01 * duration.epoch:
            yield f"  {in_time(term.seconds):>10}  {term.name}"
    yield f"         to shorten the largest ({duration.largest.name}): {duration.largest.setting}"


def _network(plan: Plan) -> Iterator[str]:
    if plan.world_size < 2:
        return
    yield f"network  {in_bytes(sum(exchange.sent for exchange in plan.exchanges))} sent by each process in a step"
    for exchange in plan.exchanges:
        yield f"  {in_bytes(exchange.sent):>10}  {exchange.name}"
    if plan.refresh_exchanges:
        sent = in_bytes(sum(exchange.sent for exchange in plan.refresh_exchanges))
        yield f"         and {sent} in each refresh of clusters and hard negatives"
