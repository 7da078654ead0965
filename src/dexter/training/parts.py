"""What a run is put together from, as the settings say: its splits, its heads and objective, its optimisers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, identity, vstack
from torch import nn

from dexter.config import Config
from dexter.data import Dataset, Split
from dexter.data.tokens import Tokens
from dexter.encoders import embed
from dexter.encoders.classifier import ClassifierTable, starting_rows
from dexter.encoders.heads import ClassifierHead, DualHead, LabelPrior
from dexter.encoders.static import StaticEncoder
from dexter.processes import LabelShard, Processes, SingleProcess
from dexter.training.distributed import ProcessGroup
from dexter.training.labels import spread
from dexter.training.objective import Objective
from dexter.training.optimizers import Optimizers, Part

if TYPE_CHECKING:
    from dexter.encoders import TextEncoder

SPARSE_BELOW = 0.4
"""Row-sparse updates are faster while a step touches less than this share of the static encoder's table."""
_WEIGHTS = ("token_weights", "position_weights")


def make_splits(dataset: Dataset, config: Config) -> tuple[Split, Split | None]:
    """The queries to train on and those to validate on."""
    train, validation = dataset.train, None
    if config.validation.fraction:
        train, validation = dataset.carve_validation(
            config.validation.fraction, seed=config.seed, maximum=config.validation.maximum
        )
    return (_with_label_queries(train, dataset) if config.batch.label_queries else train), validation


def build_objective(
    config: Config,
    encoder: TextEncoder,
    label_counts: NDArray[np.int64],
    *,
    query_tokens: Tokens,
    label_tokens: Tokens,
    shard: LabelShard,
    relevance: csr_matrix,
    processes: ProcessGroup,
) -> Objective:
    """The heads that the settings name; the classifier starts from label embeddings and query centroids.

    `label_tokens` are those of the distinct texts of the labels that this rank holds: heads have rows for these only.
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
    if classifier is not None:
        objective.eval()
        with torch.inference_mode():
            own_queries, texts = (
                classifier.project(embed(encoder, tokens, device=device))
                for tokens in (query_tokens.part(processes.part(len(query_tokens))), label_tokens)
            )
            labels = spread(texts, shard.text_of_label)
            rows = starting_rows(labels, processes.concatenate(own_queries), shard.columns(relevance))
        classifier.table.initialise(rows)
    return objective


def build_optimizers(
    config: Config,
    encoder: nn.Module,
    objective: Objective,
    *,
    num_steps: int,
    touched: NDArray[np.int64],
    processes: Processes | None = None,
) -> Optimizers:
    """Each part with its learning rate; the static encoder's table row-sparse where a step touches few rows.

    `touched` are the token ids of a typical step, as far as this rank has to do with them.
    """
    train = config.train
    named = list(encoder.named_parameters())
    sparse = (
        isinstance(encoder, StaticEncoder)
        and _share(touched, encoder.num_rows, processes or SingleProcess()) < SPARSE_BELOW
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
        Part(name="weights", parameters=weights, learning_rate=train.weights_learning_rate),
        *_objective_parts(config, objective),
    ]
    used = [part for part in parts if part.parameters]
    return Optimizers(used, num_steps=num_steps, warmup=train.warmup, seed=config.seed, processes=processes)


def _objective_parts(config: Config, objective: Objective) -> list[Part]:
    """The heads' projections, the classifier's rows, and what is one number per label or for all."""
    train = config.train
    named = list(objective.named_parameters())
    tables = [(name, value) for name, value in named if name.startswith("classifier.table.")]
    projections = [(name, value) for name, value in named if ".project." in name]
    priors = [(name, value) for name, value in named if ".prior." in name]
    apart = {name for name, _ in tables + projections + priors}
    return [
        Part(name="heads", parameters=projections, learning_rate=train.head_learning_rate),
        Part(
            name="classifier",
            parameters=tables,
            learning_rate=train.classifier_learning_rate,
            sparse=True,
            by_label=True,
        ),
        Part(name="prior", parameters=priors, learning_rate=train.prior_learning_rate, by_label=True),
        Part(
            name="objective",
            parameters=[(name, value) for name, value in named if name not in apart],
            learning_rate=train.prior_learning_rate,
        ),
    ]


def _share(ids: NDArray[np.int64], num_rows: int, processes: Processes) -> float:
    """The share of a static encoder's rows that the features of all ranks touch."""
    touched = torch.zeros(num_rows, dtype=torch.int32)
    touched[torch.from_numpy(np.unique(ids % num_rows))] = 1
    return int(processes.max(touched).sum()) / num_rows


def _with_label_queries(split: Split, dataset: Dataset) -> Split:
    """The split with one more query per label: its text, relevant to itself."""
    ones = identity(dataset.num_labels, dtype=np.float32, format="csr")
    return Split(
        [*split.texts, *dataset.label_texts],
        [*split.uids, *(f"label:{label_id}" for label_id in dataset.label_ids)],
        vstack([split.relevance, ones]).tocsr(),
        None if split.filtered is None else vstack([split.filtered, csr_matrix(ones.shape)]).tocsr(),
    )
