"""Text to vector: the static encoder, the transformer encoder, and the heads that follow either.

A `TextEncoder` in use has `tokenize(texts, side=)`, which returns ragged token ids, `embed(tokens)`, which returns an
array, `save(folder)`, which writes what `load_encoder(folder)` reads, and `dimension`, the size of a vector. One in
training (`build_encoder`) is a `torch.nn.Module`: `encoder(ids, offsets)` embeds, and `micro_batches(lengths)` groups
texts that are cheap to embed together. A static encoder in use is arrays and needs no torch; a transformer is one
module for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np

from dexter.errors import ModelError, require
from dexter.files import read_object
from dexter.types import Side

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dexter.config import EncoderConfig
    from dexter.data.tokens import Tokens
    from dexter.encoders.static import StaticEncoder
    from dexter.encoders.transformer import TransformerEncoder

    TrainableEncoder: TypeAlias = "StaticEncoder | TransformerEncoder"


class TextEncoder(Protocol):
    """An encoder in use."""

    @property
    def dimension(self) -> int:
        """Size of a vector."""
        ...

    def tokenize(self, texts: Sequence[str], *, side: Side, progress: bool = False) -> Tokens:
        """Turn texts of one side into ragged token ids."""
        ...

    def split_query(self, text: str) -> list[str]:
        """Cut a query text into windows of the length that is read."""
        ...

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Return one vector per text."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `load_encoder` reads."""
        ...


def build_encoder(
    config: EncoderConfig, query_texts: Sequence[str], label_texts: Sequence[str], *, device: str = "cpu", seed: int = 0
) -> TrainableEncoder:
    """Build a new encoder from its configuration; the static encoder takes its vocabulary from the texts."""
    if config.kind == "transformer":
        from dexter.encoders.transformer import TransformerEncoder

        return TransformerEncoder.from_pretrained(
            config.pretrained,
            device=device,
            pooling=config.pooling,
            projection=config.dimension or None,
            normalize=config.normalize,
            max_length_query=config.max_length_query,
            max_length_label=config.max_length_label,
            query_prefix=config.query_prefix,
            label_prefix=config.label_prefix,
            dropout=None if config.dropout < 0 else config.dropout,
        )
    from dexter.encoders.static import StaticEncoder
    from dexter.encoders.static_arrays import StaticSettings

    settings = StaticSettings(
        normalize=config.normalize,
        max_length_query=config.max_length_query,
        max_length_label=config.max_length_label,
        ngrams=config.ngrams,
        ngram_buckets=config.ngram_buckets if config.ngrams > 1 else 0,
        positions=config.positions,
        token_dropout=config.token_dropout,
    )
    encoder = StaticEncoder.build(
        query_texts,
        label_texts,
        settings,
        pretrained=config.pretrained,
        dimension=config.dimension,
        label_vectors=config.label_vectors,
        labels_per_vector=config.labels_per_vector,
        max_words=config.words,
        seed=seed,
    )
    return encoder.to(device)


def load_encoder(folder: Path, *, device: str = "cpu") -> TextEncoder:
    """Read an encoder that was written by its `save` method; `device` is where a transformer computes."""
    from dexter.encoders.folder import ENCODER_FILE

    kind = read_object(folder / ENCODER_FILE).get("kind")
    if kind == "static":
        from dexter.encoders.static_arrays import StaticArrays

        return StaticArrays.load(folder)
    if kind == "transformer":
        require("torch", extra="train", purpose="a run with a transformer encoder")
        from dexter.encoders.transformer import TransformerEncoder

        return TransformerEncoder.load(folder, device=device)
    raise ModelError(f"{folder / ENCODER_FILE}: unknown kind of encoder {kind!r}: expected static or transformer")


def embed(
    encoder: TrainableEncoder, tokens: Tokens, *, device: torch.device | str = "cpu", progress: bool = False
) -> Tensor:
    """Embed every text without dropout and without a graph: [len(tokens), dimension], in the order of the tokens.

    Vectors are float32, or float64 if the encoder's weights are. They are computed where the weights are and returned
    on `device`. The encoder's training mode is restored afterwards.
    """
    import torch
    from tqdm import tqdm

    def as_tensor(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(weight.device)

    weight = next(encoder.parameters())
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    output_ND = torch.empty(len(tokens), encoder.dimension, device=device, dtype=dtype)
    was_training = encoder.training
    encoder.train(False)
    try:
        with torch.inference_mode(), tqdm(total=len(tokens), unit="text", disable=not progress) as bar:
            for rows in encoder.micro_batches(tokens.lengths):
                ids, offsets = tokens.select(rows)
                vectors = encoder(as_tensor(ids), as_tensor(offsets))
                output_ND[torch.from_numpy(rows).to(output_ND.device)] = vectors.to(output_ND.device)
                bar.update(len(rows))
    finally:
        encoder.train(was_training)
    return output_ND
