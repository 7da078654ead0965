"""Gradient caching: a loss over more texts than a graph could hold, exact, in the memory of one micro-batch.

Knows no loss, no data and no optimiser. It is given sides (each a way to encode rows, and how to cut them into
micro-batches) and an objective, a function of their representations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.batches.stopwatch import Stopwatch

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Side:
    """Texts of one kind in a step: queries, or labels."""

    encode: Callable[[Rows], Tensor]
    """Encode some rows with their graph: [len(rows), dimension]."""
    micro_batches: Sequence[Rows]
    """Which rows to encode together; every row of the side once."""
    backward_share: float = 0.0
    """Rows whose gradient norm is below this share of the largest are not replayed; 0: all are."""
    cut_again: Callable[[Rows], Sequence[Rows]] | None = None
    """How to cut the rows to be replayed; None where encoding is random: a micro-batch is then replayed whole."""
    empty: Tensor | None = None
    """Representations of no rows, for a side that may be without any."""
    over_processes: Callable[[Tensor], Tensor] | None = None
    """Where ranks have different rows: the largest of a number among them, which `backward_share` is a share of."""


@dataclass(frozen=True)
class Outcome:
    """What a step gave."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    """The gradient of the loss with respect to each side's representations."""
    replayed: tuple[int, ...]
    """Rows of each side that were encoded a second time for their gradient."""


@dataclass
class _Cached:
    """Representations of a side, and what is needed to reach its encoder again."""

    representations: Tensor
    graphs: list[Tensor] = field(default_factory=list)
    random_states: list[_RandomState] = field(default_factory=list)


def backward(objective: Callable[..., Tensor], *sides: Side, watch: Stopwatch | None = None) -> Outcome:
    """Add to every parameter's gradient what `objective(*representations).backward()` would, one micro-batch at a time.

    1. Encode each side in micro-batches without a graph, keeping the random state each one started from.
    2. Take the loss and its gradient with respect to the representations (and to the objective's own parameters).
    3. Encode each micro-batch again with its graph and its random state, and push its part of that gradient.
    A side that is one micro-batch keeps its graph in step 1 and is not encoded again. The stopwatch calls the three
    steps `encode`, `loss` and `backward`.
    """
    watch = watch or Stopwatch()
    with watch("encode"):
        cached = [_embed(side) for side in sides]
    with watch("loss"):
        loss = objective(*(entry.representations for entry in cached))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = tuple(_gradient(entry.representations) for entry in cached)
    with watch("backward"):
        replayed = tuple(
            _push(side, entry, gradient) for side, entry, gradient in zip(sides, cached, gradients, strict=True)
        )
    return Outcome(loss.detach(), gradients, replayed)


def _embed(side: Side) -> _Cached:
    if not side.micro_batches:
        assert side.empty is not None
        return _Cached(side.empty.detach().requires_grad_())
    if len(side.micro_batches) == 1:
        output = side.encode(side.micro_batches[0])
        order = torch.from_numpy(side.micro_batches[0]).to(output.device)
        ordered = torch.empty_like(output).index_copy_(0, order, output.detach())
        return _Cached(ordered.requires_grad_(), graphs=[output])
    cached = _Cached(torch.empty(0))
    total = sum(len(rows) for rows in side.micro_batches)
    with torch.no_grad():
        for position, rows in enumerate(side.micro_batches):
            cached.random_states.append(_RandomState.capture())
            part = side.encode(rows)
            if position == 0:
                cached.representations = part.new_empty(total, part.shape[1])
            cached.representations[torch.from_numpy(rows).to(part.device)] = part
    cached.representations.requires_grad_()
    return cached


def _push(side: Side, cached: _Cached, gradient: Tensor) -> int:
    keep = _rows_to_replay(gradient, side)
    if cached.graphs:
        order = torch.from_numpy(side.micro_batches[0]).to(gradient.device)
        if cached.graphs[0].requires_grad:
            kept = gradient * keep[:, None] if side.backward_share else gradient
            torch.autograd.backward(cached.graphs[0], kept[order])
        return 0
    final_state = _RandomState.capture()
    replayed = 0
    for rows, state in _replays(side, cached, keep.cpu().numpy()):
        if state is not None:
            state.restore()
        torch.autograd.backward(side.encode(rows), gradient[torch.from_numpy(rows).to(gradient.device)])
        replayed += len(rows)
    final_state.restore()
    return replayed


def _replays(side: Side, cached: _Cached, keep: NDArray[np.bool_]) -> Iterator[tuple[Rows, _RandomState | None]]:
    """The micro-batches to encode again, each with the random state to start from."""
    if side.cut_again is not None and not keep.all():
        kept = np.flatnonzero(keep)
        yield from ((kept[rows], None) for rows in side.cut_again(kept))
        return
    for rows, state in zip(side.micro_batches, cached.random_states, strict=True):
        if keep[rows].any():
            yield rows, state


def _rows_to_replay(gradient: Tensor, side: Side) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=1)
    largest = norms.max() if len(norms) else norms.new_zeros(())
    if side.backward_share and side.over_processes is not None:
        largest = side.over_processes(largest)
    return norms >= side.backward_share * largest


def _gradient(representations: Tensor) -> Tensor:
    return torch.zeros_like(representations) if representations.grad is None else representations.grad


@dataclass(frozen=True)
class _RandomState:
    """The state of the generators that dropout draws from."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def capture(cls) -> _RandomState:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
