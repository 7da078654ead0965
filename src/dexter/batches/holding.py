"""Which labels a rank holds when several train together, and its part of what concerns all of them.

A label lives where its text lives, and the distinct texts are dealt out like cards: text t is on rank t mod W. So equal
texts are encoded once among all ranks, and frequent labels, or labels of one topic, which often have neighbouring ids,
are spread evenly. Held labels and texts are numbered from 0 in the order of their numbers among all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from dexter.batches.pool import Pool

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


@dataclass(frozen=True, eq=False)
class Holding:
    """The labels of one rank."""

    labels: NDArray[np.int64]
    """Their ids among all labels, ascending."""
    texts: NDArray[np.int64]
    """The numbers of their texts among all distinct texts, ascending."""
    places: NDArray[np.int64]
    """For every held label, the place of its text among the held ones."""
    num_labels: int
    """Labels on all ranks."""

    @classmethod
    def of(cls, places: NDArray[np.int64], *, rank: int = 0, size: int = 1) -> Holding:
        """What a rank holds, given the place of every label's text among the distinct texts of all labels."""
        labels = np.flatnonzero(places % size == rank)
        texts = np.arange(rank, int(places.max(initial=-1)) + 1, size)
        return cls(labels, texts, places[labels] // size, len(places))

    @property
    def is_all(self) -> bool:
        """Whether this rank holds every label."""
        return len(self.labels) == self.num_labels

    def part(self, pool: Pool) -> Pool:
        """The held labels of a pool, as numbers among the held ones, with their pairs; `num_labels` is still of all."""
        if self.is_all:
            return pool
        if pool.labels is None:
            places, labels = self._local(), None
        else:
            found = self._local()[pool.labels]
            places = np.where(found >= 0, np.cumsum(found >= 0) - 1, -1)
            labels = found[found >= 0]
        kept = torch.from_numpy(places)
        return replace(
            pool,
            labels=labels,
            positives=pool.positives.within(kept),
            ignore=None if pool.ignore is None else pool.ignore.within(kept),
            log_inclusion=None if pool.log_inclusion is None else pool.log_inclusion[places >= 0],
        )

    def columns(self, matrix: csr_matrix) -> csr_matrix:
        """The columns of the held labels."""
        return matrix if self.is_all else matrix[:, self.labels]

    def _local(self) -> NDArray[np.int64]:
        """For every label, its number among the held ones; -1 for labels that other ranks hold."""
        cached: NDArray[np.int64] | None = self.__dict__.get("_numbers")
        if cached is None:
            cached = np.full(self.num_labels, -1, dtype=np.int64)
            cached[self.labels] = np.arange(len(self.labels))
            self.__dict__["_numbers"] = cached
        return cached
