"""Queries encoded by ONNX Runtime on a CPU, in the encoder's own micro-batches, longest texts first.

A graph is data from anyone, read by a large library: before that gets to see it, it is checked to be one file without
ways out of it (external data, functions, loops and branches, operators of others).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.data.tokens import Tokens
from dexter.encoders.onnx_graph import INPUTS, OUTPUT
from dexter.encoders.packing import pad
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import ModelError, require

Precision = Literal["float32", "int8"]
_STANDARD = ("", "ai.onnx")


class OnnxEncoder:
    """Embeds tokenised queries through an ONNX graph; cuts and pads them as the encoder it was made from."""

    def __init__(self, content: bytes, encoder: TransformerEncoder, *, precision: Precision, path: Path) -> None:
        """`content` is the graph, `path` what errors call it."""
        self.precision: Precision = precision
        """Of the weights."""
        self._encoder, self._path = encoder, path
        runtime = require("onnxruntime", extra="onnx", purpose="encoding with ONNX Runtime")
        check_graph(content, path)
        try:
            self._session = runtime.InferenceSession(content, _options(runtime), providers=["CPUExecutionProvider"])
        except Exception as error:  # the library's errors have no common class
            raise _refused(path, error) from None
        self._check_signature()

    def embed(self, tokens: Tokens) -> Tensor:
        """The vectors of texts, [len(tokens), dimension], float32, in their order."""
        output_ND = np.empty((len(tokens), self._encoder.dimension), dtype=np.float32)
        for rows in self._encoder.micro_batches(tokens.lengths):
            output_ND[rows] = self._run(*tokens.select(rows))
        return torch.from_numpy(output_ND)

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
        """Hold the graph's inputs and outputs against those of an export."""
        inputs = [(each.name, each.type, len(each.shape)) for each in self._session.get_inputs()]
        outputs = [(each.name, each.type, each.shape[1:]) for each in self._session.get_outputs()]
        wanted = [(name, "tensor(int64)", 2) for name in INPUTS]
        if sorted(inputs) != sorted(wanted) or outputs != [(OUTPUT, "tensor(float)", [self._encoder.dimension])]:
            raise ModelError(
                f"{self._path}: inputs {inputs} and outputs {outputs} are not those of an export: {REMEDY}"
            )


REMEDY = "make it anew with `dexter export`"


def check_graph(content: bytes, path: Path) -> None:
    """Raise `ModelError` unless a graph is of one piece: nothing in it leads to other files, code or repetition."""
    onnx = require("onnx", extra="onnx", purpose="encoding with ONNX Runtime")
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's errors have no common class
        raise ModelError(f"{path}: not an ONNX file ({type(error).__name__}): {REMEDY}") from None
    problem = next(_problems(onnx, model), None)
    if problem is not None:
        raise ModelError(f"{path}: {problem}, which no export has: {REMEDY}")


def _problems(onnx: Any, model: Any) -> Iterator[str]:
    if model.functions or model.training_info or model.graph.sparse_initializer:
        yield "the graph has functions, training steps or sparse weights"
    tensors = list(model.graph.initializer)
    for node in model.graph.node:
        if node.domain not in _STANDARD:
            yield f"operator {node.domain[:40]!r}.{node.op_type[:40]!r} is not of the standard"
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs or attribute.HasField("sparse_tensor"):
                yield f"operator {node.op_type[:40]!r} has a graph of its own"
            tensors += [attribute.t, *attribute.tensors]
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data for tensor in tensors):
        yield "weights are in another file"


def _options(runtime: Any) -> Any:
    options = runtime.SessionOptions()
    # Its own threads, which OMP_NUM_THREADS does not bound: as many as torch has, none of them waiting by spinning.
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Never the library's other format, which was not looked at.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.log_severity_level = 3
    return options


def _refused(path: Path, error: Exception) -> ModelError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ModelError(f"{path}: ONNX Runtime refuses this graph ({reason[:200]}): {REMEDY}")
