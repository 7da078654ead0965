"""CPU milliseconds per step and bytes per row of optimisers for a large table of which a step touches a few rows.

    python bench/rows.py --labels 30000 1000000 --touched 5000 --dimension 256

Every optimiser gets gradients of the same rows, ready made; only its step is timed. The best of several steps counts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from dexter.training.rows import RowOptimizer

NARROW = torch.bfloat16

OURS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "ours adam": (torch.float32, {}),
    "ours adam, bf16 table": (NARROW, {}),
    "ours adam, bf16 table and state": (NARROW, {"state_dtype": NARROW}),
}


def row_gradients(num_labels: int, touched: int, dimension: int, *, steps: int) -> list[Tensor]:
    """Row-sparse gradients over ascending pools of labels, as a lookup gives them."""
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for _ in range(steps):
        rows = torch.randperm(num_labels, generator=generator)[:touched].sort().values
        values = torch.randn(touched, dimension, generator=generator)
        gradients.append(torch.sparse_coo_tensor(rows[None], values, (num_labels, dimension), check_invariants=False))
    return gradients


def measure(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> tuple[float, float]:
    """The fastest step in CPU milliseconds, the first (which makes the state) left out, and bytes per row."""
    parameter.grad_dtype = torch.float32
    best = float("inf")
    for step, gradient in enumerate(gradients):
        parameter.grad = gradient
        started = time.process_time()
        optimizer.step()
        if step:
            best = min(best, time.process_time() - started)
    tensors = [parameter, *(value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))]
    return 1000 * best, sum(tensor.nbytes for tensor in tensors) / len(parameter)


def table(num_labels: int, dimension: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(num_labels, dimension, dtype=dtype))


def compare(num_labels: int, touched: int, dimension: int, *, steps: int) -> None:
    gradients = row_gradients(num_labels, touched, dimension, steps=steps)
    print(f"{num_labels:,} rows of {dimension}, {touched:,} touched")
    parameter = table(num_labels, dimension)
    reference, size = measure(parameter, torch.optim.SparseAdam([parameter], lr=1e-3), gradients)
    _print_row("torch.optim.SparseAdam", reference, size, reference)
    for name, (dtype, settings) in OURS.items():
        parameter = table(num_labels, dimension, dtype)
        milliseconds, size = measure(parameter, RowOptimizer([parameter], lr=1e-3, **settings), gradients)
        _print_row(name, milliseconds, size, reference)
    parameter = table(num_labels, dimension)
    dense = [gradients[0].to_dense()] * 3
    milliseconds, size = measure(parameter, torch.optim.AdamW([parameter], lr=1e-3, fused=True), dense)
    _print_row("torch.optim.AdamW, dense, fused", milliseconds, size + dense[0].nbytes / num_labels, reference)


def _print_row(name: str, milliseconds: float, size: float, reference: float) -> None:
    print(f"  {name:<33} {milliseconds:8.2f} ms {size:7,.0f} bytes per row {reference / milliseconds:6.2f}x SparseAdam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, nargs="+", default=[30_000, 1_000_000])
    parser.add_argument("--touched", type=int, default=5_000)
    parser.add_argument("--dimension", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for num_labels in arguments.labels:
        compare(num_labels, arguments.touched, arguments.dimension, steps=arguments.steps)
    print("The dense optimiser's bytes include its gradient of the size of the table.")


if __name__ == "__main__":
    main()
