"""Products, linear layers and their gradients are the same by both libraries."""

import pytest
import torch

from dexter import products
from dexter.encoders.transformer import TransformerEncoder
from dexter.products import add_product, product


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def by_onednn(request, monkeypatch):
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 33, 5), (130, 48, 257), (0, 4, 3), (3, 4, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("by_onednn")
def test_products_agree_with_float64(shape, dtype):
    rows, inner, columns = shape
    left, right = torch.randn(inner, rows, dtype=dtype).T, torch.randn(columns, inner, dtype=dtype).T
    expected = left.double() @ right.double()
    exactness = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(
        product(left, right, out=torch.empty(rows, columns, dtype=dtype)), expected.to(dtype), **exactness
    )
    total = torch.randn(rows, columns, dtype=dtype)
    before = total.double().clone()
    add_product(total, left.contiguous(), right.contiguous())
    torch.testing.assert_close(total, (before + expected).to(dtype), **exactness)


@pytest.mark.parametrize(
    ("capability", "maker", "expected"),
    [
        ("AVX512", "AuthenticAMD", True),
        ("AVX512", "GenuineIntel", False),
        ("AVX2", "AuthenticAMD", False),
        ("DEFAULT", None, False),
    ],
)
def test_the_processor_decides(capability, maker, expected, monkeypatch, tmp_path):
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    described = tmp_path / "cpuinfo"
    if maker is not None:
        described.write_text(f"processor\t: 0\nvendor_id\t: {maker}\n")
    monkeypatch.setattr(products, "_CPU_INFO", described)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.onednn_is_faster.__wrapped__() is expected


@pytest.mark.usefixtures("by_onednn")
def test_a_transformer_has_the_vectors_and_gradients_of_padded_batches():
    texts = ["amber birch copper", "delta", "ember fern garnet amber delta", "fern copper"]
    encoder = TransformerEncoder.random(texts, projection=7)
    tokens = encoder.tokenize(texts, side="query")
    weights = torch.randn(len(texts), 7)
    found = []
    for packed in (True, False):  # only packed batches choose a library
        encoder.packed = packed
        encoder.zero_grad()
        vectors = encoder(torch.from_numpy(tokens.ids.astype("int64")), torch.from_numpy(tokens.offsets))
        (vectors * weights).sum().backward()
        gradients = [each.grad.clone() for each in encoder.parameters() if each.grad is not None]
        found.append([vectors.detach(), *gradients])
    assert len(found[0]) > 20
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
