"""The processes of a run: one alone, or several that `torchrun` started. The only importer of torch.distributed.

A `ProcessGroup` is what the trainer and, as `dexter.processes.Processes`, the pure parts see of the other processes: a
handful of collectives. Alone, every meeting gives back what was brought, so that there is one code path and one process
needs no launcher. Tensors on a CPU travel by gloo, those on CUDA devices by NCCL.

Shapes: N rows of all ranks, n of this one.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from dexter.errors import ResourceError, UsageError
from dexter.processes import Launch, read_launch
from dexter.training.heartbeat import Heartbeat

HUNG_SECONDS = 45.0
"""A rank without a sign of life for so long is named and given up; the environment's DEXTER_HUNG_SECONDS changes it."""
_joins = count()
"""Every group of a process meets under a name of its own."""
_PATIENCE = timedelta(minutes=30)
"""How long a rank that lives may keep the others waiting."""


@dataclass
class Traffic:
    """What a kind of meeting has cost this rank."""

    calls: int = 0
    bytes: float = 0.0
    """Bytes that this rank sends when ranks stand in a ring: 2 (W - 1) / W of what is summed, W - 1 times its own rows
    that are concatenated."""


class ProcessGroup:
    """This process and the others; see `dexter.processes.Processes` for the meetings that the pure parts use."""

    def __init__(self, launch: Launch | None = None, heartbeat: Heartbeat | None = None) -> None:
        self.launch = launch or Launch()
        self.rank, self.size = self.launch.rank, self.launch.size
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._heartbeat = heartbeat

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this rank, given that of the run: each rank of a machine has a CUDA device of its own."""
        if self.size == 1 or name != "cuda":
            return name
        torch.cuda.set_device(self.launch.local_rank)
        return f"cuda:{self.launch.local_rank}"

    def threads(self, wanted: int) -> int:
        """CPU threads of this rank: those wanted, within its share of the cores."""
        if self.size == 1:
            return wanted
        return max(1, min(wanted, len(os.sched_getaffinity(0)) // self.launch.local_size))

    def bounds(self, num_rows: int) -> NDArray[np.int64]:
        """Where each rank's part of some rows begins, and their end: parts are equal within one row."""
        share, more = divmod(num_rows, self.size)
        sizes = share + (np.arange(self.size) < more)
        return np.concatenate([[0], np.cumsum(sizes)])

    def part(self, num_rows: int) -> slice:
        """This rank's part of so many rows."""
        start, stop = self.bounds(num_rows)[self.rank : self.rank + 2]
        return slice(int(start), int(stop))

    def max(self, values: Tensor) -> Tensor:
        """The elementwise largest over ranks."""
        return values if self.size == 1 else self._reduced(values.detach().clone(), dist.ReduceOp.MAX, "max")

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks."""
        return values if self.size == 1 else self.sum_in_place(values.detach().clone())

    def sum_in_place(self, values: Tensor, *, purpose: str = "sum") -> Tensor:
        """The same, in the memory of a contiguous tensor; `purpose` is what its traffic is counted under."""
        return values if self.size == 1 else self._reduced(values, dist.ReduceOp.SUM, purpose)

    def concatenate(self, values: Tensor, *, purpose: str = "concatenate") -> Tensor:
        """The rows of all ranks, end to end in order of rank; ranks may have different numbers of them, also none."""
        if self.size == 1:
            return values
        counts = self._all_gathered(torch.tensor([len(values)], device=values.device), "concatenate")
        return self._concatenated(values, counts.flatten().tolist(), purpose)

    def joined_rows(self, values_nD: Tensor, num_rows: int) -> Tensor:
        """The rows of all ranks, of which this one has its `part`: differentiable, the gradients of ranks add up."""
        if self.size == 1:
            return values_nD
        joined_ND: Tensor = _JoinedRows.apply(values_nD, self, num_rows)  # type: ignore[no-untyped-call]
        return joined_ND

    def broadcast(self, values: Tensor) -> Tensor:
        """The first rank's tensor on all ranks: each brings one of its shape and type, and gets it back filled."""
        if self.size > 1:
            with self._meeting("broadcast", values.nbytes):
                dist.broadcast(values, src=0)
        return values

    def collect(self, values: Tensor) -> list[Tensor]:
        """The rows of every rank in the memory of the first; nothing on the others."""
        values = values.detach().cpu().contiguous()
        if self.size == 1:
            return [values]
        if values.dtype == torch.bfloat16:
            return [part.view(torch.bfloat16) for part in self.collect(values.view(torch.int16))]
        counts = self._all_gathered(torch.tensor([len(values)]), "collect").flatten().tolist()
        padded = _padded(values, max(counts))
        parts = [torch.empty_like(padded) for _ in counts] if self.is_first else None
        if padded.numel():
            with self._meeting("collect", 0 if self.is_first else values.nbytes):
                dist.gather(padded, parts, dst=0)
        return [part[:count] for part, count in zip(parts or [], counts, strict=False)]

    def barrier(self, name: str = "barrier") -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            self._reduced(torch.zeros(1), dist.ReduceOp.SUM, name)

    def agree(self, *values: float) -> list[float]:
        """The largest of each number over ranks."""
        return self.max(torch.tensor(values, dtype=torch.float64)).tolist() if self.size > 1 else list(values)

    def leave(self) -> None:
        """Part from the others, when all is done."""
        if self.size > 1:
            self.barrier("leave")
            if self._heartbeat is not None:
                self._heartbeat.leave()
                dist.destroy_process_group()

    def _reduced(self, values: Tensor, operation: Any, name: str) -> Tensor:
        with self._meeting(name, 2 * (self.size - 1) / self.size * values.nbytes):
            dist.all_reduce(values, op=operation)
        return values

    def _all_gathered(self, values: Tensor, name: str) -> Tensor:
        """Tensors of one shape, stacked."""
        gathered = values.new_empty(self.size, *values.shape)
        if values.numel():
            with self._meeting(name, (self.size - 1) * values.nbytes):
                dist.all_gather(list(gathered.unbind()), values.contiguous())
        return gathered

    def _concatenated(self, values: Tensor, counts: Sequence[int], name: str) -> Tensor:
        gathered = self._all_gathered(_padded(values.detach(), max(counts)), name)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

    @contextmanager
    def _meeting(self, name: str, num_bytes: float) -> Iterator[None]:
        """Count the meeting, let the heartbeat know, and say in one line when the others are lost."""
        record = self.traffic[name]
        record.calls, record.bytes = record.calls + 1, record.bytes + num_bytes
        if self._heartbeat is not None:
            self._heartbeat.meet(name)
        try:
            yield
        except RuntimeError as error:
            raise ResourceError(
                f"rank {self.rank} lost the others in {name} ({_first_line(error)}): another rank died, or the network "
                "failed; start again with --resume, or let torchrun --max-restarts do it"
            ) from error
        finally:
            if self._heartbeat is not None:
                self._heartbeat.go_on()


class _JoinedRows(torch.autograd.Function):
    """Rows of all ranks; backward, the sum of what every rank has to say about this rank's rows."""

    @staticmethod
    def forward(ctx: Any, values_nD: Tensor, processes: ProcessGroup, num_rows: int) -> Tensor:
        ctx.processes, ctx.part = processes, processes.part(num_rows)
        return processes._concatenated(values_nD, np.diff(processes.bounds(num_rows)).tolist(), "queries")

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        summed_ND = ctx.processes.sum_in_place(outer[0].contiguous().clone(), purpose="query gradients")
        return summed_ND[ctx.part], None, None


@contextmanager
def joined() -> Iterator[ProcessGroup]:
    """The processes that the environment speaks of; a process group is made where there is none, and left at the end.

    After an error it is not left: the others wait in some meeting, and learn of it when this process is gone.
    """
    launch = read_launch()
    if launch.size == 1:
        yield ProcessGroup(launch)
        return
    processes = ProcessGroup(launch, None if dist.is_initialized() else _start(launch))
    yield processes
    processes.leave()


def _start(launch: Launch) -> Heartbeat:
    """Make the process group, and begin to beat."""
    seconds = _hung_seconds()
    store, rank, size = next(rendezvous("env://"))
    name = f"dexter/{launch.restarts}/{next(_joins)}"
    # A connection of its own: the group's may be waiting for an answer when a beat is due.
    groups = dist.PrefixStore(f"{name}/group", store)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"{name}/beats", store.clone())  # type: ignore[attr-defined]
    heartbeat = Heartbeat(own, rank=rank, size=size, seconds=seconds)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=_PATIENCE)
    dist.all_reduce(torch.zeros(1))
    heartbeat.start()
    return heartbeat


def _hung_seconds() -> float:
    text = os.environ.get("DEXTER_HUNG_SECONDS", str(HUNG_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"DEXTER_HUNG_SECONDS is {text!r}: expected a number of seconds above 0, such as 45")
    return seconds


def _padded(values: Tensor, num_rows: int) -> Tensor:
    """So many rows, the last of them empty: meetings want tensors of one shape."""
    if len(values) == num_rows:
        return values.contiguous()
    padded = values.new_zeros(num_rows, *values.shape[1:])
    padded[: len(values)] = values
    return padded


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
