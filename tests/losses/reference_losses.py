"""Every loss as a slow, obvious double loop in float64, straight from its formula; gradients by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dexter.batches import Positives


@dataclass
class Case:
    """Embeddings and pairs of one test."""

    queries: Tensor
    labels: Tensor
    positives: Positives
    ignore: Positives | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def kinds(self) -> tuple[list[dict[int, float]], list[set[int]]]:
        """Positives with weights, and ignored labels, of each query; a pair in both is ignored."""
        wanted: list[dict[int, float]] = [{} for _ in self.queries]
        ignored: list[set[int]] = [set() for _ in self.queries]
        if self.ignore is not None:
            for row, column in zip(self.ignore.rows.tolist(), self.ignore.columns.tolist(), strict=True):
                ignored[row].add(column)
        weights = [1.0] * len(self.positives) if self.positives.weights is None else self.positives.weights.tolist()
        for row, column, weight in zip(
            self.positives.rows.tolist(), self.positives.columns.tolist(), weights, strict=True
        ):
            if column not in ignored[row]:
                wanted[row][column] = weight
        return wanted, ignored


def _lse(values: list[Tensor]) -> Tensor:
    return torch.logsumexp(torch.stack(values), 0)


def _mean(losses: list[Tensor], queries: Tensor, labels: Tensor) -> Tensor:
    if not losses:
        return 0.0 * (queries.sum() + labels.sum())
    return torch.stack(losses).mean()


def softmax(
    case: Case,
    q: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.05,
    reduction: str = "pal-n",
    negative_offsets: Tensor | None = None,
) -> Tensor:
    wanted, ignored = case.kinds()
    offsets = [0.0] * len(y) if negative_offsets is None else negative_offsets.tolist()
    losses = []
    for i in range(len(q)):
        if wanted[i]:
            s = [(q[i] * y[label]).sum() / temperature for label in range(len(y))]
            moved = [s[label] if label in wanted[i] else s[label] + offsets[label] for label in range(len(y))]
            normaliser = _lse([moved[label] for label in range(len(y)) if label not in ignored[i]])
            total = sum(-w * (s[p] - normaliser) for p, w in wanted[i].items())
            losses.append(total / (len(wanted[i]) if reduction == "pal-n" else 1))
    return _mean(losses, q, y)


def decoupled_softmax(
    case: Case,
    q: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.05,
    reduction: str = "pal-n",
    negative_offsets: Tensor | None = None,
) -> Tensor:
    wanted, ignored = case.kinds()
    offsets = [0.0] * len(y) if negative_offsets is None else negative_offsets.tolist()
    losses = []
    for i in range(len(q)):
        if wanted[i]:
            s = [(q[i] * y[label]).sum() / temperature for label in range(len(y))]
            others = [label for label in range(len(y)) if label not in ignored[i] and label not in wanted[i]]
            negatives = [s[label] + offsets[label] for label in others]
            total = q.new_zeros(()) + 0.0 * s[0]
            for p, w in wanted[i].items():
                total = total - w * (s[p] - _lse([s[p], *negatives]))
            losses.append(total / (len(wanted[i]) if reduction == "pal-n" else 1))
    return _mean(losses, q, y)


def psl(
    case: Case,
    q: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.05,
    balance: float = 0.5,
    reduction: str = "pal-n",
    average: str = "mean",
    negative_offsets: Tensor | None = None,
) -> Tensor:
    back = Case(case.labels, case.queries, case.positives.transpose(), case.ignore and case.ignore.transpose())
    forth = softmax(case, q, y, temperature=temperature, reduction=reduction, negative_offsets=negative_offsets)
    back_loss = softmax(back, y, q, temperature=temperature, reduction=reduction)
    if average == "sum":
        forth, back_loss = (
            loss * sum(1 for row in each.kinds()[0] if row) for loss, each in ((forth, case), (back_loss, back))
        )
    return balance * forth + (1 - balance) * back_loss


def bce(case: Case, q: Tensor, y: Tensor, *, temperature: float = 0.05, scale: Any = 1.0, bias: Any = 0.0) -> Tensor:
    wanted, ignored = case.kinds()
    total = 0.0 * (q.sum() + y.sum())
    for i in range(len(q)):
        for label in range(len(y)):
            z = scale * (q[i] * y[label]).sum() / temperature + bias
            if label in wanted[i]:
                total = total + wanted[i][label] * torch.logaddexp(-z, torch.zeros_like(z))
            elif label not in ignored[i]:
                total = total + torch.logaddexp(z, torch.zeros_like(z))
    return total / (len(q) * len(y))


def bisect_offset(scores: list[float], k: float, alpha: float, halvings: int = 64) -> float:
    """The offset t with sum of sigmoid(alpha (s + t)) = k."""
    middle = math.log(k / len(scores)) - math.log1p(-k / len(scores))
    low, high = middle / alpha - max(scores) - 1e-9, middle / alpha - min(scores) + 1e-9
    for _ in range(halvings):
        t = (low + high) / 2
        total = torch.sigmoid(alpha * (torch.tensor(scores, dtype=torch.float64) + t)).sum().item()
        low, high = (t, high) if total < k else (low, t)
    return (low + high) / 2


def soft_topk(case: Case, q: Tensor, y: Tensor, *, temperature: float = 0.05, k: Any = 5, alpha: float = 2.0) -> Tensor:
    wanted, ignored = case.kinds()
    losses = []
    for i in range(len(q)):
        if wanted[i]:
            s = [(q[i] * y[label]).sum() / temperature for label in range(len(y))]
            race = torch.stack([s[label] for label in range(len(y)) if label not in ignored[i]])
            target = float(k[i] if hasattr(k, "__len__") else k)
            root = bisect_offset(race.tolist(), target, alpha)
            p = torch.sigmoid(alpha * (race + root))
            # One Newton step at the root: moves nothing, but carries the derivative of t by the scores.
            t = root - (p.sum() - target) / (alpha * p * (1 - p)).sum().detach()
            total = sum(w * torch.logaddexp(-alpha * (s[p] + t), torch.zeros_like(t)) for p, w in wanted[i].items())
            losses.append(total / len(wanted[i]))
    return _mean(losses, q, y)


def triplet(case: Case, q: Tensor, y: Tensor, *, margin: float = 0.3, num_negatives: int = 10) -> Tensor:
    wanted, ignored = case.kinds()
    losses = []
    for i in range(len(q)):
        if wanted[i]:
            s = [(q[i] * y[label]).sum() for label in range(len(y))]
            negatives = [label for label in range(len(y)) if label not in ignored[i] and label not in wanted[i]]
            hardest = sorted(negatives, key=lambda label: -s[label].item())[:num_negatives]
            total = 0.0 * s[0]
            for p, w in wanted[i].items():
                violators = [n for n in hardest if (s[n] - s[p] + margin).item() > 0]
                if violators:
                    weights = torch.softmax(torch.stack([s[n] for n in violators]) / 0.1, 0)
                    total = total + w * (weights * torch.stack([s[n] - s[p] + margin for n in violators])).sum()
            losses.append(total / len(wanted[i]))
    return _mean(losses, q, y)


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax,
    "decoupled_softmax": decoupled_softmax,
    "psl": psl,
    "bce": bce,
    "soft_topk": soft_topk,
    "triplet": triplet,
}


def reference(name: str, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Value and both gradients in float64."""
    q, y = case.queries.detach().double().requires_grad_(), case.labels.detach().double().requires_grad_()
    value = REFERENCES[name](case, q, y, **case.settings)
    value.backward()
    return value.detach(), q.grad, y.grad
