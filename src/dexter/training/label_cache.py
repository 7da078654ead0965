"""Label representations that are a few steps old, for labels that the batch does not need fresh.

Encoding every label at every step is most of the cost of all-label training with a transformer. With
`train.label_refresh` = s a representation is at most s steps old. The positives of the batch, and labels whose gradient
mattered when they were last scored, are encoded in every step; the others take turns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.processes import Processes

_HARD_SHARE = 0.01
"""A text is encoded in every step while its gradient norm is at least this share of the largest."""


class LabelCache:
    """The representations of this process's distinct label texts, each from the step that encoded it last."""

    def __init__(self, num_texts: int, *, refresh: int, processes: Processes) -> None:
        self._processes = processes
        self._refresh = refresh
        self._numbers = np.arange(num_texts) * processes.size + processes.rank
        self._hard = np.zeros(num_texts, dtype=bool)
        self._old_UD: Tensor | None = None
        self._mixed_UD: Tensor | None = None

    def texts_to_encode(self, needed: NDArray[np.int64], *, step: int) -> NDArray[np.int64]:
        """Return the texts to encode in a step, ascending: `needed` ones, hard ones, and those whose turn it is."""
        if self._old_UD is None:
            return np.arange(len(self._numbers))
        due = self._hard | (self._numbers % self._refresh == step % self._refresh)
        due[needed] = True
        return np.flatnonzero(due)

    def combine(self, fresh_UD: Tensor, texts: NDArray[np.int64]) -> Tensor:
        """Return the representations of all texts: the given fresh ones, with their graph, and older ones."""
        rows = torch.from_numpy(texts).to(fresh_UD.device)
        old_UD = fresh_UD.detach().clone() if self._old_UD is None else self._old_UD
        mixed_UD = old_UD.index_copy(0, rows, fresh_UD)
        self._old_UD = mixed_UD.detach()
        if mixed_UD.requires_grad:
            mixed_UD.retain_grad()
            self._mixed_UD = mixed_UD
        return mixed_UD

    def note_gradients(self) -> None:
        """After the backward pass, remember which texts had a large gradient."""
        if self._mixed_UD is not None and self._mixed_UD.grad is not None:
            norms_U = self._mixed_UD.grad.norm(dim=1)
            largest = self._processes.max(norms_U.max() if len(norms_U) else norms_U.new_zeros(()))
            self._hard = (norms_U >= _HARD_SHARE * largest).cpu().numpy()
        self._mixed_UD = None

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must hold for an exact resume by the same number of processes."""
        if self._old_UD is None:
            return {}
        return {"labels:old": self._old_UD, "labels:hard": torch.from_numpy(self._hard)}

    def load_state(self, tensors: Mapping[str, Tensor], device: str) -> None:
        """Restore what `state` returned; without it the next step encodes every label."""
        if "labels:old" in tensors:
            self._old_UD = tensors["labels:old"].to(device)
            self._hard = tensors["labels:hard"].numpy().copy()
