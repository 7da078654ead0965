"""Builders of test cases and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from reference_losses import Case, reference
from torch import Tensor
from torch.nn.functional import normalize

import dexter.losses
from dexter.batches import Positives
from dexter.losses import Streaming

NAMES = ("softmax", "decoupled_softmax", "psl", "bce", "soft_topk", "triplet")
STREAMED = NAMES[:-1]
LAYOUTS = {
    "default": None,
    "tiles that do not divide": Streaming(mode="tiles", row_block=3, label_chunk=10),
    "tiles that exceed": Streaming(mode="tiles", row_block=100, label_chunk=1000),
    "chunks that do not divide": Streaming(mode="chunks", row_block=4, label_chunk=7),
    "chunks of one": Streaming(mode="chunks", row_block=1, label_chunk=1),
    "chunks that exceed": Streaming(mode="chunks", row_block=100, label_chunk=1000),
}


def random_pairs(num_queries: int, num_labels: int, count: int, *, weighted: bool = False, seed: int = 0) -> Positives:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, num_queries, (count,), generator=generator)
    columns = torch.randint(0, num_labels, (count,), generator=generator)
    return Positives(rows, columns, torch.rand(count, generator=generator) + 0.5 if weighted else None)


def make_case(num_queries: int, num_labels: int, num_dimensions: int, *, seed: int = 0, **changes: Any) -> Case:
    generator = torch.Generator().manual_seed(seed)
    queries = normalize(torch.randn(num_queries, num_dimensions, generator=generator), dim=1)
    labels = normalize(torch.randn(num_labels, num_dimensions, generator=generator), dim=1)
    positives = random_pairs(num_queries, num_labels, 2 * num_queries, seed=seed)
    return Case(**{"queries": queries, "labels": labels, "positives": positives, **changes})


class Result(NamedTuple):
    """A loss and its gradients."""

    value: Tensor
    queries: Tensor
    labels: Tensor


def value_and_gradients(
    loss: Callable[..., Tensor], queries: Tensor, labels: Tensor, positives: Positives, **settings: Any
) -> Result:
    queries, labels = queries.detach().requires_grad_(), labels.detach().requires_grad_()
    value = loss(queries, labels, positives, **settings)
    value.backward()
    return Result(value.detach(), queries.grad, labels.grad)


def run(name: str, case: Case, streaming: Streaming | None = None) -> Result:
    loss = getattr(dexter.losses, name)
    return value_and_gradients(
        loss, case.queries, case.labels, case.positives, ignore=case.ignore, streaming=streaming, **case.settings
    )


def relative_errors(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, floor: float = 1e-3) -> list[float]:
    """The largest difference of the value and of each gradient, relative to the largest entry (of both gradients)."""
    largest_gradient = max(expected[1].abs().max(), expected[2].abs().max()).clamp_min(floor)
    scales = (expected[0].abs().clamp_min(1e-3), largest_gradient, largest_gradient)
    return [
        float((have.double() - want).abs().max() / scale)
        for have, want, scale in zip(got, expected, scales, strict=True)
    ]


def assert_agrees(
    name: str,
    case: Case,
    streaming: Streaming | None = None,
    *,
    tolerance: float = 1e-5,
    log: Any = None,
    device: str = "cpu",
) -> list[float]:
    # Where terms of size 1 / temperature cancel to nothing, their rounding is what is left.
    floor = 0.1 / case.settings.get("temperature", 0.05)
    if name == "bce":
        floor /= len(case.queries) * len(case.labels)
    expected = reference(name, case)
    case.queries, case.labels = case.queries.to(device), case.labels.to(device)
    errors = relative_errors(tuple(part.cpu() for part in run(name, case, streaming)), expected, floor=floor)
    if log is not None:
        log.add(name, errors)
    assert max(errors) < tolerance, f"{name}: errors of value, dq, dy are {errors}"
    return errors
