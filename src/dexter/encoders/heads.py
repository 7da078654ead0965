"""Heads: from a text's representation to the vectors that are scored, and the label prior.

A score is the inner product of a query's and a label's vector divided by the temperature. The label prior, a learned
bias per label, is one more dimension: [query; 1] against [label; temperature * bias]. Training, evaluation and search
therefore all score by one inner product, and so does the unified search over the concatenated vectors of both heads.
In training more dimensions follow, of zeros for labels, up to a multiple of 8.

`dexter.encoders.head_arrays` computes the same without torch, once they are trained.

    dual        N(g1(h))          against  N(g1(h of the label text))     N: scaled to length one, if so set
    classifier  g2(h)             against  the label's row of a table     not normalised in training
    unified     [dual; classifier]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dexter.encoders.classifier import ClassifierTable
from dexter.encoders.head_arrays import ClassifierArrays, DualArrays, num_prior_elements

_TINY = 1e-12
"""Smallest length that a vector is divided by."""


class LabelPrior(nn.Module):
    """A learned bias per label, initialised with the log frequency of the label in training."""

    def __init__(self, label_counts: NDArray[np.integer], num_queries: int) -> None:
        super().__init__()
        frequencies = (np.asarray(label_counts, dtype=np.float64) + 0.5) / (num_queries + 1.0)
        self.bias = nn.Parameter(torch.from_numpy(np.log(frequencies)).float())


class DualHead(nn.Module):
    """The dual-encoder head g1: one map for queries and labels, with the label prior as one more dimension."""

    def __init__(
        self,
        *,
        temperature: float,
        prior: LabelPrior | None = None,
        input_size: int = 0,
        projection: int = 0,
        dropout: float = 0.0,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.prior = prior
        self.normalize = normalize
        layers = [_linear(input_size, projection), nn.Tanh(), nn.Dropout(dropout)] if projection else []
        self.project = nn.Sequential(*layers)

    def queries(self, representations_BD: Tensor) -> Tensor:
        """Return vectors of queries, followed by the factor of the prior, 1."""
        return _with_ones(self.vectors(representations_BD), self.prior)

    def labels(self, representations_MD: Tensor, labels_M: Tensor | None = None) -> Tensor:
        """Return vectors of the labels `labels_M` (default: all labels, in order)."""
        return _with_prior(self.vectors(representations_MD), self.prior, labels_M, self.temperature)

    def arrays(self) -> DualArrays:
        """Return the head as it is now, for use without training; on a CPU it shares the weights."""
        return DualArrays.of(_state(self), temperature=self.temperature, normalize=self.normalize)

    def vectors(self, representations_ND: Tensor) -> Tensor:
        """Return vectors of queries or labels without the dimension of the prior."""
        vectors_ND: Tensor = self.project(representations_ND)
        return unit_rows(vectors_ND) if self.normalize else vectors_ND


class ClassifierHead(nn.Module):
    """The classifier head: g2 for queries, and one row of a table for each label."""

    def __init__(
        self,
        table: ClassifierTable,
        *,
        temperature: float,
        input_size: int,
        projection: int = 0,
        dropout: float = 0.0,
        prior: LabelPrior | None = None,
    ) -> None:
        super().__init__()
        self.table = table
        self.temperature = temperature
        self.prior = prior
        layers = [_linear(input_size, projection)] if projection else []
        self.project = nn.Sequential(*layers, nn.Dropout(dropout))

    def arrays(self) -> ClassifierArrays:
        """Return the head as it is now, for use without training; on a CPU it shares the weights."""
        return ClassifierArrays.of(_state(self), temperature=self.temperature)

    def queries(self, representations_BD: Tensor) -> Tensor:
        """Return vectors of queries, followed by the factor of the prior, 1."""
        return _with_ones(self.project(representations_BD), self.prior)

    def labels(self, labels_M: Tensor | None = None) -> Tensor:
        """Return the rows of labels, for training."""
        return _with_prior(self.table.rows(labels_M), self.prior, labels_M, self.temperature)


def unit_rows(vectors_ND: Tensor) -> Tensor:
    """Scale each vector to length one, as `functional.normalize` does; the gradient takes half as many passes."""
    scaled_ND: Tensor = _UnitRows.apply(vectors_ND)  # type: ignore[no-untyped-call]
    return scaled_ND


class _UnitRows(torch.autograd.Function):
    """u = x / |x|; the gradient is (g - u <u, g>) / |x|."""

    @staticmethod
    def forward(ctx: Any, vectors_ND: Tensor) -> Tensor:
        lengths_N1 = torch.linalg.vector_norm(vectors_ND, dim=-1, keepdim=True).clamp_min_(_TINY)
        unit_ND: Tensor = vectors_ND / lengths_N1
        ctx.save_for_backward(unit_ND, lengths_N1)
        return unit_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients_ND: Tensor) -> Tensor:
        unit_ND, lengths_N1 = ctx.saved_tensors
        along_N1 = (unit_ND * gradients_ND).sum(dim=-1, keepdim=True)
        across_ND: Tensor = torch.addcmul(gradients_ND, unit_ND, along_N1, value=-1)
        return across_ND.div_(lengths_N1)


def _linear(input_size: int, output_size: int) -> nn.Linear:
    """Return a layer initialised with an orthogonal map (the identity if sizes are equal), which keeps similarities."""
    layer = nn.Linear(input_size, output_size)
    if input_size == output_size:
        nn.init.eye_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _with_prior(vectors_MD: Tensor, prior: LabelPrior | None, labels_M: Tensor | None, scale: float) -> Tensor:
    """Append the scaled bias of each label as one more dimension, and zeros, if there is a prior."""
    if prior is None:
        return vectors_MD
    bias_M = prior.bias if labels_M is None else prior.bias[labels_M]
    zeros = vectors_MD.new_zeros(len(vectors_MD), num_prior_elements(vectors_MD.shape[1]) - 1)
    return torch.cat([vectors_MD, (scale * bias_M)[:, None], zeros], dim=1)


def _with_ones(vectors_BD: Tensor, prior: LabelPrior | None) -> Tensor:
    """Append as many ones to each vector as `_with_prior` appends elements to labels, if there is a prior."""
    return (
        vectors_BD
        if prior is None
        else functional.pad(vectors_BD, (0, num_prior_elements(vectors_BD.shape[1])), value=1.0)
    )


def _state(head: nn.Module) -> dict[str, NDArray[Any]]:
    """Return the weights of a head by name, as arrays; the bits of bfloat16 as uint16."""
    values = {name: value.detach().cpu() for name, value in head.state_dict().items()}
    return {
        name: value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy()
        for name, value in values.items()
    }
