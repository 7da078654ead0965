"""The ONNX graph of an encoder: equal to torch, free sizes, padding without effect; hostile graphs refused."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.encoders.test_transformer import TEXTS, encoder_of, small_encoder

from dexter.encoders import embed
from dexter.errors import ModelError, ResourceError

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnxscript", reason="the extra onnx is not installed")

from dexter.encoders.onnx import INPUTS, OUTPUT, OnnxEncoder, check_graph, export_graph, quantize_graph  # noqa: E402

PATH = Path("encoder.onnx")
HARD = [*TEXTS, "read [PAD] two words", "[PAD]", "x " * 500]


@pytest.fixture(scope="module")
def encoder():
    return small_encoder(projection=7, num_layers=1, max_length_query=40)


@pytest.fixture(scope="module")
def graph(encoder):
    return export_graph(encoder)


def exported(encoder, graph):
    return OnnxEncoder(graph, encoder, precision="float32", path=PATH)


def assert_equal_to_torch(encoder, graph, texts=HARD):
    tokens = encoder.tokenize(texts, side="query")
    difference = np.abs(exported(encoder, graph).embed(tokens) - embed(encoder, tokens).numpy()).max()
    assert difference <= 1e-5


def test_vectors_are_those_of_torch(encoder, graph):
    assert_equal_to_torch(encoder, graph)
    for text in HARD:
        assert_equal_to_torch(encoder, graph, [text])


def test_padding_changes_nothing(encoder, graph):
    tokens = encoder.tokenize(HARD, side="query")
    alone = torch.cat([embed(encoder, encoder.tokenize([text], side="query")) for text in HARD])
    encoder.tokens_per_batch = 10_000
    together = exported(encoder, graph).embed(tokens)
    encoder.tokens_per_batch = None
    assert len(set(tokens.lengths)) > 3
    np.testing.assert_allclose(together, alone.numpy(), atol=1e-5, rtol=0)


def test_both_sizes_are_free(encoder, graph):
    model = onnx.load_model_from_string(graph)
    for each in model.graph.input:
        assert [size.dim_param for size in each.type.tensor_type.shape.dim] == ["texts", "tokens"]
    session = exported(encoder, graph)._session
    for shape in ((1, 1), (1, 40), (13, 1), (5, 17)):
        ids = np.full(shape, 3, dtype=np.int64)
        [vectors] = session.run([OUTPUT], {INPUTS[0]: ids, INPUTS[1]: np.ones_like(ids)})
        assert vectors.shape == (shape[0], 7)


def test_no_text_gives_no_vector(encoder, graph):
    assert exported(encoder, graph).embed(encoder.tokenize([], side="query")).shape == (0, 7)


def test_the_encoder_is_as_before(encoder, graph):
    untouched = small_encoder(projection=7, num_layers=1, max_length_query=40)
    tokens = encoder.tokenize(TEXTS, side="query")
    assert torch.equal(embed(encoder, tokens), embed(untouched, tokens))


def test_the_graph_names_no_place_of_this_machine(graph):
    assert b"site-packages" not in graph
    assert b".py" not in graph


def test_int8_is_smaller_and_near(encoder, graph):
    quantized = quantize_graph(graph)
    assert len(quantized) < len(graph)
    tokens = encoder.tokenize(TEXTS, side="query")
    vectors = torch.from_numpy(exported(encoder, quantized).embed(tokens))
    near = torch.cosine_similarity(vectors, embed(encoder, tokens))
    assert 0.95 < near.min() < 0.9999999


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["distilbert", "roberta", "xlm-roberta", "mpnet"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_other_architectures(architecture, pooling):
    encoder = encoder_of(architecture)
    previous = encoder.settings.pooling
    object.__setattr__(encoder.settings, "pooling", pooling)
    try:
        assert_equal_to_torch(encoder, export_graph(encoder), TEXTS)
    finally:
        object.__setattr__(encoder.settings, "pooling", previous)


def weights_elsewhere(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")


def weights_elsewhere_unsaid(model):
    model.graph.initializer[0].external_data.add(key="location", value="weights.bin")


def weights_elsewhere_in_a_constant(model):
    tensor = onnx.TensorProto(data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    model.graph.node.append(onnx.helper.make_node("Constant", [], ["elsewhere"], value=tensor))


def operator_of_others(model):
    model.graph.node.append(onnx.helper.make_node("EPContext", [], ["x"], domain="com.microsoft"))


def branch(model):
    inner = onnx.helper.make_graph([], "inner", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["c"], ["x"], then_branch=inner, else_branch=inner))


def function(model):
    model.functions.append(onnx.FunctionProto(name="f", domain="mine"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (weights_elsewhere, "weights are in another file"),
        (weights_elsewhere_unsaid, "weights are in another file"),
        (weights_elsewhere_in_a_constant, "weights are in another file"),
        (operator_of_others, "not of the standard"),
        (branch, "graph of its own"),
        (function, "functions"),
    ],
)
def test_a_graph_with_a_way_out_is_refused(graph, change, named):
    model = onnx.load_model_from_string(graph)
    change(model)
    with pytest.raises(ModelError, match=named):
        check_graph(model.SerializeToString(), PATH)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"<html>404</html>", b"\0\0\0\0ORTM" + bytes(100)])
def test_what_is_no_graph_is_refused(encoder, content):
    with pytest.raises(ModelError) as caught:
        exported(encoder, content)
    assert "\n" not in str(caught.value)


def test_a_graph_of_another_size_is_refused(graph):
    with pytest.raises(ModelError, match="not those of an export"):
        exported(small_encoder(projection=8, num_layers=1), graph)


def test_weights_that_are_not_finite_are_noticed(encoder, graph):
    model = onnx.load_model_from_string(graph)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2:
            tensor.raw_data = np.full(tensor.dims, np.nan, dtype=np.float32).tobytes()
    with pytest.raises(ModelError, match="gave no vectors of this model"):
        exported(encoder, model.SerializeToString()).embed(encoder.tokenize(TEXTS, side="query"))


@pytest.mark.parametrize("module", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_names_its_extra(encoder, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ResourceError, match=rf"'{module}'.*dexter-xmc\[onnx\]"):
        export_graph(encoder)


def test_a_missing_runtime_names_its_extra(encoder, graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ResourceError, match=r"pip install 'dexter-xmc\[onnx\]'"):
        exported(encoder, graph)
