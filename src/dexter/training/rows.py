"""Adam for tables of which a step touches a few rows: time and memory grow with the touched rows, not with the table.

Every row counts its own updates. A row that is touched for the n-th time is updated exactly as dense Adam would in its
n-th step, however many steps of the run did not touch it; a row that is not touched keeps its value and its state, bit
for bit. (`torch.optim.SparseAdam` corrects its bias with the step of the run: the first update of a row that is first
touched late is wrong by a factor of (1 - beta1) / sqrt(1 - beta2).)

Tables and state may be stored in bfloat16. Rows are widened to float32, updated, and written back with stochastic
rounding, up or down with the probability that makes the expectation exact. Rounding to nearest would drop every
update smaller than 1/512 of a weight, and training would stall.

`GroupedOptimizer` stands in for `torch.optim.Optimizer`: making one of those imports the compiler of torch, which takes
three seconds of processor time, as long as the training of a small model.

Bytes per row of D elements, table and state, besides 4 for the number of updates:
    float32 table and state: 12 D; bfloat16 table, float32 state: 10 D; bfloat16 table and state: 6 D.

Shapes: R rows of the table, U rows touched in a step, D elements in a row.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dexter.errors import UsageError

_BLOCK_ELEMENTS = 2**17
"""Elements updated together: temporaries stay in cache, and are small also where a step touches every row."""

Group = dict[str, Any]
State = dict[str, Tensor]


class GroupedOptimizer:
    """Parameters in groups that have settings of their own, and a state for each parameter.

    Args:
        parameters: tensors, or groups of them: settings by name, with the tensors as "params".
        defaults: the settings of a group that does not have its own.
    """

    def __init__(self, parameters: Iterable[Any], defaults: Group) -> None:
        entries = list(parameters)
        groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
        self.param_groups: list[Group] = [defaults | group for group in groups]
        self.state: defaultdict[Tensor, State] = defaultdict(dict)

    def step(self) -> None:
        """Update the parameters that have a gradient."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter, _ in self._members():
            parameter.grad = None

    def _members(self) -> Iterator[tuple[Tensor, Group]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, group


class RowOptimizer(GroupedOptimizer):
    """Row-sparse Adam, for parameters whose gradients are sparse COO tensors with one sparse dimension.

    Several contributions to a row in one step are summed first. Every value in the state is a tensor, and a run that
    is resumed from the parameters and the state continues bit for bit: the random bits of stochastic rounding are a
    function of the seed, the parameter's position and its step. Every option below may be set per parameter group.

    Args:
        parameters: tables, or groups of them; float32 or bfloat16 (for comparisons also float64), contiguous.
        lr: the learning rate.
        betas: Adam's decay rates.
        eps: added to the root in the denominator.
        state_dtype: of the two moments of each element.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "state_dtype": state_dtype, "seed": seed}
        super().__init__(parameters, defaults)
        for group in self.param_groups:
            _check_group(group)

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows that have a gradient."""
        for position, (parameter, group) in enumerate(self._members()):
            if parameter.grad is not None:
                self._update(parameter, group, position)

    def _update(self, parameter: Tensor, group: Group, position: int) -> None:
        rows_U, gradients_UD = sum_by_row(_sparse_gradient(parameter))
        state = self.state[parameter]
        if not state:
            state.update(_fresh_state(parameter, group))
        state["step"] += 1
        generator = _generator(group["seed"], position, int(state["step"]), parameter.device)
        tables = {name: _as_table(values) for name, values in state.items() if values.ndim}
        block = max(1, _BLOCK_ELEMENTS // max(1, gradients_UD.shape[1]))
        rates_U1, spreads_U1 = _count(state["count"], rows_U, group, like=gradients_UD)
        parts = (torch.split(values, block) for values in (rows_U, gradients_UD, rates_U1, spreads_U1))
        for rows, gradients, rates, spreads in zip(*parts, strict=True):
            _adam(_Rows(_as_table(parameter), tables, rows, generator), gradients, rates, spreads, group)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a table and of its state: read as float32, written in the type they are stored in."""

    table: Tensor
    state: State
    rows: Tensor
    generator: torch.Generator

    def read(self, name: str) -> Tensor:
        return _widened(self.state[name].index_select(0, self.rows))

    def write(self, name: str, values: Tensor) -> None:
        self._store(self.state[name], values)

    def subtract(self, change: Tensor) -> None:
        self._store(self.table, _widened(self.table.index_select(0, self.rows)).sub_(change))

    def _store(self, target: Tensor, values: Tensor) -> None:
        if target.dtype == torch.bfloat16:
            values = round_stochastically(values, generator=self.generator)
        target.index_copy_(0, self.rows, values)


def _count(counts_R: Tensor, rows_U: Tensor, group: Group, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Add one to the number of updates of rows; return what corrects their means and root mean squares: [U, 1] each."""
    counts_U = counts_R.index_select(0, rows_U) + 1
    counts_R.index_copy_(0, rows_U, counts_U)
    # In float64, in which 1 - beta^count is exact.
    counts_U1 = counts_U.double()[:, None]
    beta1, beta2 = group["betas"]
    return (group["lr"] / (1 - beta1**counts_U1)).to(like), (1 - beta2**counts_U1).sqrt().to(like)


def _adam(rows: _Rows, gradients_UD: Tensor, rates_U1: Tensor, spreads_U1: Tensor, group: Group) -> None:
    beta1, beta2 = group["betas"]
    means_UD = rows.read("exp_avg").lerp_(gradients_UD, 1 - beta1)
    squares_UD = rows.read("exp_avg_sq").mul_(beta2).addcmul_(gradients_UD, gradients_UD, value=1 - beta2)
    rows.write("exp_avg", means_UD)
    rows.write("exp_avg_sq", squares_UD)
    roots_UD = squares_UD.sqrt_().div_(spreads_U1).add_(group["eps"])
    rows.subtract(means_UD.div_(roots_UD).mul_(rates_U1))


def sum_by_row(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a row-sparse gradient, ascending, and their summed values: [U] and [U, D], not bfloat16."""
    gradient = _widened(gradient)
    if not gradient.is_coalesced():
        rows_U = gradient._indices()[0]
        # A pool of labels is ascending already: then there is nothing to sum, and no copy is made.
        if not bool((rows_U[1:] > rows_U[:-1]).all()):
            gradient = gradient.coalesce()
    return gradient._indices()[0], _as_table(gradient._values().contiguous())


def round_stochastically(values: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Round float32 to one of the two neighbouring bfloat16 numbers at random, with the value as the expectation.

    A bfloat16 is the upper half of a float32. Sixteen random bits are added to the lower half, which carries into the
    upper half with a probability equal to the share that the lower half stands for; then the lower half is cleared.
    """
    # One draw of 64 bits serves four elements: drawing 16 bits at a time takes seven times as long.
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    words.random_(-(2**63), None, generator=generator)
    noise = words.view(torch.int16)[: values.numel()].to(torch.int32).bitwise_and_(0xFFFF)
    bits = noise.view(values.shape).add_(values.contiguous().view(torch.int32)).bitwise_and_(-0x10000)
    return bits.view(torch.float32).to(torch.bfloat16)


def _sparse_gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UsageError(
            f"a row optimiser was given a {gradient.layout} gradient of shape {tuple(gradient.shape)}: expected a "
            "sparse COO gradient over rows; look rows up with sparse=True, or give this parameter to a dense optimiser"
        )
    return gradient


def _fresh_state(parameter: Tensor, group: Group) -> State:
    return {
        "step": torch.zeros((), dtype=torch.int64),
        "count": torch.zeros(len(parameter), dtype=torch.int32, device=parameter.device),
        "exp_avg": _zeros_like(parameter, group),
        "exp_avg_sq": _zeros_like(parameter, group),
    }


def _zeros_like(parameter: Tensor, group: Group) -> Tensor:
    # A table of float64 (for comparisons, not for training) has state that is as wide.
    dtype = torch.float64 if parameter.dtype == torch.float64 else group["state_dtype"]
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _widened(values: Tensor) -> Tensor:
    """Values as float32; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def _as_table(values: Tensor) -> Tensor:
    """View a tensor as [R, D]; one number per row becomes one column."""
    return values.detach().view(len(values), math.prod(values.shape[1:]))


def _generator(seed: int, position: int, step: int, device: torch.device) -> torch.Generator:
    mixed = np.random.SeedSequence((seed, position, step)).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(mixed))


def _check_group(group: Group) -> None:
    """Raise a UsageError that names the first setting out of its range."""
    if group["state_dtype"] not in (torch.float32, torch.bfloat16):
        raise UsageError(f"row optimiser: state_dtype is {group['state_dtype']}: expected torch.float32 or bfloat16")
    for name, value in (("lr", group["lr"]), ("eps", group["eps"]), ("seed", group["seed"])):
        if value < 0:
            raise UsageError(f"row optimiser: {name} is {value}: expected 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise UsageError(f"row optimiser: betas are {group['betas']}: expected numbers in [0, 1)")
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float64) or not parameter.ndim:
            raise UsageError(
                f"row optimiser: a parameter of type {parameter.dtype} and shape {tuple(parameter.shape)}: "
                "expected rows of float32 or bfloat16"
            )
