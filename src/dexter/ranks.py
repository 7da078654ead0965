"""Ranks that share a computation: what the pure parts know of them.

Nothing here speaks to another process. A part that can be computed over several ranks takes a `Ranks`; the trainer
passes the real ones (`dexter.training.distributed`), everybody else is `OneProcess`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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
