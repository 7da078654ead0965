"""The bridge to autograd: gradients are computed together with the value, backward only scales them.

A loss is a function `solve(queries, labels, gradients) -> value` that adds to `gradients` while it has the scores at
hand, as fused linear cross-entropy does. This module makes of it a scalar with a gradient, whatever the floating type
of the embeddings and whatever autocast says: everything inside is float32 (float64 for embeddings of that type).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from dexter.errors import UsageError
from dexter.losses.streaming import Gradients, working_type
from dexter.positives import Positives

Solve: TypeAlias = Callable[[Tensor, Tensor, Gradients], Tensor]


class ValueAndGradients(NamedTuple):
    """A loss and its derivatives by the embeddings, all detached."""

    value: Tensor
    queries: Tensor
    labels: Tensor


def value_and_grad(
    loss: Callable[..., Tensor], queries_BD: Tensor, labels_LD: Tensor, positives: Positives, **settings: Any
) -> ValueAndGradients:
    """The value of a loss and its gradients by both embeddings, which gradient caching pushes through the encoder.

    Learned numbers among the settings (the scale and bias of `bce`) receive theirs in `.grad`, as from any backward.
    """
    queries, labels = queries_BD.detach().requires_grad_(), labels_LD.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(queries, labels, positives, **settings)
        value.backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert labels.grad is not None
    return ValueAndGradients(value.detach(), queries.grad, labels.grad)


def differentiable(
    solve: Solve,
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    ignore: Positives | None,
    scalars: tuple[Tensor, ...] = (),
) -> Tensor:
    """The value of `solve` as a scalar that backpropagates into the embeddings and into learned numbers."""
    check_inputs(queries_BD, labels_LD, positives, ignore)
    value: Tensor = _Streamed.apply(solve, queries_BD, labels_LD, *scalars)  # type: ignore[no-untyped-call]
    return value


def check_inputs(queries_BD: Tensor, labels_LD: Tensor, positives: Positives, ignore: Positives | None) -> None:
    """Raise unless the embeddings are matrices that agree and all pairs lie within them."""
    for name, embeddings in (("queries", queries_BD), ("labels", labels_LD)):
        if embeddings.ndim != 2 or not embeddings.is_floating_point():
            raise UsageError(
                f"{name} must be a matrix of floating type, got {tuple(embeddings.shape)} of {embeddings.dtype}"
            )
    if queries_BD.shape[1] != labels_LD.shape[1]:
        raise UsageError(f"queries have {queries_BD.shape[1]} dimensions, labels {labels_LD.shape[1]}: they must agree")
    for pairs in (positives, ignore):
        if pairs is not None:
            pairs.check(len(queries_BD), len(labels_LD))


class _Streamed(torch.autograd.Function):
    """Runs `solve` forward and hands its gradients out backward."""

    @staticmethod
    def forward(ctx: Any, solve: Solve, queries_BD: Tensor, labels_LD: Tensor, *scalars: Tensor) -> Tensor:
        ctx.solve = solve
        ctx.wanted = ctx.needs_input_grad[1:3]
        value, ctx.gradients = _solve(solve, queries_BD, labels_LD, ctx.wanted)
        ctx.scalar_types = [scalar.dtype for scalar in scalars]
        ctx.save_for_backward(queries_BD, labels_LD)
        return value

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients are given away, not copied: they are as large as the label table. A second backward through a
        # retained graph computes them again.
        gradients: Gradients | None = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            queries_BD, labels_LD = ctx.saved_tensors
            _, gradients = _solve(ctx.solve, queries_BD, labels_LD, ctx.wanted)
        scale = outer[0]
        sides = [None if side is None else side.mul_(scale) for side in (gradients.queries, gradients.labels)]
        scalars = [(value * scale).to(kind) for value, kind in zip(gradients.scalars, ctx.scalar_types, strict=True)]
        return None, *sides, *scalars


def _solve(solve: Solve, queries_BD: Tensor, labels_LD: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, Gradients]:
    """The value and the gradients of the sides that want one, the latter in the embeddings' own type."""
    gradients = Gradients(
        _zeros_like(queries_BD) if wanted[0] else None,
        _zeros_like(labels_LD) if wanted[1] else None,
    )
    with torch.no_grad(), torch.autocast(queries_BD.device.type, enabled=False):
        value = solve(queries_BD.detach(), labels_LD.detach(), gradients)
    if gradients.queries is not None:
        gradients.queries = gradients.queries.to(queries_BD.dtype)
    if gradients.labels is not None:
        gradients.labels = gradients.labels.to(labels_LD.dtype)
    return value, gradients


def _zeros_like(embeddings: Tensor) -> Tensor:
    return torch.zeros(embeddings.shape, dtype=working_type(embeddings), device=embeddings.device)
