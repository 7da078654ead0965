"""Connect a streamed loss to autograd: gradients are computed together with the value, backward only scales them.

A loss is a function `solve(queries, labels, gradients) -> value` that adds to `gradients` while the scores are in
memory, as fused linear cross-entropy does. `differentiable` turns it into a scalar that backpropagates. Whatever the
floating type of the embeddings and whether autocast is on, `solve` computes in float32 (float64 for embeddings of that
type).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dexter.errors import UsageError
from dexter.losses.streaming import Gradients, working_type
from dexter.positives import Positives

Solve: TypeAlias = Callable[[Tensor, Tensor, Gradients], Tensor]


def differentiable(
    solve: Solve,
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    ignore: Positives | None,
    scalars: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return the value of `solve` as a scalar that backpropagates into the embeddings and into learned numbers."""
    check_inputs(queries_BD, labels_LD, positives, ignore)
    value: Tensor = _Streamed.apply(solve, queries_BD, labels_LD, *scalars)  # type: ignore[no-untyped-call]
    return value


def check_inputs(queries_BD: Tensor, labels_LD: Tensor, positives: Positives, ignore: Positives | None) -> None:
    """Raise unless the embeddings are matrices of equal width and all pairs lie within them."""
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


def check_temperature(temperature: float) -> None:
    """Raise unless the temperature is a positive number."""
    if not 0.0 < temperature < float("inf"):
        raise UsageError(
            f"temperature must be above 0, got {temperature}: scores are divided by it (0.05 multiplies by 20)"
        )


class _Streamed(torch.autograd.Function):
    """Runs `solve` in the forward pass and returns its gradients in the backward pass."""

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
        # The gradients are returned without a copy: they are as large as the label table. A second backward through a
        # retained graph computes them again.
        gradients: Gradients | None = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            queries_BD, labels_LD = ctx.saved_tensors
            _, gradients = _solve(ctx.solve, queries_BD, labels_LD, ctx.wanted)
        scale = outer[0]
        embeddings = [None if each is None else each.mul_(scale) for each in (gradients.queries, gradients.labels)]
        scalars = [(value * scale).to(kind) for value, kind in zip(gradients.scalars, ctx.scalar_types, strict=True)]
        return None, *embeddings, *scalars


def _solve(solve: Solve, queries_BD: Tensor, labels_LD: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, Gradients]:
    """Return the value and the gradients of the embeddings that require one, in the embeddings' own type."""
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
