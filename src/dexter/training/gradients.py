"""The gradient of the global batch: what every rank found out about the weights they share, added up.

The loss is a mean over the queries of all ranks, and each rank has differentiated its part of the sum: so gradients are
added, never averaged, and do not depend on the number of ranks. Dense ones travel in buckets. Row-sparse ones (the
static encoder's table, while a step touches few of its rows) travel as rows: ranks gather each other's touched rows and
sum them alike, which costs what was touched and not the table. Weights with a row per label stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dexter.training.distributed import ProcessGroup
from dexter.training.optimizers import Part
from dexter.training.rows import sum_by_row

BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed in one meeting: large enough that its latency does not matter."""


def add_gradients(parts: Sequence[Part], processes: ProcessGroup) -> None:
    """Give every rank the summed gradient of all parameters that ranks share."""
    if processes.size == 1:
        return
    shared = [part for part in parts if not part.by_label]
    dense = [parameter for part in shared if not part.sparse for _, parameter in part.parameters]
    sparse = [parameter for part in shared if part.sparse for _, parameter in part.parameters]
    # A weight that no rank used has no gradient (and is not decayed); one that only this rank did not use gets zeros.
    used = (
        processes.max(torch.tensor([float(parameter.grad is not None) for parameter in dense + sparse])).bool().tolist()
    )
    for bucket in _buckets([parameter for parameter, is_used in zip(dense, used, strict=False) if is_used]):
        _add_dense(bucket, processes)
    for parameter, is_used in zip(sparse, used[len(dense) :], strict=True):
        if is_used:
            _add_rows(parameter, processes)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbouring parameters of one type, in groups of about the size of a bucket."""
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
    gradients = [_gradient(parameter) for parameter in bucket]
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


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
