"""From a text's representation to the vectors that are scored: the parts of a dual encoder beside its encoder.

The score of a query and a label is the dot product of their vectors divided by the temperature. The label prior, a
learned bias per label, is one more dimension: [query; 1] against [label; temperature * bias]. Training, evaluation and
search therefore all score by one inner product.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class LabelPrior(nn.Module):
    """How common each label is: a learned bias, started from the log frequency in training."""

    def __init__(self, label_counts: NDArray[np.integer], num_queries: int) -> None:
        super().__init__()
        frequencies = (np.asarray(label_counts, dtype=np.float64) + 0.5) / (num_queries + 1.0)
        self.bias = nn.Parameter(torch.from_numpy(np.log(frequencies)).float())


class DualHead(nn.Module):
    """Turns representations of queries and labels into the vectors that are scored."""

    def __init__(self, *, temperature: float, prior: LabelPrior | None = None) -> None:
        super().__init__()
        self.temperature = temperature
        self.prior = prior

    def queries(self, representations_BD: Tensor) -> Tensor:
        """Vectors of queries: the representations, with a one for the prior."""
        if self.prior is None:
            return representations_BD
        return torch.cat([representations_BD, representations_BD.new_ones(len(representations_BD), 1)], dim=1)

    def labels(self, representations_MD: Tensor, labels_M: Tensor | None = None, *, weight: float = 1.0) -> Tensor:
        """Vectors of labels; `labels_M` says which they are (all of them, in order, if left out).

        `weight` scales the prior: 1 as trained, 0 none.
        """
        if self.prior is None:
            return representations_MD
        bias_M = self.prior.bias if labels_M is None else self.prior.bias[labels_M]
        return torch.cat([representations_MD, (weight * self.temperature * bias_M)[:, None]], dim=1)
