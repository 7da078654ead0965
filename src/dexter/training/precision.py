"""The arithmetic of a training step: half precision inside a transformer, TF32 products, gradient scaling for float16.

Only the transformer computes in half precision. Weights, representations, heads, losses, gradients of weights and
optimiser states are float32 whatever the setting.

float16 has 5 bits of exponent, and gradients below 6e-8 would vanish in it. The gradient that gradient caching pushes
into the encoder is therefore multiplied by a scale, and the gradients of the encoder's weights are divided by it.
(Heads and classifier get their gradients from the loss, in float32 and unscaled.) A step whose scaled gradients
overflow is skipped. The scale is a power of two, so that scaling rounds nothing.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Literal

import torch
from torch import nn

from dexter.errors import DivergedError, UsageError
from dexter.training.distributed import ProcessGroup

log = logging.getLogger("dexter")

PrecisionName = Literal["float32", "tf32", "bfloat16", "float16"]
_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FIRST_SCALE, _SMALLEST_SCALE = 2.0**16, 2.0**-16
_STEPS_TO_GROWTH = 2_000
_PROBE = """
import torch
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.nn.Linear(64, 64)(torch.ones(256, 64))
"""
"""A product in bfloat16, large enough for the matrix instructions (AMX) of a CPU that says it has them."""


def check_precision(precision: PrecisionName, device: str) -> None:
    """Raise a UsageError unless torch can compute in this precision on the device."""
    if precision not in _HALF:
        return
    kind = torch.device(device).type
    try:
        with warnings.catch_warnings(), torch.autocast(kind, dtype=_HALF[precision]):
            warnings.simplefilter("ignore")
            usable = torch.is_autocast_enabled(kind)
    except RuntimeError:
        usable = False
    if not usable:
        raise UsageError(
            f"train.precision is {precision!r}, but torch {torch.__version__} cannot compute in it on {device!r}: "
            "set train.precision=float32"
        )
    if kind == "cpu" and precision == "bfloat16" and not _has_bfloat16_products():
        raise UsageError(
            "train.precision is 'bfloat16', but its products end the process on this CPU, as on virtual machines that "
            "announce AMX and do not have it: set train.precision=float32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
        )


@cache
def _has_bfloat16_products() -> bool:
    """Try a product on the CPU in a process of its own: an instruction that is not there cannot be caught."""
    return subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False).returncode == 0


def autocast(precision: PrecisionName, device: str) -> AbstractContextManager[object]:
    """Compute matrix products and attention in half precision, if the setting is one."""
    if precision not in _HALF:
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=_HALF[precision])


@contextmanager
def tf32_products(precision: PrecisionName, device: str) -> Iterator[None]:
    """Let a CUDA device multiply float32 matrices as TF32 unless the setting is float32; other devices never do."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if precision != "float32" and torch.device(device).type == "cuda":
        matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class GradientScaler:
    """The scale of the gradient that is pushed into a float16 encoder, adapted as training goes.

    The scale is halved when a gradient overflows, and doubled after 2,000 steps in which none did. All ranks have the
    same scale.
    """

    def __init__(self, scale: float = _FIRST_SCALE, *, steps_to_growth: int = _STEPS_TO_GROWTH) -> None:
        self.scale = scale
        self.good_steps = 0
        """Steps since the scale last changed."""
        self._steps_to_growth = steps_to_growth

    def unscale(self, parameters: Iterable[nn.Parameter], processes: ProcessGroup) -> bool:
        """Divide gradients by the scale in place; return whether they are finite on all ranks, and adapt the scale."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.mul_(1.0 / self.scale)
        finite = bool(torch.isfinite(nn.utils.get_total_norm(gradients)))
        overflow = bool(processes.agree(not finite)[0])
        self._adapt(overflow=overflow)
        return not overflow

    def state(self) -> dict[str, float]:
        """What the scale of later steps depends on, for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take back what `state` gave."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

    def _adapt(self, *, overflow: bool) -> None:
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self._steps_to_growth:
                self.scale, self.good_steps = 2.0 * self.scale, 0
            return
        self.scale, self.good_steps = 0.5 * self.scale, 0
        if self.scale < _SMALLEST_SCALE:
            raise DivergedError(
                "the gradient of the float16 encoder is not finite however small its scale: lower train.learning_rate, "
                "or set train.precision=bfloat16 or float32; the last checkpoint is kept"
            )
