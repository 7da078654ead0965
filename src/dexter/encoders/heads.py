"""From a text's representation to the vectors that are scored: the dual-encoder head, the classifier head, the prior.

A score is the inner product of a query's and a label's vector divided by the temperature. The label prior, a learned
bias per label, is one more dimension: [query; 1] against [label; temperature * bias]. Training, evaluation and search
therefore all score by one inner product, and so does the unified search: both heads' vectors, one after the other.

    dual        N(g1(h))          against  N(g1(h of the label text))     N: scaled to length one, unless switched off
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
    """How common each label is: a learned bias, started from the log frequency in training."""

    def __init__(self, label_counts: NDArray[np.integer], num_queries: int) -> None:
        super().__init__()
        frequencies = (np.asarray(label_counts, dtype=np.float64) + 0.5) / (num_queries + 1.0)
        self.bias = nn.Parameter(torch.from_numpy(np.log(frequencies)).float())

    @classmethod
    def of(cls, bias_L: Tensor) -> LabelPrior:
        """A prior with the biases given."""
        prior = cls(np.zeros(0, dtype=np.int64), 0)
        prior.bias = nn.Parameter(bias_L)
        return prior


class DualHead(nn.Module):
    """g1: the same map for queries and labels, with the label prior as one more dimension."""

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
        """Vectors of queries, with one more element that the prior is multiplied by: 1 as trained, 0 for no prior."""
        vectors_BD = self.vectors(representations_BD)
        if self.prior is None:
            return vectors_BD
        return torch.cat([vectors_BD, vectors_BD.new_full((len(vectors_BD), 1), prior_weight)], dim=1)

    def labels(self, representations_MD: Tensor, labels_M: Tensor | None = None, *, weight: float = 1.0) -> Tensor:
        """Vectors of labels; `labels_M` says which they are (all of them, in order, if left out).

        `weight` scales the prior: 1 as trained, 0 none.
        """
        return _with_prior(self.vectors(representations_MD), self.prior, labels_M, weight * self.temperature)

    def for_labels(self, bias_L: Tensor | None) -> DualHead:
        """The same head for other labels, given their biases; the projection is shared."""
        prior = None if bias_L is None else LabelPrior.of(bias_L)
        head = DualHead(temperature=self.temperature, prior=prior, normalize=self.normalize)
        head.project = self.project
        return head.train(self.training)

    def vectors(self, representations_ND: Tensor) -> Tensor:
        """Vectors of queries or labels without the dimension of the prior."""
        vectors_ND: Tensor = self.project(representations_ND)
        return functional.normalize(vectors_ND, dim=-1) if self.normalize else vectors_ND


class ClassifierHead(nn.Module):
    """g2 for queries, and one row of a table for each label."""

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
        """The same head for other labels, given their rows and biases; the projection is shared."""
        prior = None if bias_L is None else LabelPrior.of(bias_L)
        head = ClassifierHead(table, temperature=self.temperature, input_size=0, prior=prior)
        head.project = self.project
        return head.train(self.training)

    @property
    def normalized_search(self) -> bool:
        """Whether search compares directions only, as published; with a prior a vector's length means something."""
        return self.prior is None

    def queries(self, representations_BD: Tensor, *, search: bool = False, prior_weight: float = 1.0) -> Tensor:
        """Vectors of queries; for search they may be scaled to length one, and the prior weighted."""
        vectors_BC: Tensor = self.project(representations_BD)
        if self.prior is not None:
            return torch.cat([vectors_BC, vectors_BC.new_full((len(vectors_BC), 1), prior_weight)], dim=1)
        return functional.normalize(vectors_BC, dim=-1) if search else vectors_BC

    def labels(self, labels_M: Tensor | None = None) -> Tensor:
        """The rows of labels, for training."""
        return _with_prior(self.table.rows(labels_M), self.prior, labels_M, self.temperature)

    def search_labels(self, rows_LC: Tensor, *, weight: float = 1.0) -> Tensor:
        """The vectors of all labels to search among, from rows in which labels without training are filled in."""
        rows_LC = functional.normalize(rows_LC, dim=-1) if self.normalized_search else rows_LC
        return _with_prior(rows_LC, self.prior, None, weight * self.temperature)


def _linear(input_size: int, output_size: int) -> nn.Linear:
    """A layer that starts as a rotation (without change of size: as the identity), so that similar stays similar."""
    layer = nn.Linear(input_size, output_size)
    if input_size == output_size:
        nn.init.eye_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _with_prior(vectors_MD: Tensor, prior: LabelPrior | None, labels_M: Tensor | None, scale: float) -> Tensor:
    if prior is None:
        return vectors_MD
    bias_M = prior.bias if labels_M is None else prior.bias[labels_M]
    return torch.cat([vectors_MD, (scale * bias_M)[:, None]], dim=1)
