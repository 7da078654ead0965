"""Heads: from a text's representation to the vectors that are scored, and the label prior.

A score is the inner product of a query's and a label's vector divided by the temperature. The label prior, a learned
bias per label, is one more dimension: [query; 1] against [label; temperature * bias]. Training, evaluation and search
therefore all score by one inner product, and so does the unified search over the concatenated vectors of both heads.

    dual        N(g1(h))          against  N(g1(h of the label text))     N: scaled to length one, if so set
    classifier  g2(h)             against  the label's row of a table     not normalised in training
    unified     [dual; classifier]
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dexter.encoders.classifier import ClassifierTable


class LabelPrior(nn.Module):
    """A learned bias per label, initialised with the log frequency of the label in training."""

    def __init__(self, label_counts: NDArray[np.integer], num_queries: int) -> None:
        super().__init__()
        frequencies = (np.asarray(label_counts, dtype=np.float64) + 0.5) / (num_queries + 1.0)
        self.bias = nn.Parameter(torch.from_numpy(np.log(frequencies)).float())

    @classmethod
    def of(cls, bias_L: Tensor) -> LabelPrior:
        """Create a prior with the given biases."""
        prior = cls(np.zeros(0, dtype=np.int64), 0)
        prior.bias = nn.Parameter(bias_L)
        return prior


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

    def queries(self, representations_BD: Tensor, *, prior_weight: float = 1.0) -> Tensor:
        """Return vectors of queries, with the factor of the prior as last element: 1 as trained, 0 for no prior."""
        vectors_BD = self.vectors(representations_BD)
        if self.prior is None:
            return vectors_BD
        return torch.cat([vectors_BD, vectors_BD.new_full((len(vectors_BD), 1), prior_weight)], dim=1)

    def labels(self, representations_MD: Tensor, labels_M: Tensor | None = None) -> Tensor:
        """Return vectors of the labels `labels_M` (default: all labels, in order)."""
        return _with_prior(self.vectors(representations_MD), self.prior, labels_M, self.temperature)

    def for_labels(self, bias_L: Tensor | None) -> DualHead:
        """Return this head for other labels, given their biases; the projection is shared."""
        prior = None if bias_L is None else LabelPrior.of(bias_L)
        head = DualHead(temperature=self.temperature, prior=prior, normalize=self.normalize)
        head.project = self.project
        return head.train(self.training)

    def vectors(self, representations_ND: Tensor) -> Tensor:
        """Return vectors of queries or labels without the dimension of the prior."""
        vectors_ND: Tensor = self.project(representations_ND)
        return functional.normalize(vectors_ND, dim=-1) if self.normalize else vectors_ND


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

    def for_labels(self, table: ClassifierTable, bias_L: Tensor | None) -> ClassifierHead:
        """Return this head for other labels, given their rows and biases; the projection is shared."""
        prior = None if bias_L is None else LabelPrior.of(bias_L)
        head = ClassifierHead(table, temperature=self.temperature, input_size=0, prior=prior)
        head.project = self.project
        return head.train(self.training)

    @property
    def normalized_search(self) -> bool:
        """Whether search uses cosines, as published; with a prior the lengths of vectors count."""
        return self.prior is None

    def queries(self, representations_BD: Tensor, *, search: bool = False, prior_weight: float = 1.0) -> Tensor:
        """Return vectors of queries; for search without a prior they are scaled to length one."""
        vectors_BC: Tensor = self.project(representations_BD)
        if self.prior is not None:
            return torch.cat([vectors_BC, vectors_BC.new_full((len(vectors_BC), 1), prior_weight)], dim=1)
        return functional.normalize(vectors_BC, dim=-1) if search else vectors_BC

    def labels(self, labels_M: Tensor | None = None) -> Tensor:
        """Return the rows of labels, for training."""
        return _with_prior(self.table.rows(labels_M), self.prior, labels_M, self.temperature)

    def search_labels(self, rows_LC: Tensor) -> Tensor:
        """Return the vectors of all labels for search, from rows in which those of unseen labels are filled in."""
        rows_LC = functional.normalize(rows_LC, dim=-1) if self.normalized_search else rows_LC
        return _with_prior(rows_LC, self.prior, None, self.temperature)


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
    """Append the scaled bias of each label as one more dimension, if there is a prior."""
    if prior is None:
        return vectors_MD
    bias_M = prior.bias if labels_M is None else prior.bias[labels_M]
    return torch.cat([vectors_MD, (scale * bias_M)[:, None]], dim=1)
