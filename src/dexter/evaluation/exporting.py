"""The export of a run: its query encoder as an ONNX file beside the model, held against torch before it is kept.

float32 is refused where a vector differs from torch's by more than 1e-5. int8 is made only with data to measure what it
costs on, and the loss is stored with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dexter.data import Dataset
from dexter.encoders.onnx_folder import METRICS, ExportFacts, Loss, export_folder, write_export
from dexter.encoders.onnx_graph import export_graph, quantize_graph
from dexter.encoders.onnx_runtime import OnnxEncoder
from dexter.errors import ModelError, UsageError
from dexter.evaluation.report import compare, test_split
from dexter.evaluation.runs import predict_columns
from dexter.metrics import overfetch
from dexter.model.model import Model
from dexter.model.store import encoder_fingerprint, model_folder
from dexter.predict.predictor import Predictor, check_exportable

log = logging.getLogger("dexter")
BAR = 1e-5
"""The largest difference of a vector's element from torch's; of vectors longer than 1, relative to their length."""
_NUM_TEXTS = 512
_NUM_ALONE = 8
"""So many of the texts are also encoded one by one: alone and in company they must be the same."""


@dataclass(frozen=True)
class ExportReport:
    """What `export_run` made."""

    folder: str
    facts: ExportFacts
    num_bytes: int
    """Of the graph."""
    seconds: float

    def render(self) -> str:
        """For a reader: what was made, and for int8 what it costs."""
        facts = self.facts
        lines = [
            f"{self.folder}: {facts.precision}, {self.num_bytes / 2**20:.1f} MB, made in {self.seconds:.1f} s; "
            f"float32 within {facts.difference:.1e} of torch on {facts.num_texts:,} texts; use it with --runtime onnx",
            facts.describe_loss(),
        ]
        return "\n".join(line for line in lines if line)


def export_run(run: str | Path, *, int8: bool = False, data: Dataset | None = None) -> ExportReport:
    """Write the query encoder of a run as an ONNX file beside the model.

    Args:
        run: the run folder, or the model folder in it.
        int8: quantise the weights; needs `data`.
        data: whose test queries the export is checked on; texts that the model keeps if left out.
    """
    started = time.monotonic()
    if int8 and data is None:
        raise UsageError("int8 changes predictions: give data with a test split to measure by how much (--data DATA)")
    folder = model_folder(run)
    # The fingerprint first: where the model is replaced meanwhile, the export is one that will be refused.
    fingerprint, predictor = encoder_fingerprint(folder), Predictor.load(folder, index="exact")
    model = predictor.model
    encoder, target = check_exportable(model.encoder), export_folder(folder)
    content = export_graph(encoder)
    facts = check_against_torch(model, content, _sample_texts(model, data), path=target, fingerprint=fingerprint)
    if int8 and data is not None:
        content = quantize_graph(content)
        facts = _measure_loss(predictor, content, data, facts, path=target)
    write_export(target, content, facts)
    return ExportReport(str(target), facts, len(content), time.monotonic() - started)


def check_against_torch(
    model: Model, content: bytes, texts: Sequence[str], *, path: Path, fingerprint: str
) -> ExportFacts:
    """Encode texts with a float32 graph and with torch; `ModelError` where they differ by more than `BAR`."""
    encoder = check_exportable(model.encoder)
    exported = replace(model, query_encoder=OnnxEncoder(content, encoder, precision="float32", path=path))
    wanted_ND = replace(model, query_encoder=None).encode_queries(texts)
    found_ND = exported.encode_queries(texts)
    alone_ND = torch.cat([exported.encode_queries([text]) for text in texts[:_NUM_ALONE]])
    difference = max(largest_difference(found_ND, wanted_ND), largest_difference(alone_ND, wanted_ND[: len(alone_ND)]))
    if not difference <= BAR:  # also where it is not a number
        raise ModelError(
            f"{path}: not made: on {len(texts)} texts the exported encoder differs from torch by up to "
            f"{difference:.1e}, expected at most {BAR:.0e}: predict with torch, which needs no export"
        )
    return ExportFacts(precision="float32", fingerprint=fingerprint, difference=difference, num_texts=len(texts))


def largest_difference(found_ND: Tensor, wanted_ND: Tensor) -> float:
    """Between the elements of vectors; of vectors longer than 1, relative to their length."""
    scale_N1 = wanted_ND.norm(dim=1, keepdim=True).clamp(min=1.0)
    return float(((found_ND - wanted_ND).abs() / scale_N1).max())


def _measure_loss(
    predictor: Predictor, content: bytes, data: Dataset, facts: ExportFacts, *, path: Path
) -> ExportFacts:
    """P@k of the test queries with torch and with the quantised graph, ranked as the run ranks them."""
    encoder, split = check_exportable(predictor.model.encoder), test_split(data)
    log.info("int8: measuring what it costs on %s test queries of %s", f"{len(split):,}", data.name)
    exported = OnnxEncoder(content, encoder, precision="int8", path=path)
    quantized = predictor.variant(model=replace(predictor.model, query_encoder=exported))
    places = max(int(name.partition("@")[2]) for name in METRICS) + overfetch(split.filtered)
    before, after = (predict_columns(each, data, split, places) for each in (predictor, quantized))
    found = compare(before, after, split, data.train.relevance)
    loss = {
        name: Loss(
            before=found.before[name],
            after=found.after[name],
            low=found.differences[name].low,
            high=found.differences[name].high,
        )
        for name in METRICS
    }
    return replace(facts, precision="int8", data=data.name, num_queries=found.num_queries, loss=loss)


def _sample_texts(model: Model, data: Dataset | None) -> list[str]:
    """Real texts to compare vectors on: test queries, else training queries that were kept, else label texts.

    With an empty text and one that fills the encoder's length, which are the ends of what it can get.
    """
    kept = model.training_queries
    texts: Sequence[str] = model.labels.texts
    if data is not None:
        texts = test_split(data).texts
    elif kept is not None and len(kept):
        texts = [kept.texts[int(row)] for row in _spread(len(kept))]
    chosen = [texts[int(row)] for row in _spread(len(texts))]
    return ["", " ".join(chosen)[:20_000], *chosen]


def _spread(number: int) -> np.ndarray:
    """At most `_NUM_TEXTS` places all over a list."""
    return np.unique(np.linspace(0, number - 1, min(number, _NUM_TEXTS)).astype(np.int64))
