"""Matrix products on a CPU, by the faster of the libraries that torch has for them.

`torch.mm` and linear layers call MKL, which on AMD's processors with AVX-512 computes half as many numbers at a time as
they can. oneDNN knows them, and torch has it too. Which one serves is decided by what the processor is, not measured: a
run that is resumed, and every process of a run, must get the same bits.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_CPU_INFO, _CPU_INFO_CHARACTERS = Path("/proc/cpuinfo"), 4_096
"""Where Linux describes the processors, and how much of it describes the first."""


def product(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """Return the matrix product of two matrices: in the memory given, or in its own where the library wants that."""
    return _linear(left, right.T) if _by_onednn(left, right) else torch.mm(left, right, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the matrix product of two matrices to a third."""
    if _by_onednn(left, right):
        total.add_(_linear(left, right.T))
    else:
        total.addmm_(left, right)


def faster_linear_layers() -> AbstractContextManager[object]:
    """Return a context in which linear layers, and gradients of what they gave, are computed by the faster library."""
    return _LinearByOneDNN() if onednn_is_faster() else nullcontext()


class _LinearByOneDNN(TorchFunctionMode):
    """Redirects linear layers on a CPU in single precision, outside of autocast."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and not kwargs and not torch.is_autocast_enabled("cpu"):
            given, weight, bias = (*args, None)[:3]
            if _by_onednn(given, weight):
                return _Linear.apply(given, weight, bias)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """A linear layer and its gradients."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.has_bias = bias is not None
        return _linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        flat, flat_given = outer[0].reshape(-1, len(weight)), given.reshape(-1, weight.shape[1])
        wanted = ctx.needs_input_grad
        return (
            _linear(outer[0], weight.T) if wanted[0] else None,
            _linear(flat.T, flat_given.T) if wanted[1] else None,
            flat.sum(0) if ctx.has_bias and wanted[2] else None,
        )


def _by_onednn(left: Tensor, right: Tensor) -> bool:
    is_known = left.device.type == "cpu" and left.dtype == right.dtype == torch.float32
    return is_known and 0 not in (*left.shape, *right.shape) and onednn_is_faster()


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # What torch's own compiler calls for a linear layer: given @ weight.T + bias.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(given, weight, bias, "none", [], "")
    return found


@cache
def onednn_is_faster() -> bool:
    """Whether torch has oneDNN, and this is a processor on which it is much faster than MKL."""
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_avx512 and hasattr(torch.ops.mkldnn, "_linear_pointwise") and "AuthenticAMD" in _describe_processor()


def _describe_processor() -> str:
    try:
        with _CPU_INFO.open(encoding="utf-8", errors="replace") as file:
            return file.read(_CPU_INFO_CHARACTERS)
    except OSError:
        return platform.processor()
