"""Several processes that train one model: the only importer of torch.distributed.

A `ProcessGroup` is what the trainer and, as `dexter.processes.Processes`, the pure parts see of the other processes: a
handful of collectives. In a single process every collective returns its argument, so that there is one code path and
no launcher is needed. Tensors on a CPU travel by gloo, those on CUDA devices by NCCL. Then: `Heartbeat`, which names a
process that hangs; `add_gradients`, which sums the gradients of shared weights; and what else processes divide among
themselves: queries to embed, and the labels of the model that is published.

Shapes: N rows of all processes, n of this one; U touched rows of a table, D dimensions.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from dexter.data.tokens import Tokens
from dexter.errors import ModelError, ResourceError, UsageError
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.processes import LabelShard, Launch, SingleProcess, concatenate_arrays, num_cores, read_launch
from dexter.training.optimizers import Part
from dexter.training.rows import sum_by_row
from dexter.types import HeadName

log = logging.getLogger("dexter")

HUNG_SECONDS = 45.0
"""A rank without a sign of life for this long is named and given up; the variable DEXTER_HUNG_SECONDS changes it."""
BUCKET_BYTES = 25 * 2**20
"""Gradients summed in one collective: large enough that its latency does not matter."""
_GROUP_TIMEOUT = timedelta(minutes=30)
"""How long a rank that is alive may keep the others waiting."""
_EXIT_CODE = ResourceError.exit_code
_LEFT = "left"
_group_numbers = count()
"""Every process group of a process has a name of its own in the store."""


@dataclass
class Traffic:
    """What one kind of collective has cost this rank."""

    calls: int = 0
    bytes: float = 0.0
    """Bytes that this rank sends in a ring of W ranks: 2 (W - 1) / W of what is summed, W - 1 times its own rows that
    are concatenated."""


class ProcessGroup:
    """This process and the others; see `dexter.processes.Processes` for the collectives that the pure parts use."""

    def __init__(self, launch: Launch | None = None, heartbeat: Heartbeat | None = None) -> None:
        self.launch = launch or Launch()
        self.rank, self.size = self.launch.rank, self.launch.size
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._heartbeat = heartbeat

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and logs for all."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """The device of this rank, given that of the run: each rank of a machine has a CUDA device of its own."""
        chosen = f"cuda:{self.launch.local_rank}" if self.size > 1 and name == "cuda" else name
        if chosen.startswith("cuda:"):
            # Random states are captured and restored on the current device.
            torch.cuda.set_device(chosen)
        return chosen

    def threads(self, wanted: int) -> int:
        """CPU threads of this rank: the wanted number, limited to its share of the cores."""
        if self.size == 1:
            return wanted
        return max(1, min(wanted, num_cores() // self.launch.local_size))

    def bounds(self, num_rows: int) -> NDArray[np.int64]:
        """Split rows into one part per rank, sizes differing by at most one: where each begins, and the end."""
        share, more = divmod(num_rows, self.size)
        sizes = share + (np.arange(self.size) < more)
        return np.concatenate([[0], np.cumsum(sizes)])

    def part(self, num_rows: int) -> slice:
        """This rank's part of `num_rows` rows."""
        start, stop = self.bounds(num_rows)[self.rank : self.rank + 2]
        return slice(int(start), int(stop))

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over ranks."""
        return values if self.size == 1 else self._reduced(values.detach().clone(), dist.ReduceOp.MAX, "max")

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks."""
        return values if self.size == 1 else self.sum_in_place(values.detach().clone())

    def sum_in_place(self, values: Tensor, *, purpose: str = "sum") -> Tensor:
        """The elementwise sum, written to a contiguous tensor; its traffic is counted under `purpose`."""
        return values if self.size == 1 else self._reduced(values, dist.ReduceOp.SUM, purpose)

    def concatenate(self, values: Tensor, *, purpose: str = "concatenate") -> Tensor:
        """The rows of all ranks in order of rank; ranks may have different numbers of rows, also none."""
        if self.size == 1:
            return values
        counts = self._all_gathered(torch.tensor([len(values)], device=values.device), "concatenate")
        return self._concatenated(values, counts.flatten().tolist(), purpose)

    def joined_rows(self, values_nD: Tensor, num_rows: int) -> Tensor:
        """The rows of all ranks, of which this one has its `part`; differentiable: gradients of ranks are summed."""
        if self.size == 1:
            return values_nD
        joined_ND: Tensor = _JoinedRows.apply(values_nD, self, num_rows)  # type: ignore[no-untyped-call]
        return joined_ND

    def broadcast(self, values: Tensor) -> Tensor:
        """Fill the tensor with that of the first rank, which has the same shape and type."""
        if self.size > 1:
            with self._collective("broadcast", values.nbytes):
                dist.broadcast(values, src=0)
        return values

    def collect(self, values: Tensor) -> list[Tensor]:
        """The rows of every rank in the memory of the first; an empty list on the others."""
        values = values.detach().cpu().contiguous()
        if self.size == 1:
            return [values]
        if values.dtype == torch.bfloat16:
            return [part.view(torch.bfloat16) for part in self.collect(values.view(torch.int16))]
        counts = self._all_gathered(torch.tensor([len(values)]), "collect").flatten().tolist()
        padded = _padded(values, max(counts))
        parts = [torch.empty_like(padded) for _ in counts] if self.is_first else None
        if padded.numel():
            with self._collective("collect", 0 if self.is_first else values.nbytes):
                dist.gather(padded, parts, dst=0)
        return [part[:count] for part, count in zip(parts or [], counts, strict=False)]

    def barrier(self, name: str = "barrier") -> None:
        """Wait until every rank has arrived."""
        if self.size > 1:
            self._reduced(torch.zeros(1), dist.ReduceOp.SUM, name)

    def agree(self, *values: float) -> list[float]:
        """The maximum of each number over ranks."""
        return self.max(torch.tensor(values, dtype=torch.float64)).tolist() if self.size > 1 else list(values)

    def leave(self) -> None:
        """Leave the group when all work is done."""
        if self.size > 1:
            self.barrier("leave")
            if self._heartbeat is not None:
                self._heartbeat.leave()
                dist.destroy_process_group()

    def _reduced(self, values: Tensor, operation: Any, name: str) -> Tensor:
        with self._collective(name, 2 * (self.size - 1) / self.size * values.nbytes):
            dist.all_reduce(values, op=operation)
        return values

    def _all_gathered(self, values: Tensor, name: str) -> Tensor:
        """The tensors of all ranks, of one shape, stacked."""
        gathered = values.new_empty(self.size, *values.shape)
        if values.numel():
            with self._collective(name, (self.size - 1) * values.nbytes):
                dist.all_gather(list(gathered.unbind()), values.contiguous())
        return gathered

    def _concatenated(self, values: Tensor, counts: Sequence[int], name: str) -> Tensor:
        gathered = self._all_gathered(_padded(values.detach(), max(counts)), name)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

    @contextmanager
    def _collective(self, name: str, num_bytes: float) -> Iterator[None]:
        """Count the collective, inform the heartbeat, and turn the loss of the others into one clear error."""
        record = self.traffic[name]
        record.calls, record.bytes = record.calls + 1, record.bytes + num_bytes
        if self._heartbeat is not None:
            self._heartbeat.enter(name)
        try:
            yield
        except RuntimeError as error:
            raise ResourceError(
                f"rank {self.rank} lost the others in {name} ({_first_line(error)}): another rank died, or the network "
                "failed; start again with --resume, or let torchrun --max-restarts do it"
            ) from error
        finally:
            if self._heartbeat is not None:
                self._heartbeat.exit()


class _JoinedRows(torch.autograd.Function):
    """Concatenate the rows of all ranks; backward, sum the gradients of all ranks for this rank's rows."""

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
    """The process group that the environment describes; it is created where there is none, and left at the end.

    After an error it is not left: the others wait in a collective, and learn of the error when this process has ended.
    """
    launch = read_launch()
    if launch.size == 1:
        yield ProcessGroup(launch)
        return
    processes = ProcessGroup(launch, None if dist.is_initialized() else _start(launch))
    yield processes
    processes.leave()


def _start(launch: Launch) -> Heartbeat:
    """Create the torch process group, and start the heartbeat."""
    seconds = _hung_seconds()
    store, rank, size = next(rendezvous("env://"))
    name = f"dexter/{launch.restarts}/{next(_group_numbers)}"
    # A connection of its own: the group's may be waiting for an answer when a beat is due.
    groups = dist.PrefixStore(f"{name}/group", store)  # type: ignore[attr-defined]
    own = dist.PrefixStore(f"{name}/beats", store.clone())  # type: ignore[attr-defined]
    heartbeat = Heartbeat(own, rank=rank, size=size, seconds=seconds)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=groups, rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)
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
    """Append rows of zeros up to `num_rows`: collectives need tensors of one shape."""
    if len(values) == num_rows:
        return values.contiguous()
    padded = values.new_zeros(num_rows, *values.shape[1:])
    padded[: len(values)] = values
    return padded


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


class BeatStore(Protocol):
    """Short texts by name, shared by all ranks: what a heartbeat needs of torch's store."""

    def set(self, name: str, text: str) -> None:
        """Write a text."""
        ...

    def multi_get(self, names: list[str]) -> list[bytes]:
        """Read several texts."""
        ...


@dataclass
class _LastBeat:
    """The last beat that was seen of a rank."""

    text: str = ""
    collectives: int = 0
    doing: str = ""
    changed: float = 0.0


class Heartbeat:
    """Names a rank that hangs: a thread of every rank publishes a beat, and watches the others' while its rank waits.

    A rank that is stopped or cut off never arrives in a collective, and the others would wait in silence.

    - A rank that has not beaten for `seconds` is gone: it is named, and this process ends (its launcher restarts all).
    - A rank that beats but has entered fewer collectives is busy: warnings name it until it arrives.

    `torch.distributed.monitored_barrier` names ranks too, but cannot tell a busy rank from a stopped one, exists for
    gloo only, and would have to precede every collective; torchelastic restarts processes that end, not ones that hang.
    """

    def __init__(
        self, store: BeatStore, *, rank: int, size: int, seconds: float, end: Callable[[str], None] | None = None
    ) -> None:
        """Publish the first beat.

        Args:
            store: where beats are published.
            rank: the number of this process.
            size: number of ranks.
            seconds: a rank that has not beaten for this long is gone.
            end: called with a message when one is; by default it is printed on stderr and the process ends.
        """
        self._store, self._rank, self._seconds = store, rank, seconds
        self._end = end or _end_process
        self._names = [f"beat/{other}" for other in range(size)]
        self._last_beats = [_LastBeat(changed=time.monotonic()) for _ in range(size)]
        self._collectives = 0
        self._waiting: tuple[str, float] | None = None
        self._warned = 0.0
        self._beats = 0
        self._over = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start to watch; every rank must have been constructed by now."""
        self._thread.start()

    def enter(self, name: str) -> None:
        """This rank has entered a collective and waits there."""
        self._collectives += 1
        self._waiting = (name, time.monotonic())

    def exit(self) -> None:
        """This rank has left its collective."""
        self._waiting = None

    def leave(self) -> None:
        """Stop beating: this rank has finished."""
        self._over.set()
        self._thread.join(timeout=self._seconds)

    def _run(self) -> None:
        lost_at: float | None = None
        while not self._over.wait(self._seconds / 10):
            try:
                self._publish()
                self._read_beats()
                lost_at = None
            except Exception as error:
                # The store ended with the process that kept it, or will answer again.
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self._seconds:
                    self._end(f"rank {self._rank} cannot reach the launcher's store any more ({error})")
                    return
            if (message := self._find_hung_ranks(time.monotonic())) is not None:
                self._end(message)
                return
        try:
            self._store.set(self._names[self._rank], _LEFT)
        except Exception:
            log.debug("the store closed before rank %d could report that it left", self._rank)

    def _publish(self) -> None:
        self._beats += 1
        waiting = self._waiting
        doing = f"waiting in {waiting[0]}" if waiting else "working"
        self._store.set(self._names[self._rank], f"{self._beats}/{self._collectives}/{doing}")

    def _read_beats(self) -> None:
        for last, text in zip(self._last_beats, self._store.multi_get(self._names), strict=True):
            beat = text.decode()
            if beat != last.text:
                last.text, last.changed = beat, time.monotonic()
                if beat != _LEFT:
                    _, collectives, last.doing = beat.split("/", 2)
                    last.collectives = int(collectives)

    def _find_hung_ranks(self, now: float) -> str | None:
        """A message that names ranks which are gone, or None; ranks that are only late are named in a warning."""
        waiting = self._waiting
        if waiting is None or now - waiting[1] < self._seconds / 2:
            return None
        others = [(rank, last) for rank, last in enumerate(self._last_beats) if rank != self._rank]
        gone = [rank for rank, last in others if now - last.changed >= self._seconds or last.text == _LEFT]
        if gone:
            return (
                f"{'rank' if len(gone) == 1 else 'ranks'} {', '.join(map(str, gone))} gave no sign of life for "
                f"{self._seconds:.0f} s while rank {self._rank} waited in {waiting[0]}: stopped, cut off or dead; "
                "start again with --resume, or use torchrun --max-restarts"
            )
        behind = [f"rank {rank} ({last.doing})" for rank, last in others if last.collectives < self._collectives]
        if behind and now - max(self._warned, waiting[1]) >= self._seconds / 2:
            self._warned = now
            log.warning(
                "rank %d has waited %.0f s in %s for %s",
                self._rank, now - waiting[1], waiting[0], ", ".join(behind),
            )  # fmt: skip
        return None


def _end_process(message: str) -> None:
    # The main thread is in a collective that nothing can interrupt. Files are whole or under temporary names.
    print(f"dexter: error: {message}", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)


def add_gradients(parts: Sequence[Part], processes: ProcessGroup) -> None:
    """Sum the gradients of all parameters that ranks share.

    The loss is a mean over the queries of all ranks, and each rank has differentiated its part of the sum: gradients
    are added, never averaged, and do not depend on the number of ranks. Dense ones travel in buckets. Row-sparse ones
    (the static encoder's table, while a step touches few of its rows) travel as rows: every rank gathers the others'
    touched rows and sums them, which costs what was touched and not the table. Weights with a row per label stay where
    they are.
    """
    if processes.size == 1:
        return
    shared = [part for part in parts if not part.by_label]
    dense = [parameter for part in shared if not part.sparse for _, parameter in part.parameters]
    sparse = [parameter for part in shared if part.sparse for _, parameter in part.parameters]
    # A weight that no rank used has no gradient (and is not decayed); one that only this rank did not use gets zeros.
    has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in dense + sparse])
    used = processes.max(has_gradient).bool().tolist()
    for bucket in _buckets([parameter for parameter, is_used in zip(dense, used, strict=False) if is_used]):
        _add_dense(bucket, processes)
    for parameter, is_used in zip(sparse, used[len(dense) :], strict=True):
        if is_used:
            _add_rows(parameter, processes)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group neighbouring parameters of one type and device up to about the size of a bucket."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        full = size + parameter.nbytes > BUCKET_BYTES
        if bucket and (full or parameter.dtype != bucket[0].dtype or parameter.device != bucket[0].device):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _add_dense(bucket: Sequence[nn.Parameter], processes: ProcessGroup) -> None:
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous() for parameter in bucket
    ]
    flat = gradients[0].flatten() if len(gradients) == 1 else torch.cat([gradient.flatten() for gradient in gradients])
    processes.sum_in_place(flat, purpose="gradients")
    for parameter, summed in zip(bucket, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
        parameter.grad = summed.view_as(parameter)


def _add_rows(parameter: nn.Parameter, processes: ProcessGroup) -> None:
    if parameter.grad is None:
        rows_U = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values_UD = parameter.new_empty(0, parameter.shape[1])
    else:
        rows_U, values_UD = sum_by_row(parameter.grad)
    rows = processes.concatenate(rows_U, purpose="table gradients")
    values = processes.concatenate(values_UD, purpose="table gradients")
    parameter.grad = torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False)


def broadcast_weights(processes: ProcessGroup, *modules: nn.Module) -> None:
    """Give every rank the first rank's weights and buffers."""
    for module in modules:
        for tensor in module.state_dict().values():
            processes.broadcast(tensor)


def check_weights_agree(processes: ProcessGroup, *modules: nn.Module) -> None:
    """Raise a ModelError unless all ranks have the same weights, as they must after the same updates."""
    if processes.size == 1:
        return
    parameters = [parameter.detach() for module in modules for parameter in module.parameters()]
    sums = torch.stack([parameter.double().sum().cpu() for parameter in parameters])
    largest, smallest = processes.max(sums), -processes.max(-sums)
    if not torch.equal(largest, smallest):
        raise ModelError(
            "the ranks' copies of the encoder have drifted apart: their devices or libraries compute differently; "
            "resume from the last checkpoint on equal machines"
        )


def query_vectors(
    processes: ProcessGroup, model: Model, tokens: Tokens, *, head: HeadName | None = None
) -> NDArray[np.float32]:
    """Embed the queries, each rank a part of them, and return the vectors of all on every rank."""
    own_ND = model.encode_tokens(tokens.part(processes.part(len(tokens))), side="query")
    return concatenate_arrays(processes, model.search_vectors(own_ND, head=head))


def whole_model(
    processes: ProcessGroup, model: Model, labels: Labels, text_of_label: NDArray[np.int64]
) -> Model | None:
    """The model with the labels of all ranks, on the first rank; None on the others.

    Args:
        processes: the ranks.
        model: the model with the labels that this rank holds.
        labels: all labels.
        text_of_label: for every label, the id of its text among the distinct texts; decides who holds it.
    """
    if processes.size == 1:
        return model
    shards = [LabelShard.of(text_of_label, rank=rank, size=processes.size) for rank in range(processes.size)]
    order = np.concatenate([shard.labels for shard in shards])
    biases = [_in_order(processes, bias, order) for bias in model.prior_biases()]
    table_LC = None if model.classifier is None else _in_order(processes, model.classifier.table_LC, order)
    representations = _in_order(processes, model.representations_LD, order)
    if not processes.is_first:
        return None
    whole = model.with_labels(labels, representations, biases=biases, table_LC=table_LC)
    return replace(whole, processes=SingleProcess())


def _in_order(processes: ProcessGroup, rows: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
    """The rows of all ranks in the order of their labels, on the first rank; no rows on the others."""
    # Collectives know no uint16, in which the bits of bfloat16 are.
    plain = rows.view(np.int16) if rows.dtype == np.uint16 else rows
    parts = [part.numpy().view(rows.dtype) for part in processes.collect(torch.from_numpy(plain))]
    if not parts:
        return rows[:0]
    ordered = np.empty((len(order), *rows.shape[1:]), dtype=rows.dtype)
    ordered[order] = np.concatenate(parts)
    return ordered
