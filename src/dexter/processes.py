"""Several processes that train or rank together: what the pure parts know of them.

Nothing here communicates. A function that can work over several processes takes a `Processes`; the trainer passes the
real group (`dexter.training.distributed`), everybody else a `SingleProcess`. A `LabelShard` says which labels a process
holds, a `Launch` what the launcher (torchrun) told this process. The number of a process is its rank, from 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from torch import Tensor

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes(Protocol):
    """The processes that hold the same queries and different labels, seen from one of them.

    Every method is a collective: all processes call it, in the same order, and all receive the same result.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """The elementwise maximum over all processes."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over all processes."""
        ...

    def concatenate(self, values: Tensor) -> Tensor:
        """The rows of all processes in order of rank; processes may have different numbers of rows, also none."""
        ...


@dataclass(frozen=True)
class SingleProcess:
    """A process that holds every label itself: each collective returns its argument."""

    rank: int = 0
    size: int = 1

    def max(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def concatenate(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values


def stack(processes: Processes, values: Tensor) -> Tensor:
    """Stack the tensors of all processes, which must have the same shape: [processes, *shape]."""
    return processes.concatenate(values[None])


def concatenate_arrays(processes: Processes, values: NDArray[Any]) -> NDArray[Any]:
    """Return the rows of the arrays of all processes in order of rank."""
    if processes.size == 1:
        return values
    import torch

    return np.asarray(processes.concatenate(torch.from_numpy(np.ascontiguousarray(values))).numpy())


def sum_arrays(processes: Processes, values: NDArray[Any]) -> NDArray[Any]:
    """Return the elementwise sum of the arrays of all processes."""
    if processes.size == 1:
        return values
    import torch

    return np.asarray(processes.sum(torch.from_numpy(np.ascontiguousarray(values))).numpy())


@dataclass(frozen=True, eq=False)
class LabelShard:
    """The labels that one process holds.

    A label lives where its text lives, and distinct texts are dealt out in turn: text t is on rank t mod W. So equal
    texts are encoded once among all processes, and frequent labels, or labels of one topic, which often have
    neighbouring ids, are spread evenly. Held labels and texts are numbered from 0 in ascending order of their ids.
    """

    labels: NDArray[np.int64]
    """Ids of the held labels, ascending."""
    texts: NDArray[np.int64]
    """Ids of their texts among all distinct texts, ascending."""
    text_of_label: NDArray[np.int64]
    """For every held label, the number of its text among the held texts."""
    num_labels: int
    """Number of labels of all processes."""

    @classmethod
    def of(cls, text_of_label: NDArray[np.int64], *, rank: int = 0, size: int = 1) -> LabelShard:
        """The shard of one rank, given for every label the id of its text among the distinct texts."""
        labels = np.flatnonzero(text_of_label % size == rank)
        texts = np.arange(rank, int(text_of_label.max(initial=-1)) + 1, size)
        return cls(labels, texts, text_of_label[labels] // size, len(text_of_label))

    @property
    def is_all(self) -> bool:
        """Whether this process holds every label."""
        return len(self.labels) == self.num_labels

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """For every label id, its number among the held labels; -1 for labels that other processes hold."""
        numbers = np.full(self.num_labels, -1, dtype=np.int64)
        numbers[self.labels] = np.arange(len(self.labels))
        return numbers

    def columns(self, matrix: csr_matrix) -> csr_matrix:
        """The columns of the held labels of a queries x labels matrix."""
        return matrix if self.is_all else matrix[:, self.labels]


@dataclass(frozen=True)
class Launch:
    """How the launcher started this process."""

    rank: int = 0
    """The number of this process, from 0."""
    size: int = 1
    """The number of processes."""
    local_rank: int = 0
    """The number of this process on its machine."""
    local_size: int = 1
    """The number of processes on this machine."""
    restarts: int = 0
    """How often the launcher has restarted all processes after one died."""
    name: str = ""
    """Identifies the launch; restarts keep it."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and logs for all."""
        return self.rank == 0


def read_launch() -> Launch:
    """Read the launcher's environment variables; a single process where there is no launcher."""
    if not all(name in os.environ for name in _REQUIRED):
        return Launch()
    number = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    identity = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    import socket  # takes a while, and only a launched process needs it

    # Without a rendezvous the launcher has no id of its own, but its process stays the same over restarts.
    name = identity if identity != "none" else f"{socket.gethostname()}:{os.getppid()}"
    return Launch(
        rank=number["RANK"],
        size=number["WORLD_SIZE"],
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        name=name,
    )
