"""What a step minimises, as a function of representations alone: the heads and the loss that the settings name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dexter import losses
from dexter.batches.pool import Pool
from dexter.config import HeadConfig, LossConfig
from dexter.encoders.heads import ClassifierHead, DualHead
from dexter.training.distributed import ProcessGroup

_MEGABYTE = 2**20


class Objective(nn.Module):
    """The loss of a batch, given what the encoder made of its queries and of its labels' texts.

    With several ranks, each has its part of the queries and its part of the labels; the loss is that of all pairs.
    """

    def __init__(
        self,
        dual: DualHead,
        classifier: ClassifierHead | None,
        loss: LossConfig,
        head: HeadConfig,
        *,
        num_labels: int,
        processes: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.processes = processes or ProcessGroup()
        self.dual = dual
        self.classifier = classifier
        self.config = loss
        self.encoder_weight = head.encoder_weight if classifier is not None else 1.0
        self.streaming = losses.Streaming(
            memory_budget=loss.memory_megabytes * _MEGABYTE,
            processes=self.processes,
        )
        if loss.name == "bce" and loss.learn_scale:
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.bias = nn.Parameter(torch.tensor(-math.log(max(num_labels, 2))))

    @property
    def needs_label_texts(self) -> bool:
        """Whether the dual encoder has a share in the loss; without it label texts need not be encoded."""
        return self.encoder_weight > 0.0

    def forward(
        self,
        queries_BD: Tensor,
        labels_MD: Tensor | None,
        pool: Pool,
        classifier_pool: Pool | None = None,
        *,
        num_queries: int | None = None,
    ) -> Tensor:
        """The weighted loss of both heads; `labels_MD` are the representations of the pool's labels.

        Queries and labels are those of this rank, of `num_queries` on all ranks; pools name its labels.
        """
        num_queries = len(queries_BD) if num_queries is None else num_queries
        total = queries_BD.new_zeros(())
        if labels_MD is not None and self.needs_label_texts:
            labels_M = _tensor(pool.labels, queries_BD)
            vectors_MD = self.dual.labels(labels_MD, labels_M)
            vectors_BD = self.processes.joined_rows(self.dual.queries(queries_BD), num_queries)
            total = total + self.encoder_weight * self._loss(vectors_BD, vectors_MD, pool)
        if self.classifier is not None and self.encoder_weight < 1.0:
            pool = classifier_pool or pool
            rows_MD = self.classifier.labels(_tensor(pool.labels, queries_BD))
            vectors_BC = self.processes.joined_rows(self.classifier.queries(queries_BD), num_queries)
            loss = self._loss(vectors_BC, rows_MD, pool)
            total = total + (1.0 - self.encoder_weight) * loss
        return total

    def _loss(self, queries_BD: Tensor, labels_MD: Tensor, pool: Pool) -> Tensor:
        loss: Callable[..., Tensor] = getattr(losses, self.config.name)
        # A mean over all labels makes gradients smaller than Adam's epsilon; a sum over labels does not.
        scale = pool.num_labels if self.config.name == "bce" else 1
        return scale * loss(
            queries_BD,
            labels_MD,
            pool.positives.to(queries_BD.device),
            ignore=None if pool.ignore is None else pool.ignore.to(queries_BD.device),
            streaming=self.streaming,
            **self._settings(pool, queries_BD),
        )

    def _settings(self, pool: Pool, like: Tensor) -> dict[str, Any]:
        """The keyword arguments that the chosen loss has beside the common ones."""
        config = self.config
        if config.name == "triplet":
            return {"margin": config.margin, "num_negatives": config.num_negatives}
        settings: dict[str, Any] = {"temperature": config.temperature}
        if config.name in ("softmax", "psl", "decoupled_softmax"):
            settings["reduction"] = config.reduction
        if config.name == "psl":
            settings["balance"] = config.balance
        if config.name == "soft_topk":
            settings |= {"k": config.k, "alpha": config.alpha}
        if config.name == "bce" and config.learn_scale:
            settings |= {"scale": self.scale, "bias": self.bias}
        if pool.log_inclusion is not None:
            settings["negative_offsets"] = torch.from_numpy(-pool.log_inclusion).to(like.device)
        return settings


def is_by_label(name: str) -> bool:
    """Whether a parameter of an objective has one row per label, of which a rank holds those of its own."""
    return ".table." in name or ".prior." in name


def _tensor(labels: np.ndarray | None, like: Tensor) -> Tensor | None:
    return None if labels is None else torch.from_numpy(labels).to(like.device)
