"""What a step minimises, as a function of representations alone: the heads and the loss that the settings name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dexter import losses
from dexter.batches import Positives
from dexter.config import LossConfig
from dexter.encoders.heads import DualHead

_MEGABYTE = 2**20


class Objective(nn.Module):
    """The loss of a batch, given what the encoder made of its queries and its labels."""

    def __init__(self, head: DualHead, config: LossConfig, *, num_labels: int) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self.saving = losses.Saving()
        self.streaming = losses.Streaming(
            memory_budget=config.memory_megabytes * _MEGABYTE, skip_below=config.skip_below, saving=self.saving
        )
        if config.name == "bce" and config.learn_scale:
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.bias = nn.Parameter(torch.tensor(-math.log(max(num_labels, 2))))

    def forward(
        self,
        queries_BD: Tensor,
        labels_MD: Tensor,
        positives: Positives,
        *,
        ignore: Positives | None = None,
        labels_M: Tensor | None = None,
    ) -> Tensor:
        """The loss; `labels_M` says which labels the second side holds (all, in order, if left out)."""
        loss: Callable[..., Tensor] = getattr(losses, self.config.name)
        # A mean over all labels makes gradients smaller than Adam's epsilon; a sum over labels does not.
        scale = len(labels_MD) if self.config.name == "bce" else 1
        return scale * loss(
            self.head.queries(queries_BD),
            self.head.labels(labels_MD, labels_M),
            positives,
            ignore=ignore,
            streaming=self.streaming,
            **self._settings(),
        )

    def _settings(self) -> dict[str, Any]:
        """The keyword arguments that the chosen loss has beside the common ones."""
        config = self.config
        if config.name == "triplet":
            return {"margin": config.margin, "num_negatives": config.num_negatives}
        settings: dict[str, Any] = {"temperature": config.temperature}
        if config.name in ("softmax", "psl"):
            settings["reduction"] = config.reduction
        if config.name == "psl":
            settings["balance"] = config.balance
        if config.name == "soft_topk":
            settings |= {"k": config.k, "alpha": config.alpha}
        if config.name == "bce" and config.learn_scale:
            settings |= {"scale": self.scale, "bias": self.bias}
        return settings
