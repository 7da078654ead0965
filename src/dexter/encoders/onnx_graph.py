"""A transformer encoder as an ONNX graph: padded token ids in, vectors out.

    input_ids, attention_mask   int64 [texts, tokens], both sizes free; the mask is 1 for tokens and 0 for padding
    sentence_embedding          float32 [texts, dimension]

Pooling, projection and normalisation are part of the graph, tokenising is not. All weights are inside the one file.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dexter.encoders.packing import Pooling, pool_padded
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import UsageError, require

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "sentence_embedding"
_MOST_BYTES = 2**31 - 2**24
"""A protobuf message ends at 2 GiB; some of it goes to the graph itself."""


def export_graph(encoder: TransformerEncoder) -> bytes:
    """The ONNX file of an encoder, in float32."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="onnx", purpose="the export to ONNX")
    num_bytes = sum(4 * parameter.numel() for parameter in encoder.parameters())
    if num_bytes > _MOST_BYTES:
        raise UsageError(f"the encoder has {num_bytes:,} bytes of weights: an ONNX file holds at most {_MOST_BYTES:,}")
    module = _PaddedEncoder(encoder)
    # Neither size is 0 or 1, which tracing takes for constants, and there is padding, so that the mask is in the graph.
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
    return _without_notes(program.model_proto)


def quantize_graph(content: bytes) -> bytes:
    """The same with the weights of its matrix products in 8 bits, and activations scaled to 8 bits batch by batch.

    Weights take 7 of the 8 bits: sums of full products overflow on processors without VNNI, so that a graph would lose
    more on one machine than was measured on another. (Unsigned weights avoid that too, and gain no time.)
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
    """What `TransformerEncoder.forward` does on padded rows, in operations that ONNX has."""

    def __init__(self, encoder: TransformerEncoder) -> None:
        super().__init__()
        encoder.attend_plainly()
        self.model = encoder.model
        self.projection = encoder.projection
        self.first_position = encoder.first_position
        self.normalize = bool(encoder.layout.normalize)
        assert encoder.layout.pooling is not None
        self.pooling: Pooling = encoder.layout.pooling
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Vectors of padded texts."""
        places: dict[str, Tensor] = {}
        if self.first_position is not None:
            # Counted, as in packed batches: some architectures else take a padding token within a text for its end.
            places["position_ids"] = torch.arange(input_ids.shape[1])[None] + self.first_position
        states_NLD = self.model(input_ids=input_ids, attention_mask=attention_mask, **places).last_hidden_state
        vectors_ND: Tensor = self.projection(pool_padded(states_NLD, attention_mask, self.pooling)).float()
        return functional.normalize(vectors_ND, dim=-1) if self.normalize else vectors_ND


def _without_notes(model: Any) -> bytes:
    """The file without the exporter's notes, which hold paths of this machine."""
    del model.metadata_props[:]
    # Shapes in between are found again by every reader; those of weights mislead the quantiser, which transposes some.
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
    """Keep the exporter's remarks on its own workings off the screen.

    The quantiser logs by `logging.warning`, which would give the root logger a handler for good if it has none.
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
