"""Embed many texts: cut into micro-batches, encoded without a graph, put back in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from dexter.data.tokens import Tokens


class Encoder(Protocol):
    """What every encoder offers to those who embed with it; encoders are `torch.nn.Module`s besides."""

    dimension: int
    training: bool

    def __call__(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Embed texts given as token ids end to end and their N + 1 offsets: [N, dimension], float32."""
        ...

    def micro_batches(self, lengths: NDArray[np.integer]) -> list[NDArray[np.int64]]:
        """Cut texts of these token counts into sets of rows that are cheap to encode together."""
        ...

    def train(self, mode: bool = True) -> object:
        """Turn dropout on or off."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The weights."""
        ...


def embed(encoder: Encoder, tokens: Tokens, *, device: torch.device | str = "cpu", progress: bool = False) -> Tensor:
    """Embed every text with dropout off: [len(tokens), dimension] on `device`, in the order of the tokens.

    Vectors are float32, or float64 where the encoder's weights are.

    The encoder works where its weights are, whatever `device` is; its training mode is as before afterwards.
    """
    weight = next(encoder.parameters())
    home, dtype = weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32
    output_ND = torch.empty(len(tokens), encoder.dimension, device=device, dtype=dtype)
    was_training = encoder.training
    encoder.train(False)
    try:
        with torch.inference_mode(), tqdm(total=len(tokens), unit="text", disable=not progress) as bar:
            for rows in encoder.micro_batches(tokens.lengths):
                ids, offsets = tokens.select(rows)
                vectors = encoder(_tensor(ids, home), _tensor(offsets, home))
                output_ND[torch.from_numpy(rows).to(output_ND.device)] = vectors.to(output_ND.device)
                bar.update(len(rows))
    finally:
        encoder.train(was_training)
    return output_ND


def _tensor(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)
