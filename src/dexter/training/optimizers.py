"""The optimisers of a run: parameter groups, learning rates and their schedule.

Matrices decay, vectors and biases do not. Tables whose gradient is row-sparse go to `RowOptimizer`, which touches only
the rows of the step; everything else goes to `DenseAdam`. The learning rate rises linearly, then falls to zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dexter.config import Config
from dexter.encoders.static import StaticEncoder
from dexter.processes import Processes, SingleProcess
from dexter.training.rows import GroupedOptimizer, RowOptimizer

MAX_SPARSE_SHARE = 0.4
"""Row-sparse updates are faster while a step touches less than this share of the static encoder's table."""
_BETA1 = 0.9
_PRIOR_RATE = 0.02
"""Peak learning rate of the per-label bias and of the scale and bias of bce."""
_WEIGHTS_RATE_FACTOR = 10.0
"""Learning rate of the static encoder's token and position weights, relative to that of its table."""
_WEIGHTS = ("token_weights", "position_weights")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters that share a learning rate."""

    name: str
    parameters: Sequence[tuple[str, nn.Parameter]]
    learning_rate: float
    weight_decay: float = 0.0
    sparse: bool = False
    """Whether their gradients are row-sparse."""
    by_label: bool = False
    """Whether they have a row per label; a process has the rows of its own labels. Others are the same on all ranks."""


class DenseAdam(GroupedOptimizer):
    """AdamW with torch's fused kernel, for parameters with dense gradients: `torch.optim.AdamW(fused=True)`.

    Args:
        groups: parameters with their learning rate `lr` and `weight_decay`.
        betas: Adam's decay rates.
        eps: added to the root in the denominator.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, object]], *, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in used]
            for parameter, state in zip(used, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["step"] += 1
            if used:
                torch._fused_adamw_(
                    used,
                    [parameter.grad for parameter in used],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )


class Optimizers:
    """The optimisers of a run, stepped together under one schedule."""

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        num_steps: int,
        warmup: float,
        beta2: float = 0.99,
        seed: int = 0,
        processes: Processes | None = None,
    ) -> None:
        self.parts = parts
        self._processes = processes or SingleProcess()
        self.num_steps = num_steps
        self.num_warmup = max(1, round(warmup * num_steps))
        dense = [group for part in parts if not part.sparse for group in _dense_groups(part)]
        sparse = [
            # A table in bfloat16 has its moments in bfloat16 too: half the memory in all.
            {"params": [parameter], "lr": part.learning_rate, "state_dtype": _state_dtype(parameter)}
            for part in parts
            if part.sparse
            for _, parameter in part.parameters
        ]
        self._optimizers: list[GroupedOptimizer] = []
        if dense:
            self._optimizers.append(DenseAdam(dense, betas=(_BETA1, beta2)))
        if sparse:
            self._optimizers.append(RowOptimizer(sparse, lr=0.0, betas=(_BETA1, beta2), seed=seed))
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]

    def step(self, step: int, *, gradient_clip: float = 0.0) -> None:
        """Update every parameter with the learning rate of this step, and clear the gradients."""
        factor = self.schedule(step)
        if gradient_clip:
            self._clip(gradient_clip)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop all gradients, after a step or instead of one."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def schedule(self, step: int) -> float:
        """The learning rate of a step, counted from zero, as a share of the peak."""
        if step < self.num_warmup:
            return (step + 1) / self.num_warmup
        return max(0.0, (self.num_steps - step) / max(1, self.num_steps - self.num_warmup))

    def state(self, *, by_label: bool) -> dict[str, Tensor]:
        """Tensors of the optimisers' state by dotted name: those with a row per label, or all others."""
        return {
            f"{name}.{key}": torch.as_tensor(value)
            for name, parameter, optimizer, part in self._named()
            for key, value in optimizer.state[parameter].items()
            if by_label == (part.by_label and torch.as_tensor(value).ndim > 0)
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name, parameter, optimizer, _ in self._named():
            prefix = f"{name}."
            entries = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            # The dense optimiser counts its steps on the device, the row optimiser in the memory of the process.
            stays = isinstance(optimizer, RowOptimizer)
            optimizer.state[parameter] = {
                key: value if stays and not value.ndim else value.to(parameter.device) for key, value in entries.items()
            }

    def _clip(self, largest_norm: float) -> None:
        """Clip the norm of the dense gradients, including those of the labels of all ranks."""
        if self._processes.size == 1:
            nn.utils.clip_grad_norm_(self._dense_parameters(), largest_norm)
            return
        squares = [_square_of_norm(part) for part in self.parts if not part.sparse and not part.by_label]
        own = [_square_of_norm(part) for part in self.parts if not part.sparse and part.by_label]
        total = torch.stack(
            [*squares, self._processes.sum(torch.stack([*own, torch.zeros_like(squares[0])]).sum())]
        ).sum()
        nn.utils.clip_grads_with_norm_(self._dense_parameters(), largest_norm, total.sqrt())

    def _named(self) -> Iterator[tuple[str, nn.Parameter, GroupedOptimizer, Part]]:
        owners = {
            id(parameter): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for part in self.parts:
            for name, parameter in part.parameters:
                yield f"{part.name}/{name}", parameter, owners[id(parameter)], part

    def _dense_parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.parts if not part.sparse for _, parameter in part.parameters]


def build_optimizers(
    config: Config,
    encoder: nn.Module,
    objective: nn.Module,
    *,
    num_steps: int,
    touched: NDArray[np.int64],
    processes: Processes | None = None,
) -> Optimizers:
    """The optimisers of an encoder and an objective.

    A static encoder's table is updated row by row where a step touches few of its rows.

    `touched` are the token ids that this rank reads in a typical step.
    """
    train = config.train
    named = list(encoder.named_parameters())
    sparse = (
        isinstance(encoder, StaticEncoder)
        and _touched_share(touched, encoder.num_rows, processes or SingleProcess()) < MAX_SPARSE_SHARE
    )
    if isinstance(encoder, StaticEncoder):
        encoder.sparse = sparse
    tables = [(name, value) for name, value in named if sparse and name == "table"]
    weights = [(name, value) for name, value in named if name in _WEIGHTS]
    apart = {name for name, _ in tables + weights}
    parts = [
        Part(
            name="encoder",
            parameters=[(name, value) for name, value in named if name not in apart],
            learning_rate=train.learning_rate,
            weight_decay=train.weight_decay,
        ),
        Part(name="table", parameters=tables, learning_rate=train.learning_rate, sparse=True),
        Part(name="weights", parameters=weights, learning_rate=_WEIGHTS_RATE_FACTOR * train.learning_rate),
        *_objective_parts(config, objective),
    ]
    used = [part for part in parts if part.parameters]
    return Optimizers(
        used, num_steps=num_steps, warmup=train.warmup, beta2=train.beta2, seed=config.seed, processes=processes
    )


def _objective_parts(config: Config, objective: nn.Module) -> list[Part]:
    """The heads' projections, the classifier's rows, the label priors, and the scale and bias of bce."""
    train = config.train
    named = list(objective.named_parameters())
    tables = [(name, value) for name, value in named if name.startswith("classifier.table.")]
    projections = [(name, value) for name, value in named if ".project." in name]
    priors = [(name, value) for name, value in named if ".prior." in name]
    apart = {name for name, _ in tables + projections + priors}
    return [
        Part(
            name="heads",
            parameters=projections,
            learning_rate=train.head_learning_rate,
            weight_decay=train.weight_decay,
        ),
        Part(
            name="classifier",
            parameters=tables,
            learning_rate=train.classifier_learning_rate,
            sparse=True,
            by_label=True,
        ),
        Part(name="prior", parameters=priors, learning_rate=_PRIOR_RATE, by_label=True),
        Part(
            name="objective",
            parameters=[(name, value) for name, value in named if name not in apart],
            learning_rate=_PRIOR_RATE,
        ),
    ]


def _touched_share(ids: NDArray[np.int64], num_rows: int, processes: Processes) -> float:
    """The share of a static encoder's rows that a step of all ranks touches."""
    touched = torch.zeros(num_rows, dtype=torch.int32)
    touched[torch.from_numpy(np.unique(ids % num_rows))] = 1
    return int(processes.max(touched).sum()) / num_rows


def _square_of_norm(part: Part) -> Tensor:
    gradients = [parameter.grad for _, parameter in part.parameters if parameter.grad is not None]
    norm: Tensor = nn.utils.get_total_norm(gradients)
    return norm.to(part.parameters[0][1].device).square()


def _state_dtype(parameter: nn.Parameter) -> torch.dtype:
    """bfloat16 for a bfloat16 table, float32 for any other."""
    return torch.bfloat16 if parameter.dtype == torch.bfloat16 else torch.float32


def _dense_groups(part: Part) -> list[dict[str, object]]:
    """A part's parameters with decay (matrices) and without (vectors and biases)."""
    matrices = [parameter for _, parameter in part.parameters if parameter.ndim > 1]
    vectors = [parameter for _, parameter in part.parameters if parameter.ndim <= 1]
    groups: list[dict[str, object]] = []
    for parameters, decay in ((matrices, part.weight_decay), (vectors, 0.0)):
        if parameters:
            groups.append({"params": parameters, "lr": part.learning_rate, "weight_decay": decay})
    return groups
