"""How this process was started: alone, or as one of several by `torchrun`. Reads the environment, nothing heavier."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
