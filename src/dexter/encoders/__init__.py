"""Text to vector: the static encoder, the transformer encoder, and the heads that follow either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dexter.config import EncoderConfig
from dexter.errors import ModelError

if TYPE_CHECKING:
    from dexter.encoders.static import StaticEncoder
    from dexter.encoders.transformer import TransformerEncoder

    TextEncoder = StaticEncoder | TransformerEncoder


def build_encoder(
    config: EncoderConfig, query_texts: Sequence[str], label_texts: Sequence[str], *, device: str = "cpu", seed: int = 0
) -> TextEncoder:
    """A new encoder as the configuration says; the static one takes its vocabulary from the texts."""
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
            dropout=config.dropout,
        )
    from dexter.encoders.static import StaticEncoder, StaticSettings

    settings = StaticSettings(
        normalize=config.normalize,
        max_length_query=config.max_length_query,
        max_length_label=config.max_length_label,
        ngrams=config.ngrams,
        ngram_buckets=config.ngram_buckets if config.ngrams > 1 else 0,
        positions=config.positions,
        hidden=config.hidden,
        dropout=config.dropout,
    )
    encoder = StaticEncoder.build(
        query_texts,
        label_texts,
        settings,
        pretrained=config.pretrained,
        dimension=config.dimension,
        label_vectors=config.label_vectors,
        max_words=config.words,
        min_count=config.word_min_count,
        seed=seed,
    )
    return encoder.to(device)


def load_encoder(folder: Path, *, device: str = "cpu") -> TextEncoder:
    """Read an encoder that was saved by one of ours."""
    from dexter.encoders.folder import ENCODER_FILE, read_object

    kind = read_object(folder / ENCODER_FILE).get("kind")
    if kind == "static":
        from dexter.encoders.static import StaticEncoder

        return StaticEncoder.load(folder).to(device)
    if kind == "transformer":
        from dexter.encoders.transformer import TransformerEncoder

        return TransformerEncoder.load(folder, device=device)
    raise ModelError(f"{folder / ENCODER_FILE}: unknown kind of encoder {kind!r}: expected static or transformer")
