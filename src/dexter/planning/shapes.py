"""How large an encoder is: the numbers that its weights, activations and operations follow from.

Shapes come from an encoder that exists, from the `config.json` of a folder, or from a well-known name, so that a run
can be planned with an encoder that is not on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.config import EncoderConfig
    from dexter.encoders import TextEncoder

WORD_PIECES = 30_522
"""Tokens of the BERT vocabulary, which the static encoder starts from."""
_STATIC_DIMENSION = 384
_UNTRAINED_DIMENSION = 256


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The sizes of an encoder."""

    kind: Literal["static", "transformer"]
    dimension: int
    """Size of an embedding."""
    table_rows: int = 0
    """Static: rows of the token table."""
    weights: int = 0
    """Parameters that every step updates: all of a transformer's; of a static encoder's, all but the table."""
    layers: int = 0
    hidden: int = 0
    intermediate: int = 0
    """Transformer: width of the feed-forward layer."""

    @property
    def table_elements(self) -> int:
        """Numbers in the token table."""
        return self.table_rows * self.dimension

    @property
    def operations_per_token(self) -> int:
        """Floating-point operations of a forward pass, per token (attention between tokens is left out)."""
        if self.kind == "static":
            return 2 * self.dimension
        return 2 * self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)


def _transformer(*, layers: int, hidden: int, intermediate: int, vocabulary: int, dimension: int = 0) -> EncoderShape:
    """A BERT-like encoder; position vectors, norms and biases are counted."""
    block = 4 * hidden**2 + 2 * hidden * intermediate + 9 * hidden + intermediate
    weights = (vocabulary + 512 + 4) * hidden + layers * block + hidden * dimension
    return EncoderShape(
        kind="transformer",
        dimension=dimension or hidden,
        weights=weights,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
    )


_KNOWN: dict[str, dict[str, int]] = {
    "minilm": {"layers": 6, "hidden": 384, "intermediate": 1536, "vocabulary": WORD_PIECES},
    "distilbert-base-uncased": {"layers": 6, "hidden": 768, "intermediate": 3072, "vocabulary": WORD_PIECES},
    "bert-base-uncased": {"layers": 12, "hidden": 768, "intermediate": 3072, "vocabulary": WORD_PIECES},
    "roberta-base": {"layers": 12, "hidden": 768, "intermediate": 3072, "vocabulary": 50_265},
}


def shape_from_config(config: EncoderConfig, *, table_rows: int = 0) -> EncoderShape:
    """The shape that the settings name; a static encoder's rows follow from the data and are given."""
    if config.kind == "static":
        default = _UNTRAINED_DIMENSION if config.pretrained == "none" else _STATIC_DIMENSION
        dimension = config.dimension or default
        layer = 2 * dimension * config.hidden + dimension + config.hidden if config.hidden else 0
        return EncoderShape(kind="static", dimension=dimension, table_rows=table_rows, weights=table_rows + 16 + layer)
    if config.pretrained in _KNOWN:
        return _transformer(**_KNOWN[config.pretrained], dimension=config.dimension)
    if Path(config.pretrained).is_dir():
        return _from_folder(Path(config.pretrained), config.dimension)
    raise UsageError(
        f"encoder.pretrained {config.pretrained!r}: its size is not known here: give a folder with a config.json, or "
        f"one of {', '.join(_KNOWN)}"
    )


def shape_of(encoder: TextEncoder) -> EncoderShape:
    """The shape of an encoder that exists."""
    from dexter.encoders.static import StaticEncoder

    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    if isinstance(encoder, StaticEncoder):
        rows = encoder.num_rows
        return EncoderShape(
            kind="static",
            dimension=encoder.dimension,
            table_rows=rows,
            weights=parameters - rows * encoder.dimension,
        )
    settings: Any = encoder.model.config
    return EncoderShape(
        kind="transformer",
        dimension=encoder.dimension,
        weights=parameters,
        layers=_first(settings, "num_hidden_layers", "n_layers"),
        hidden=_first(settings, "hidden_size", "dim"),
        intermediate=_first(settings, "intermediate_size", "hidden_dim"),
    )


def _from_folder(folder: Path, dimension: int) -> EncoderShape:
    """Read a Hugging Face `config.json`, with the names of BERT or of DistilBERT."""
    from types import SimpleNamespace

    from dexter.encoders.folder import read_object

    settings = SimpleNamespace(**read_object(folder / "config.json"))
    return _transformer(
        layers=_first(settings, "num_hidden_layers", "n_layers"),
        hidden=_first(settings, "hidden_size", "dim"),
        intermediate=_first(settings, "intermediate_size", "hidden_dim"),
        vocabulary=_first(settings, "vocab_size"),
        dimension=dimension,
    )


def _first(settings: Any, *names: str) -> int:
    for name in names:
        value = getattr(settings, name, None)
        if isinstance(value, int):
            return value
    raise UsageError(f"encoder.pretrained: its config.json has none of {', '.join(names)}: choose a BERT-like encoder")
