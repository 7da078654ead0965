"""Export the query encoder of a run as an ONNX file beside the model, after comparing it with torch.

A float32 graph is refused if a vector differs from torch's by more than 1e-5. An int8 graph is made only with data to
evaluate it on, and the change of P@k is stored with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dexter.data import Dataset
from dexter.encoders.onnx import (
    INT8_METRICS,
    ExportFacts,
    MetricChange,
    OnnxEncoder,
    check_exportable,
    export_folder,
    export_graph,
    quantize_graph,
    write_export,
)
from dexter.errors import ModelError, UsageError
from dexter.evaluation.report import compare, test_split
from dexter.evaluation.runs import predict_columns
from dexter.metrics import overfetch
from dexter.model.model import Model
from dexter.model.published import encoder_fingerprint, model_folder
from dexter.predict.predictor import Predictor

log = logging.getLogger("dexter")
MAX_DIFFERENCE = 1e-5
"""Largest accepted difference of a vector's element from torch's; relative for vectors longer than 1."""
_NUM_TEXTS = 512
_NUM_ALONE = 8
"""Number of texts that are also encoded one by one: batching must not change a vector."""


@dataclass(frozen=True)
class ExportReport:
    """Result of `export_run`."""

    folder: str
    facts: ExportFacts
    num_bytes: int
    """Size of the graph."""
    seconds: float

    def render(self) -> str:
        """Format the result for a reader, with the effect of int8."""
        facts = self.facts
        lines = [
            f"{self.folder}: {facts.precision}, {self.num_bytes / 2**20:.1f} MB, made in {self.seconds:.1f} s; "
            f"float32 within {facts.difference:.1e} of torch on {facts.num_texts:,} texts; use it with --runtime onnx",
            facts.describe_changes(),
        ]
        return "\n".join(line for line in lines if line)


def export_run(run: str | Path, *, int8: bool = False, data: Dataset | None = None) -> ExportReport:
    """Write the query encoder of a run as an ONNX file beside the model.

    Args:
        run: the run folder, or the model folder in it.
        int8: quantise the weights; needs `data`.
        data: the export is compared on its test queries; without it, on texts stored with the model.
    """
    started = time.monotonic()
    if int8 and data is None:
        raise UsageError("int8 changes predictions: give data with a test split to measure by how much (--data DATA)")
    folder = model_folder(run)
    # The fingerprint first: if the model is replaced meanwhile, the export will be refused when opened.
    fingerprint, predictor = encoder_fingerprint(folder), Predictor.load(folder, index="exact")
    model = predictor.model
    encoder, target = check_exportable(model.encoder), export_folder(folder)
    content = export_graph(encoder)
    facts = check_against_torch(model, content, _sample_texts(model, data), path=target, fingerprint=fingerprint)
    if int8 and data is not None:
        content = quantize_graph(content)
        facts = _evaluate_int8(predictor, content, data, facts, path=target)
    write_export(target, content, facts)
    return ExportReport(str(target), facts, len(content), time.monotonic() - started)


def check_against_torch(
    model: Model, content: bytes, texts: Sequence[str], *, path: Path, fingerprint: str
) -> ExportFacts:
    """Encode texts with a float32 graph and with torch; raise `ModelError` if they differ by more than the limit."""
    encoder = check_exportable(model.encoder)
    exported = replace(model, query_encoder=OnnxEncoder(content, encoder, precision="float32", path=path))
    wanted_ND = replace(model, query_encoder=None).encode_queries(texts)
    found_ND = exported.encode_queries(texts)
    alone_ND = np.concatenate([exported.encode_queries([text]) for text in texts[:_NUM_ALONE]])
    difference = max(largest_difference(found_ND, wanted_ND), largest_difference(alone_ND, wanted_ND[: len(alone_ND)]))
    if not difference <= MAX_DIFFERENCE:  # also raises if it is not a number
        raise ModelError(
            f"{path}: not made: on {len(texts)} texts the exported encoder differs from torch by up to "
            f"{difference:.1e}, expected at most {MAX_DIFFERENCE:.0e}: predict with torch, which needs no export"
        )
    return ExportFacts(precision="float32", fingerprint=fingerprint, difference=difference, num_texts=len(texts))


def largest_difference(found_ND: NDArray[np.float32], wanted_ND: NDArray[np.float32]) -> float:
    """Return the largest difference between elements of vectors; relative for vectors longer than 1."""
    scale_N1 = np.maximum(np.linalg.norm(wanted_ND, axis=1, keepdims=True), 1.0)
    return float((np.abs(found_ND - wanted_ND) / scale_N1).max())


def _evaluate_int8(
    predictor: Predictor, content: bytes, data: Dataset, facts: ExportFacts, *, path: Path
) -> ExportFacts:
    """Compare P@k of the test queries with torch and with the quantised graph, ranked as the run ranks them."""
    data = predictor.own_labels.filter_test(data)
    encoder, split = check_exportable(predictor.model.encoder), test_split(data)
    log.info("int8: measuring its effect on %s test queries of %s", f"{len(split):,}", data.name)
    exported = OnnxEncoder(content, encoder, precision="int8", path=path)
    quantized = predictor.variant(model=replace(predictor.model, query_encoder=exported))
    places = max(int(name.partition("@")[2]) for name in INT8_METRICS) + overfetch(split.filtered)
    before, after = (predict_columns(each, data, split, places) for each in (predictor, quantized))
    found = compare(before, after, split, data.train.relevance, propensity=data.propensity)
    changes = {
        name: MetricChange(
            before=found.before[name],
            after=found.after[name],
            low=found.differences[name].low,
            high=found.differences[name].high,
        )
        for name in INT8_METRICS
    }
    return replace(facts, precision="int8", data=data.name, num_queries=found.num_queries, changes=changes)


def _sample_texts(model: Model, data: Dataset | None) -> list[str]:
    """Return real texts to compare vectors on: test queries, else stored training queries, else label texts.

    An empty text and one that exceeds the encoder's length are added.
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
    """Return at most `_NUM_TEXTS` evenly spaced positions in a list."""
    return np.unique(np.linspace(0, number - 1, min(number, _NUM_TEXTS)).astype(np.int64))
