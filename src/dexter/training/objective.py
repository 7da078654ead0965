"""What a step minimises, as a function of representations alone: the heads and the loss that the settings choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from dexter import losses
from dexter.batches.pool import Pool
from dexter.config import Config, HeadConfig, LossConfig
from dexter.data.tokens import Tokens
from dexter.encoders import embed
from dexter.encoders.classifier import ClassifierTable, starting_rows
from dexter.encoders.heads import ClassifierHead, DualHead, LabelPrior
from dexter.processes import LabelShard
from dexter.training.distributed import ProcessGroup

if TYPE_CHECKING:
    from dexter.encoders import TrainableEncoder

_MEGABYTE = 2**20


class Objective(nn.Module):
    """The loss of a batch, given the representations of its queries and of its labels' texts.

    With several processes, each has a part of the queries and a part of the labels; the loss is that of all pairs.
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
        """Whether the dual encoder is part of the loss; otherwise label texts need not be encoded."""
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

        Queries, labels and pools are those of this process; all processes together have `num_queries` queries.
        """
        num_queries = len(queries_BD) if num_queries is None else num_queries
        total = queries_BD.new_zeros(())
        if labels_MD is not None and self.needs_label_texts:
            labels_M = _tensor(pool.labels, queries_BD)
            vectors_MD = self.dual.labels(labels_MD, labels_M)
            vectors_BD = self.processes.joined_rows(self.dual.queries(queries_BD), num_queries)
            total = total + self.encoder_weight * self._loss(vectors_BD, vectors_MD, pool, self.config.balance)
        if self.classifier is not None and self.encoder_weight < 1.0:
            pool = classifier_pool or pool
            rows_MD = self.classifier.labels(_tensor(pool.labels, queries_BD))
            vectors_BC = self.processes.joined_rows(self.classifier.queries(queries_BD), num_queries)
            loss = self._loss(vectors_BC, rows_MD, pool, self.config.classifier_balance)
            total = total + (1.0 - self.encoder_weight) * loss
        return total

    def _loss(self, queries_BD: Tensor, labels_MD: Tensor, pool: Pool, balance: float) -> Tensor:
        loss: Callable[..., Tensor] = getattr(losses, self.config.name)
        # `bce` is the mean over all pairs.
        divisors = {"query": pool.num_labels, "sum": pool.num_labels * len(queries_BD)}
        factor = divisors.get(self.config.average, 1) if self.config.name == "bce" else 1
        return factor * loss(
            queries_BD,
            labels_MD,
            pool.positives.to(queries_BD.device),
            ignore=None if pool.ignore is None else pool.ignore.to(queries_BD.device),
            streaming=self.streaming,
            **self._settings(pool, queries_BD, balance),
        )

    def _settings(self, pool: Pool, like: Tensor, balance: float) -> dict[str, Any]:
        """The keyword arguments of the chosen loss besides those that all losses have."""
        config = self.config
        if config.name == "triplet":
            return {"margin": config.margin, "num_negatives": config.num_negatives}
        settings: dict[str, Any] = {"temperature": config.temperature}
        if config.name in ("softmax", "psl", "decoupled_softmax"):
            settings["reduction"] = config.reduction
        if config.name == "psl":
            settings |= {"balance": balance, "average": config.average}
        if config.name == "soft_topk":
            settings |= {"k": config.k, "alpha": config.alpha}
        if config.name == "bce" and config.learn_scale:
            settings |= {"scale": self.scale, "bias": self.bias}
        if pool.log_inclusion is not None:
            settings["negative_offsets"] = torch.from_numpy(-pool.log_inclusion).to(like.device)
        return settings


def build_objective(
    config: Config,
    encoder: TrainableEncoder,
    label_counts: NDArray[np.int64],
    *,
    query_tokens: Tokens,
    label_tokens: Tokens,
    shard: LabelShard,
    relevance: csr_matrix,
    processes: ProcessGroup,
) -> Objective:
    """Build the heads that the settings choose; the classifier starts from label embeddings and query centroids.

    `label_tokens` are those of the distinct texts of the labels that this process holds: heads have rows for these.
    """
    head, loss, device = config.head, config.loss, processes.device(config.train.device)
    held_counts = label_counts[shard.labels]

    def prior() -> LabelPrior | None:
        return LabelPrior(held_counts, relevance.shape[0]) if loss.prior else None

    dual = DualHead(
        temperature=loss.temperature,
        prior=prior(),
        input_size=encoder.dimension,
        projection=head.projection,
        dropout=head.dropout,
        normalize=head.classifier or head.projection > 0,
    )
    classifier = None
    if head.classifier:
        size = head.projection or encoder.dimension
        classifier = ClassifierHead(
            ClassifierTable(len(shard.labels), size, storage=head.storage, dropout=head.row_dropout),
            temperature=loss.temperature,
            input_size=encoder.dimension,
            projection=head.projection,
            dropout=head.dropout,
            prior=prior(),
        )
    objective = Objective(dual, classifier, loss, head, num_labels=shard.num_labels, processes=processes).to(device)
    start_classifier(
        objective, encoder, query_tokens=query_tokens, label_tokens=label_tokens, shard=shard, relevance=relevance
    )
    return objective


def start_classifier(
    objective: Objective,
    encoder: TrainableEncoder,
    *,
    query_tokens: Tokens,
    label_tokens: Tokens,
    shard: LabelShard,
    relevance: csr_matrix,
) -> None:
    """Set the classifier's rows, if there is one, from the vectors that the encoder gives to labels and queries now."""
    classifier, processes = objective.classifier, objective.processes
    if classifier is None:
        return
    objective.eval()
    with torch.inference_mode():
        own_queries, texts = (
            classifier.project(embed(encoder, tokens, device=classifier.table.weight.device))
            for tokens in (query_tokens.part(processes.part(len(query_tokens))), label_tokens)
        )
        labels = spread(texts, shard.text_of_label)
        rows = starting_rows(labels, processes.concatenate(own_queries), shard.columns(relevance))
    classifier.table.initialise(rows)


def spread(texts_UD: Tensor, text_of_label: NDArray[np.int64]) -> Tensor:
    """One row per label from one row per distinct text; the same tensor, not a copy, where no text is repeated."""
    if np.array_equal(text_of_label, np.arange(len(texts_UD))):
        return texts_UD
    return texts_UD[torch.from_numpy(text_of_label).to(texts_UD.device)]


def is_by_label(name: str) -> bool:
    """Whether a parameter of an objective has one row per label; a process then has the rows of its own labels only."""
    return ".table." in name or ".prior." in name


def _tensor(labels: np.ndarray | None, like: Tensor) -> Tensor | None:
    return None if labels is None else torch.from_numpy(labels).to(like.device)
