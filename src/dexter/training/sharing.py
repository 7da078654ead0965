"""What ranks divide among themselves beside the steps: texts to embed, and the model that is published as one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dexter.data.tokens import Tokens
from dexter.encoders import embed
from dexter.errors import ModelError
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.processes import LabelShard
from dexter.training.distributed import ProcessGroup
from dexter.types import HeadName


def query_vectors(processes: ProcessGroup, model: Model, tokens: Tokens, *, head: HeadName | None = None) -> Tensor:
    """The vectors of all queries on every rank; each encodes its part of them."""
    device = model.representations_LD.device
    own = embed(model.encoder, tokens.part(processes.part(len(tokens))), device=device)
    return processes.concatenate(model.search_vectors(own, head=head))


def start_alike(processes: ProcessGroup, *modules: nn.Module) -> None:
    """Give every rank the first rank's weights and buffers."""
    for module in modules:
        for tensor in module.state_dict().values():
            processes.broadcast(tensor)


def check_alike(processes: ProcessGroup, *modules: nn.Module) -> None:
    """Raise a ModelError unless all ranks have the same weights, as they must after the same updates."""
    if processes.size == 1:
        return
    parameters = [parameter.detach() for module in modules for parameter in module.parameters()]
    sums = torch.stack([parameter.double().sum().cpu() for parameter in parameters])
    largest, smallest = processes.max(sums), -processes.max(-sums)
    if not torch.equal(largest, smallest):
        raise ModelError(
            "the ranks' copies of the encoder have drifted apart: their devices or libraries compute differently; "
            "go on from the last checkpoint on machines that are alike"
        )


def whole_model(processes: ProcessGroup, model: Model, labels: Labels, places: NDArray[np.int64]) -> Model | None:
    """The model with the labels of all ranks, on the first rank; None on the others.

    Args:
        processes: the ranks.
        model: with the labels that this rank holds.
        labels: all labels.
        places: for every label, the place of its text among all distinct ones; decides who holds it.
    """
    if processes.size == 1:
        return model
    order = np.concatenate(
        [LabelShard.of(places, rank=rank, size=processes.size).labels for rank in range(processes.size)]
    )
    biases = [_in_order(processes, bias, order) for bias in model.prior_biases()]
    table = None if model.classifier is None else _in_order(processes, model.classifier.table.weight, order)
    representations = _in_order(processes, model.representations_LD, order)
    if not processes.is_first:
        return None
    rows = None if model.classifier is None or table is None else model.classifier.table.with_rows(table)
    return replace(model.with_labels(labels, representations, biases=biases, table=rows), processes=ProcessGroup())


def _in_order(processes: ProcessGroup, rows: Tensor, order: NDArray[np.int64]) -> Tensor:
    """The rows of all ranks in the order of their labels, on the first rank; nothing on the others."""
    parts = processes.collect(rows)
    if not parts:
        return rows.new_empty(0, *rows.shape[1:])
    joined = torch.cat(parts)
    ordered = torch.empty_like(joined)
    ordered[torch.from_numpy(order)] = joined
    return ordered
