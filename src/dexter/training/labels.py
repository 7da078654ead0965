"""The label side of a step: equal texts are encoded once, and labels that no query needs may be a few steps old.

With `refresh` = s, a label's representation is at most s steps old. Always fresh are the labels the step asks for (its
positives) and those whose gradient mattered when they were last scored; the others take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.processes import Processes, SingleProcess

_HARD_SHARE = 0.01
"""A label is kept fresh while its gradient norm is at least this share of the largest."""


@dataclass(frozen=True)
class DistinctTexts:
    """Texts without repeats, and where each original one went."""

    texts: Sequence[str]
    places: NDArray[np.int64]
    """For every original text, its position among the distinct ones."""

    @classmethod
    def of(cls, texts: Sequence[str]) -> DistinctTexts:
        """Keep the first of equal texts."""
        first: dict[str, int] = {}
        places = np.array([first.setdefault(text, len(first)) for text in texts], dtype=np.int64)
        return cls(tuple(first), places)


def spread(texts_UD: Tensor, places: NDArray[np.int64]) -> Tensor:
    """One row per label from one per distinct text; the same tensor, not a copy of it, where no text is repeated."""
    if np.array_equal(places, np.arange(len(texts_UD))):
        return texts_UD
    return texts_UD[torch.from_numpy(places).to(texts_UD.device)]


class LabelSide:
    """Chooses the texts to encode in a step, and puts the labels' representations together."""

    def __init__(self, places: NDArray[np.int64], *, refresh: int = 1, processes: Processes | None = None) -> None:
        """Labels by the place of their text.

        Args:
            places: for every label (of this rank), the place of its text among the distinct ones (of this rank).
            refresh: steps until a representation is made anew.
            processes: those that hold the other labels; texts are dealt out among them (`dexter.batches.shard`).
        """
        self.places = places
        self.refresh = refresh
        self._processes = processes or SingleProcess()
        self._num_texts = int(places.max(initial=-1)) + 1
        self._old: Tensor | None = None
        self._hard = np.zeros(self._num_texts, dtype=bool)
        self._mixed: Tensor | None = None

    def texts_to_encode(
        self, labels: NDArray[np.int64] | None, *, needed: NDArray[np.int64], step: int
    ) -> NDArray[np.int64]:
        """The distinct texts to encode for a pool of labels (None: all of them), of which some are `needed` fresh."""
        if self.refresh > 1 and labels is None:
            if self._old is None:
                return np.arange(self._num_texts)
            numbers = np.arange(self._num_texts) * self._processes.size + self._processes.rank
            due = numbers % self.refresh == step % self.refresh
            due |= self._hard
            due[self.places[needed]] = True
            return np.flatnonzero(due)
        if labels is None:
            return np.arange(self._num_texts)
        # A pool is ascending, and without repeated texts so are the places of its labels.
        return self.places[labels] if self._num_texts == len(self.places) else np.unique(self.places[labels])

    def assemble(self, fresh_UD: Tensor, texts: NDArray[np.int64], labels: NDArray[np.int64] | None) -> Tensor:
        """Representations of the pool's labels, from those of the texts that were just encoded."""
        places = self.places if labels is None else self.places[labels]
        if self.refresh > 1 and labels is None:
            return self._mix(fresh_UD, texts)[torch.from_numpy(places).to(fresh_UD.device)]
        position = np.searchsorted(texts, places)
        if len(position) == len(texts) and np.array_equal(position, np.arange(len(texts))):
            return fresh_UD
        return fresh_UD[torch.from_numpy(position).to(fresh_UD.device)]

    def learn(self) -> None:
        """After the backward pass: remember which labels mattered."""
        if self._mixed is not None and self._mixed.grad is not None:
            norms = self._mixed.grad.norm(dim=1)
            largest = self._processes.max(norms.max() if len(norms) else norms.new_zeros(()))
            self._hard = (norms >= _HARD_SHARE * largest).cpu().numpy()
        self._mixed = None

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold."""
        if self._old is None:
            return {}
        return {"old": self._old, "hard": torch.from_numpy(self._hard)}

    def load_state(self, tensors: dict[str, Tensor], device: str) -> None:
        """Take back what `state` gave."""
        if "old" in tensors:
            self._old = tensors["old"].to(device)
            self._hard = tensors["hard"].numpy().copy()

    def _mix(self, fresh_UD: Tensor, texts: NDArray[np.int64]) -> Tensor:
        """Fresh representations where there are some, older ones elsewhere."""
        rows = torch.from_numpy(texts).to(fresh_UD.device)
        if self._old is None:
            self._old = fresh_UD.detach().clone()
        mixed = self._old.index_copy(0, rows, fresh_UD)
        self._old = mixed.detach()
        if mixed.requires_grad:
            mixed.retain_grad()
            self._mixed = mixed
        return mixed
