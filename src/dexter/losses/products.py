"""The two matrix products of the losses, by the faster of the libraries that torch has for a CPU.

`torch.mm` calls MKL, which on AVX-512 processors of other makers than Intel computes half as many numbers at a time as
they can. oneDNN knows them, and torch has it too. Which one serves is measured once in each process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_WORTHWHILE = 1.5
"""How many times as fast oneDNN must be: where the two are close, every process and every run takes MKL."""
_PROBE, _TURNS = 512, 7


def product(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """Return the matrix product of two matrices: in the memory given, or in its own where the library wants that."""
    return _onednn(left, right) if _by_onednn(left, right) else torch.mm(left, right, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of two matrices to a third."""
    if _by_onednn(left, right):
        total.add_(_onednn(left, right))
    else:
        total.addmm_(left, right)


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    is_known = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32
    return is_known and 0 not in (*left.shape, *right.shape) and onednn_is_faster()


def _onednn(left: Tensor, right: Tensor) -> Tensor:
    # What torch's own compiler calls for a linear layer: left @ weight.T.
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return product


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN is there and much faster than MKL on this processor; takes a few milliseconds, once."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    square, out = torch.ones(_PROBE, _PROBE), torch.empty(_PROBE, _PROBE)
    turns = [
        (_seconds(lambda: torch.mm(square, square, out=out)), _seconds(lambda: _onednn(square, square)))
        for _ in range(_TURNS)
    ]
    by_mkl, by_onednn = (min(each) for each in zip(*turns, strict=True))
    return bool(by_mkl > _WORTHWHILE * by_onednn)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
