"""Gradient caching: the exact gradient over more texts than one graph could hold, in the memory of one micro-batch.

Knows no loss, no data and no optimiser. It is given texts to encode (how, and in which micro-batches) and an objective,
a function of their representations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.training.log import Stopwatch

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EncoderInput:
    """The queries, or the label texts, of a step."""

    encode: Callable[[Rows], Tensor]
    """Encode the given rows with their graph: [len(rows), dimension]."""
    micro_batches: Sequence[Rows]
    """Which rows to encode together; every row occurs once."""
    empty: Tensor | None = None
    """Representations of no rows, for an input that may have none."""

    @property
    def is_one_in_order(self) -> bool:
        """Whether one micro-batch has all rows in their order: nothing is to be put in order then."""
        rows = self.micro_batches[0]
        return len(self.micro_batches) == 1 and bool((rows == np.arange(len(rows))).all())


@dataclass(frozen=True)
class StepResult:
    """The loss of a step and its gradients."""

    loss: Tensor
    gradients: tuple[Tensor, ...]
    """The gradient of the loss with respect to the representations of each input."""


@dataclass
class _Cached:
    """The representations of an input, and what is needed to reach its encoder again."""

    representations: Tensor
    graph: Tensor | None = None
    random_states: list[_RandomState] = field(default_factory=list)


def backward(
    objective: Callable[..., Tensor], *inputs: EncoderInput, scale: float = 1.0, watch: Stopwatch | None = None
) -> StepResult:
    """Add to every parameter's gradient what `objective(*representations).backward()` would, one micro-batch at a time.

    1. Encode each input in micro-batches without a graph, keeping the random state each one started from.
    2. Compute the loss and its gradient with respect to the representations (and to the objective's own parameters).
    3. Encode each micro-batch again with its graph and its random state, and backpropagate its part of that gradient.
    An input of one micro-batch keeps its graph in step 1 and is not encoded again. The stopwatch calls the three steps
    `encode`, `loss` and `backward`.

    `scale` multiplies the gradient that enters the encoder in step 3, and so all gradients of the encoder's parameters,
    but not those of the objective's own parameters, nor the result.
    """
    watch = watch or Stopwatch()
    with watch("encode"):
        cached = [_embed(texts) for texts in inputs]
    with watch("loss"):
        loss = objective(*(entry.representations for entry in cached))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = tuple(_gradient(entry.representations) for entry in cached)
    with watch("backward"):
        for texts, entry, gradient in zip(inputs, cached, gradients, strict=True):
            _backpropagate(texts, entry, gradient if scale == 1.0 else scale * gradient)
    return StepResult(loss.detach(), gradients)


def _embed(texts: EncoderInput) -> _Cached:
    if not texts.micro_batches:
        assert texts.empty is not None
        return _Cached(texts.empty.detach().requires_grad_())
    if len(texts.micro_batches) == 1:
        output = texts.encode(texts.micro_batches[0])
        if texts.is_one_in_order:
            return _Cached(output.detach().requires_grad_(), graph=output)
        order = torch.from_numpy(texts.micro_batches[0]).to(output.device)
        ordered = torch.empty_like(output).index_copy_(0, order, output.detach())
        return _Cached(ordered.requires_grad_(), graph=output)
    cached = _Cached(torch.empty(0))
    total = sum(len(rows) for rows in texts.micro_batches)
    with torch.no_grad():
        for position, rows in enumerate(texts.micro_batches):
            cached.random_states.append(_RandomState.capture())
            part = texts.encode(rows)
            if position == 0:
                cached.representations = part.new_empty(total, part.shape[1])
            cached.representations[torch.from_numpy(rows).to(part.device)] = part
    cached.representations.requires_grad_()
    return cached


def _backpropagate(texts: EncoderInput, cached: _Cached, gradient: Tensor) -> None:
    if cached.graph is not None:
        if cached.graph.requires_grad:
            order = torch.from_numpy(texts.micro_batches[0]).to(gradient.device)
            _continue_backward(cached.graph, gradient if texts.is_one_in_order else gradient[order])
        return
    final_state = _RandomState.capture()
    for rows, state in zip(texts.micro_batches, cached.random_states, strict=True):
        state.restore()
        _continue_backward(texts.encode(rows), gradient[torch.from_numpy(rows).to(gradient.device)])
    final_state.restore()


def _continue_backward(output: Tensor, gradient: Tensor) -> None:
    """Backpropagate a known gradient of `output`, as `torch.autograd.backward(output, gradient)` does.

    That call imports torch's symbolic shapes and sympy to compare two shapes, which takes a second.
    """
    _KnownGradient.apply(output, gradient).backward()  # type: ignore[no-untyped-call]


class _KnownGradient(torch.autograd.Function):
    """A number whose gradient with respect to a tensor is given."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


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
