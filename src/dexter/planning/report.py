"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dexter.planning.plan import Plan

_SHOWN_TERMS = 8
_PHASES = {
    "step": "in a step",
    "refresh": "while mining",
    "validation": "in a validation",
    "start": "at the start",
    "tuning": "at the end",
}


def in_bytes(count: float) -> str:
    """A number of bytes with three digits: 12.3 MB, 1.25 GB."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"


def in_time(seconds: float) -> str:
    """A number of seconds as a person would say it."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 6_000:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 200_000 else f"{seconds / 86_400:.3g} days"


def render(plan: Plan) -> str:
    """The plan for a reader."""
    return "\n".join([*_head(plan), *_memory(plan), *_fit(plan), *_disk(plan), *_time(plan), *_ranks(plan)])


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan for a program; bytes and seconds throughout."""
    duration, memory = plan.duration, plan.memory
    return {
        "sizes": dataclasses.asdict(plan.sizes),
        "steps_per_epoch": plan.num_steps,
        "memory": {
            "peak": round(memory.peak("device") if memory.separate else memory.peak()),
            "process": round(memory.peak("process")) if memory.separate else round(memory.peak()),
            "first_process": round(memory.peak("process", "first")) if memory.separate else round(memory.peak()),
            "phase": memory.busiest,
            "terms": [dataclasses.asdict(term) for term in memory.terms],
            "largest": dataclasses.asdict(memory.largest),
        },
        "disk": {
            "total": round(sum(term.bytes for term in plan.disk)),
            "terms": [dataclasses.asdict(term) for term in plan.disk],
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
        "rates": None if plan.rates is None else dataclasses.asdict(plan.rates),
        "operations_per_step": plan.operations,
        "world_size": plan.world_size,
        "sent_per_step": [dataclasses.asdict(exchange) for exchange in plan.exchanges],
        "sent_per_refresh": [dataclasses.asdict(exchange) for exchange in plan.refresh_exchanges],
        "limit": plan.limit,
        "fits": plan.fits,
        "changes": None if plan.changes is None else [str(change) for change in plan.changes],
        "ranks_needed": plan.ranks_needed,
    }


def _head(plan: Plan) -> Iterator[str]:
    sizes, config = plan.sizes, plan.config
    yield (
        f"recipe {config.recipe}: {sizes.num_queries:,} queries of {sizes.tokens_per_query:.0f} tokens, "
        f"{sizes.num_labels:,} labels of {sizes.tokens_per_label:.0f}; {config.encoder.kind} encoder of size "
        f"{sizes.encoder.dimension}; {config.train.epochs} epochs of {plan.num_steps:,} steps"
    )


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if memory.separate:
        place = f"per rank of {plan.world_size:,}" if plan.world_size > 1 else "on the device"
        yield f"memory   {in_bytes(memory.peak('device'))} {place}, most {_PHASES[memory.busiest]}"
        shared = in_bytes(memory.peak("process"))
        yield f"         and {shared} in each process (texts, tokens, libraries){_first(plan)}"
    else:
        place = f" per rank of {plan.world_size:,}" if plan.world_size > 1 else ""
        yield f"memory   {in_bytes(memory.peak())}{place}, most {_PHASES[memory.busiest]}"
    terms = [term for term in memory.at_peak() if not memory.separate or term.place == "device"]
    for term in terms[:_SHOWN_TERMS]:
        yield f"  {in_bytes(term.bytes):>10}  {term.name} ({term.formula})"
    if len(terms) > _SHOWN_TERMS:
        yield f"  {in_bytes(sum(term.bytes for term in terms[_SHOWN_TERMS:])):>10}  {len(terms) - _SHOWN_TERMS} smaller"
    if memory.largest.setting:
        yield f"         to shrink the largest ({memory.largest.name}): {memory.largest.setting}"


def _first(plan: Plan) -> str:
    """What the first of several processes needs beside the others."""
    if plan.world_size == 1:
        return ""
    return f"; {in_bytes(plan.memory.peak('process', 'first'))} in the first, to publish the model"


def _fit(plan: Plan) -> Iterator[str]:
    if plan.limit is None:
        return
    if plan.fits:
        yield f"fits     in {in_bytes(plan.limit)}"
        return
    remedies = []
    if plan.changes:
        remedies.append("it fits with " + " ".join(f"--set {change}" for change in plan.changes))
    if plan.ranks_needed:
        remedies.append(f"it fits on {plan.ranks_needed:,} ranks")
    yield f"DOES NOT FIT in {in_bytes(plan.limit)}: {'; or '.join(remedies) or 'no setting known here makes it fit'}"


def _disk(plan: Plan) -> Iterator[str]:
    parts = ", ".join(f"{term.name} {in_bytes(term.bytes)}" for term in plan.disk)
    yield f"disk     {in_bytes(sum(term.bytes for term in plan.disk))}: {parts}"


def _time(plan: Plan) -> Iterator[str]:
    duration = plan.duration
    if duration is None:
        yield f"time     not measured; {plan.operations:.3g} floating-point operations per step and rank"
        return
    yield (
        f"time     {in_time(duration.total)}: {in_time(duration.prepare)} to prepare, then {duration.epochs} epochs of "
        f"{in_time(duration.epoch)} ({in_time(duration.step)} per step), then {in_time(duration.tune)} to tune"
    )
    for term in sorted(duration.terms, key=lambda term: -term.seconds)[:_SHOWN_TERMS]:
        if term.seconds >= 0.01 * duration.epoch:
            yield f"  {in_time(term.seconds):>10}  {term.name}"
    yield f"         to shorten the largest ({duration.largest.name}): {duration.largest.setting}"


def _ranks(plan: Plan) -> Iterator[str]:
    if plan.world_size < 2:
        return
    yield f"network  {in_bytes(sum(exchange.sent for exchange in plan.exchanges))} sent by each rank in a step"
    for exchange in plan.exchanges:
        yield f"  {in_bytes(exchange.sent):>10}  {exchange.name}"
    if plan.refresh_exchanges:
        sent = in_bytes(sum(exchange.sent for exchange in plan.refresh_exchanges))
        yield f"         and {sent} in each refresh of clusters and hard negatives"
