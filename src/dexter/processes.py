"""Ranks that share a computation: what the pure parts know of them.

Nothing here speaks to another process. A part that can be computed over several ranks takes a `Ranks`; the trainer
passes the real ones (`dexter.training.distributed`), everybody else is `OneProcess`.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks(Protocol):
    """Where this process stands among those that hold the same queries and different labels.

    Every method is a meeting: all ranks call it, in the same order, and leave with the same result.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def max(self, values: Tensor) -> Tensor:
        """The elementwise largest over ranks."""
        ...

    def sum(self, values: Tensor) -> Tensor:
        """The elementwise sum over ranks."""
        ...

    def concatenate(self, values: Tensor) -> Tensor:
        """The rows of all ranks, end to end in order of rank; ranks may have different numbers of them, also none."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """A process that holds every label itself: each meeting ends with what it brought."""

    rank: int = 0
    size: int = 1

    def max(self, values: Tensor) -> Tensor:
        """The values: there is nobody else."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The values: there is nobody else."""
        return values

    def concatenate(self, values: Tensor) -> Tensor:
        """The values: there is nobody else."""
        return values


def stack(ranks: Ranks, values: Tensor) -> Tensor:
    """The tensors of all ranks, which have one shape: [ranks, *shape]."""
    return ranks.concatenate(values[None])


@dataclass(frozen=True)
class Launch:
    """A process among those that were started together."""

    rank: int = 0
    """Its number, from 0."""
    size: int = 1
    """How many there are."""
    local_rank: int = 0
    """Its number on this machine."""
    local_size: int = 1
    """How many there are on this machine."""
    restarts: int = 0
    """How often the launcher has started them all again after one died."""
    name: str = ""
    """The same for every attempt of one launch, and for no other."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0


def read_launch() -> Launch:
    """What the launcher says in the environment; one process alone where there is no launcher."""
    if not all(name in os.environ for name in _NEEDED):
        return Launch()
    number = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    identity = os.environ.get("TORCHELASTIC_RUN_ID", "none")
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
