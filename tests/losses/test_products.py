"""The products of losses are the same by both libraries, and exactly those where one does not apply."""

import pytest
import torch

from dexter.losses import products
from dexter.losses.products import add_product, product


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


def test_one_measurement_serves_a_process():
    assert products.onednn_is_faster() == products.onednn_is_faster()
    assert products.onednn_is_faster.cache_info().misses == 1
