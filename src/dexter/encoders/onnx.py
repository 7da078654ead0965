"""A transformer encoder as an ONNX graph: export, quantisation, inference with ONNX Runtime, and the export's folder.

The graph takes padded token ids and returns vectors; pooling, projection and normalisation are part of it, tokenising
is not. All weights are in the one file.

    input_ids, attention_mask   int64 [texts, tokens], both sizes free; the mask is 1 for tokens and 0 for padding
    sentence_embedding          float32 [texts, dimension]

The folder of an export contains:

    encoder.onnx    the graph
    export.json     format version, precision, fingerprint of the encoder, measured differences
    MANIFEST.json   SHA-256 of both, written last

A graph may come from anyone and is parsed by a large library. Before ONNX Runtime reads it, it is checked for anything
but standard operators with weights in the same file (no external data, functions, loops or branches).
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dexter.data.tokens import Tokens
from dexter.encoders import TextEncoder
from dexter.encoders.folder import Pooling
from dexter.encoders.packing import pad, pool_padded
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import ModelError, UsageError, require
from dexter.files import atomic_folder, read_sealed, write_json

Precision = Literal["float32", "int8"]
INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_embedding"
INT8_METRICS = ("P@1", "P@3", "P@5")
"""Metrics that int8 is evaluated by."""
FORMAT_VERSION = 2
REMEDY = "make it anew with `dexter export`"
_GRAPH, _DESCRIPTION = "encoder.onnx", "export.json"
_STANDARD_DOMAINS = ("", "ai.onnx")
_MOST_BYTES = 2**31 - 2**24
"""A protobuf message ends at 2 GiB; some of it is needed for the graph itself."""


def check_exportable(encoder: TextEncoder) -> TransformerEncoder:
    """Return the encoder if it is a transformer; raise `UsageError` otherwise."""
    if not isinstance(encoder, TransformerEncoder):
        raise UsageError(
            "this run has a static encoder, which looks its tokens up in a table: ONNX is for transformers, and would "
            "make nothing faster here"
        )
    return encoder


def export_graph(encoder: TransformerEncoder) -> bytes:
    """Return the ONNX file of an encoder, in float32."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="onnx", purpose="the export to ONNX")
    num_bytes = sum(4 * parameter.numel() for parameter in encoder.parameters())
    if num_bytes > _MOST_BYTES:
        raise UsageError(f"the encoder has {num_bytes:,} bytes of weights: an ONNX file holds at most {_MOST_BYTES:,}")
    module = _PaddedEncoder(encoder)
    # No size is 0 or 1, which tracing takes for constants, and there is padding, so that the mask enters the graph.
    ids_NL, mask_NL = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 0, 0]])
    sizes = {0: "texts", 1: "tokens"}
    with _quiet(), torch.inference_mode():
        program = torch.onnx.export(
            module,
            (ids_NL, mask_NL),
            dynamo=True,
            input_names=list(INPUTS),
            output_names=[OUTPUT],
            dynamic_shapes=(sizes, sizes),
            external_data=False,
            verbose=False,
        )
    assert program is not None
    return _strip_metadata(program.model_proto)


def quantize_graph(content: bytes) -> bytes:
    """Return a graph with the weights of its matrix products in int8, and activations scaled to int8 per batch.

    Weights use 7 of the 8 bits: on processors without VNNI sums of full products overflow, so that a graph would lose
    more on one machine than was measured on another. (Unsigned weights avoid that too, and are not faster.)
    """
    import onnx

    with _quiet(), tempfile.TemporaryDirectory(prefix="dexter-onnx-") as folder:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        target = Path(folder) / "quantized.onnx"
        quantize_dynamic(
            onnx.load_model_from_string(content),
            target,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        return target.read_bytes()


class _PaddedEncoder(nn.Module):
    """`TransformerEncoder.forward` on padded rows, in operations that ONNX has."""

    def __init__(self, encoder: TransformerEncoder) -> None:
        super().__init__()
        encoder.use_eager_attention()
        self.model = encoder.model
        self.projection = encoder.projection
        self.first_position = encoder.first_position
        self.normalize = bool(encoder.settings.normalize)
        assert encoder.settings.pooling is not None
        self.pooling: Pooling = encoder.settings.pooling
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed padded texts."""
        positions: dict[str, Tensor] = {}
        if self.first_position is not None:
            # Counted as in packed batches: otherwise some architectures take a padding token within a text for its end.
            positions["position_ids"] = torch.arange(input_ids.shape[1])[None] + self.first_position
        states_NLD = self.model(input_ids=input_ids, attention_mask=attention_mask, **positions).last_hidden_state
        vectors_ND: Tensor = self.projection(pool_padded(states_NLD, attention_mask, self.pooling)).float()
        return functional.normalize(vectors_ND, dim=-1) if self.normalize else vectors_ND


def _strip_metadata(model: Any) -> bytes:
    """Return the file without the exporter's metadata, which contain paths of this machine."""
    del model.metadata_props[:]
    # Readers infer shapes again; those stored for weights mislead the quantiser, which transposes some weights.
    del model.graph.value_info[:]
    for part in (*model.graph.node, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
        part.doc_string = ""
    for tensor in model.graph.initializer:
        del tensor.metadata_props[:]
    del model.graph.metadata_props[:]
    model.graph.doc_string = model.doc_string = ""
    return bytes(model.SerializeToString(deterministic=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's warnings and log lines.

    The quantiser calls `logging.warning`, which would permanently add a handler to a root logger without any.
    """
    root, handler, disabled = logging.getLogger(), logging.NullHandler(), logging.root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.removeHandler(handler)


class OnnxEncoder:
    """Embeds tokenised queries with ONNX Runtime on a CPU, in the micro-batches of the encoder it was exported from."""

    def __init__(self, content: bytes, encoder: TransformerEncoder, *, precision: Precision, path: Path) -> None:
        """Open a graph; `content` are its bytes, `path` names it in errors."""
        self.precision: Precision = precision
        self._encoder, self._path = encoder, path
        runtime = require("onnxruntime", extra="onnx", purpose="encoding with ONNX Runtime")
        check_graph(content, path)
        try:
            self._session = runtime.InferenceSession(content, _options(runtime), providers=["CPUExecutionProvider"])
        except Exception as error:  # the library's errors have no common class
            raise _refused(path, error) from None
        self._check_signature()

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """Embed texts: [len(tokens), dimension], float32, in the order of the tokens."""
        output_ND = np.empty((len(tokens), self._encoder.dimension), dtype=np.float32)
        for rows in self._encoder.micro_batches(tokens.lengths):
            output_ND[rows] = self._run(*tokens.select(rows))
        return output_ND

    def _run(self, ids: NDArray[np.integer], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
        ids_T = torch.from_numpy(ids.astype(np.int64))
        ids_NL, mask_NL = pad(ids_T, torch.from_numpy(offsets), self._encoder.padding_id)
        inputs = dict(zip(INPUTS, (ids_NL.numpy(), mask_NL.long().numpy()), strict=True))
        try:
            vectors_ND: NDArray[np.float32] = self._session.run([OUTPUT], inputs)[0]
        except Exception as error:  # the library's errors have no common class
            raise _refused(self._path, error) from None
        if vectors_ND.shape != (len(ids_NL), self._encoder.dimension) or not np.isfinite(vectors_ND).all():
            raise ModelError(f"{self._path}: the graph gave no vectors of this model: {REMEDY}")
        return vectors_ND

    def _check_signature(self) -> None:
        """Raise unless the graph's inputs and outputs are those of an export of this encoder."""
        inputs = [(each.name, each.type, len(each.shape)) for each in self._session.get_inputs()]
        outputs = [(each.name, each.type, each.shape[1:]) for each in self._session.get_outputs()]
        wanted = [(name, "tensor(int64)", 2) for name in INPUTS]
        if sorted(inputs) != sorted(wanted) or outputs != [(OUTPUT, "tensor(float)", [self._encoder.dimension])]:
            raise ModelError(
                f"{self._path}: inputs {inputs} and outputs {outputs} are not those of an export: {REMEDY}"
            )


def check_graph(content: bytes, path: Path) -> None:
    """Raise `ModelError` if a graph refers to other files or code, or contains functions, loops or branches."""
    onnx = require("onnx", extra="onnx", purpose="encoding with ONNX Runtime")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's errors have no common class
        raise ModelError(f"{path}: not an ONNX file ({type(error).__name__}): {REMEDY}") from None
    unsafe = next(_unsafe_parts(onnx, model), None)
    if unsafe is not None:
        raise ModelError(f"{path}: {unsafe}, which no export has: {REMEDY}")


def _unsafe_parts(onnx: Any, model: Any) -> Iterator[str]:
    """Yield a description of every part that no export contains."""
    if model.functions or model.training_info or model.graph.sparse_initializer:
        yield "the graph has functions, training steps or sparse weights"
    tensors = list(model.graph.initializer)
    for node in model.graph.node:
        if node.domain not in _STANDARD_DOMAINS:
            yield f"operator {node.domain[:40]!r}.{node.op_type[:40]!r} is not of the standard"
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor"):
                yield f"operator {node.op_type[:40]!r} has a graph of its own"
            tensors += [attribute.t, *attribute.tensors]
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data for tensor in tensors):
        yield "weights are in another file"


def _options(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    # OMP_NUM_THREADS does not limit its threads: take as many as torch, and let none of them wait by spinning.
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Never the library's other format, which was not checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.log_severity_level = 3
    return options


def _refused(path: Path, error: Exception) -> ModelError:
    """Return the error for a graph that ONNX Runtime does not accept."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ModelError(f"{path}: ONNX Runtime refuses this graph ({reason[:200]}): {REMEDY}")


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A metric before and after quantisation, in percent."""

    before: float
    after: float
    low: float
    """Limits of the 95% confidence interval of the difference."""
    high: float

    @property
    def difference(self) -> float:
        """After minus before: negative if int8 is worse."""
        return self.after - self.before

    def describe(self) -> str:
        """Format before, after, the difference and its interval."""
        return f"{self.before:.2f} -> {self.after:.2f} ({self.difference:+.2f}, [{self.low:+.2f}, {self.high:+.2f}])"


@dataclass(frozen=True, kw_only=True)
class ExportFacts:
    """Description of an export, stored beside its graph."""

    precision: Precision
    fingerprint: str
    """Fingerprint of the encoder that was exported."""
    difference: float
    """Largest difference between a vector of the float32 graph and torch's; relative for vectors longer than 1."""
    num_texts: int
    """Number of texts that the difference was measured on."""
    data: str | None = None
    """Data set whose test queries int8 was evaluated on."""
    num_queries: int = 0
    changes: Mapping[str, MetricChange] | None = None
    """Effect of int8 by metric; None for float32."""

    def describe_changes(self) -> str:
        """Format the effect of int8 as one line; empty for float32."""
        if not self.changes:
            return ""
        parts = [f"{name} {change.describe()}" for name, change in self.changes.items()]
        return f"int8 on {self.num_queries:,} test queries of {self.data!r}: {', '.join(parts)}"


def export_folder(folder: Path) -> Path:
    """Return the folder of a model's export: run/onnx for run/model, NAME-onnx for a model folder on its own."""
    folder = folder.resolve()
    return folder.with_name("onnx" if folder.name == "model" else f"{folder.name}-onnx")


def write_export(folder: Path, content: bytes, facts: ExportFacts) -> None:
    """Write an export atomically, replacing an older one."""
    with atomic_folder(folder, replace=True) as temporary:
        (temporary / _GRAPH).write_bytes(content)
        write_json(temporary / _DESCRIPTION, {"format_version": FORMAT_VERSION, **asdict(facts)})


def open_export(folder: Path, encoder: TransformerEncoder, *, fingerprint: str) -> tuple[OnnxEncoder, ExportFacts]:
    """Open the export of the encoder with this fingerprint; checksums are verified before anything is parsed."""
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
    """Read and check the description of an export."""
    path = folder / _DESCRIPTION
    content = read_sealed(folder, _DESCRIPTION)
    try:
        described = json.loads(content)
        version = described.pop("format_version")
        if version != FORMAT_VERSION:
            raise ModelError(f"{path}: format version {version!r}, this program reads {FORMAT_VERSION}: {REMEDY}")
        changes = {
            name: MetricChange(**{key: float(value) for key, value in change.items()})
            for name, change in (described.pop("changes") or {}).items()
        }
        facts = ExportFacts(**described, changes=changes or None)
        expected = INT8_METRICS if facts.precision == "int8" else ()
        if facts.precision not in get_args(Precision) or tuple(changes) != expected:
            raise ValueError(f"precision {facts.precision!r} with {len(changes)} measured metrics")
        facts.describe_changes()
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: not the description of an export ({str(error)[:200]!r}): {REMEDY}") from None
    return facts
