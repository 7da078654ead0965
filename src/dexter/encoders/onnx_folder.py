"""The query encoder of a published model as an ONNX file, in a folder of its own.

encoder.onnx    the graph with its weights, see `dexter.encoders.onnx_graph`
export.json     format version, precision, fingerprint of the encoder, what was measured when it was made
MANIFEST.json   SHA-256 of both, written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from dexter.encoders.onnx_runtime import REMEDY, OnnxEncoder, Precision
from dexter.errors import ModelError
from dexter.files import atomic_folder, read_sealed, write_json

if TYPE_CHECKING:
    from dexter.encoders.transformer import TransformerEncoder

FORMAT_VERSION = 1
METRICS = ("P@1", "P@3", "P@5")
"""What int8 is measured by."""
_GRAPH, _DESCRIPTION = "encoder.onnx", "export.json"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What int8 changes in one metric, in percent."""

    before: float
    after: float
    low: float
    """Ends of the difference's 95% interval."""
    high: float

    @property
    def difference(self) -> float:
        """Below zero where int8 is worse."""
        return self.after - self.before

    def describe(self) -> str:
        """As part of a line: before, after, the difference and its interval."""
        return f"{self.before:.2f} -> {self.after:.2f} ({self.difference:+.2f}, [{self.low:+.2f}, {self.high:+.2f}])"


@dataclass(frozen=True, kw_only=True)
class ExportFacts:
    """What is known of an export besides its graph."""

    precision: Precision
    fingerprint: str
    """Of the model's encoder."""
    difference: float
    """The largest between a vector of the float32 graph and torch's, relative to the length of longer ones than 1."""
    num_texts: int
    """Texts that this was measured on."""
    data: str | None = None
    """The data set whose test queries int8 was measured on."""
    num_queries: int = 0
    loss: Mapping[str, Loss] | None = None
    """By metric; there is no int8 without it."""

    def describe_loss(self) -> str:
        """What int8 costs, as one line; nothing for float32."""
        if not self.loss:
            return ""
        parts = [f"{name} {loss.describe()}" for name, loss in self.loss.items()]
        return f"int8 on {self.num_queries:,} test queries of {self.data!r}: {', '.join(parts)}"


def export_folder(folder: Path) -> Path:
    """Where the export of a published model is: run/onnx for run/model, NAME-onnx for a model folder on its own."""
    place = folder.resolve()
    return place.with_name("onnx" if place.name == "model" else f"{place.name}-onnx")


def write_export(folder: Path, content: bytes, facts: ExportFacts) -> None:
    """Write an export, whole or not at all; an older one in its place is replaced."""
    with atomic_folder(folder, replace=True) as temporary:
        (temporary / _GRAPH).write_bytes(content)
        write_json(temporary / _DESCRIPTION, {"format_version": FORMAT_VERSION, **asdict(facts)})


def open_export(folder: Path, encoder: TransformerEncoder, *, fingerprint: str) -> tuple[OnnxEncoder, ExportFacts]:
    """The export of the encoder with this fingerprint, every byte of it checked before it is parsed."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: the run has no ONNX export: make it with `dexter export`")
    facts = _read_facts(folder)
    if facts.fingerprint != fingerprint:
        raise ModelError(
            f"{folder}: exported from another encoder ({facts.fingerprint!r}) than the model has now "
            f"({fingerprint!r}): {REMEDY}"
        )
    content = read_sealed(folder, _GRAPH)
    return OnnxEncoder(content, encoder, precision=facts.precision, path=folder / _GRAPH), facts


def _read_facts(folder: Path) -> ExportFacts:
    path = folder / _DESCRIPTION
    content = read_sealed(folder, _DESCRIPTION)
    try:
        described = json.loads(content)
        version = described.pop("format_version")
        if version != FORMAT_VERSION:
            raise ModelError(f"{path}: format version {version!r}, this program reads {FORMAT_VERSION}: {REMEDY}")
        losses = described.pop("loss") or {}
        loss = {name: Loss(**{key: float(value) for key, value in each.items()}) for name, each in losses.items()}
        facts = ExportFacts(**described, loss=loss or None)
        if facts.precision not in get_args(Precision) or tuple(loss) != (METRICS if facts.precision == "int8" else ()):
            raise ValueError(f"precision {facts.precision!r} with {len(loss)} measured losses")
        facts.describe_loss()
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: not the description of an export ({str(error)[:200]!r}): {REMEDY}") from None
    return facts
