from __future__ import annotations

import pytest
import torch

from penstock.kernels import linear as linear_module
from penstock.kernels.linear import gated_linear, has_bfloat16, linear, packed
from penstock.kernels.linear_triton import multiply
from penstock.kernels.norm import add_norm


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("biased", [False, True])
def test_reference(biased: bool) -> None:
    x, weight = torch.randn(5, 24), torch.randn(12, 24)
    bias = torch.randn(12) if biased else None
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(linear(x, weight, bias).double(), product, rtol=1e-5, atol=1e-5)
    gate, up = product.chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(gated_linear(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights(dtype: torch.dtype, biased: bool) -> None:
    weight = torch.randn(24, 40, dtype=dtype)
    bias = torch.randn(24, dtype=dtype) if biased else None
    operand = packed(weight)
    assert operand.is_mkldnn == (dtype is torch.float32 or has_bfloat16())
    for rows in (0, 1, 5, 64):
        wide = torch.randn(rows, 80, dtype=dtype)
        for x in (wide[:, :40].contiguous(), wide[:, :40], wide[:, ::2]):
            found = linear(x, operand, bias)
            assert found.shape == (rows, 24)
            assert found.dtype == dtype
            torch.testing.assert_close(found, linear(x, weight, bias))
            torch.testing.assert_close(gated_linear(x, operand, bias), gated_linear(x, weight, bias))


def test_types_that_onednn_lacks_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 8)
    assert packed(weight.double()).is_mkldnn is False
    monkeypatch.setattr(linear_module, "has_bfloat16", lambda: False)
    assert packed(weight.bfloat16()).is_mkldnn is False
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert packed(weight) is weight


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "inputs"), [(1024, 2048), (6144, 4096), (4096, 14336), (1000, 1000), (30, 14)])
def test_a_gpu_gives_the_product(width: int, inputs: int, dtype: torch.dtype) -> None:
    eps = max(torch.finfo(dtype).eps, 1e-5)  # sums of many numbers, in single precision themselves
    weight, bias = torch.randn(2 * width, inputs).mul_(inputs**-0.5).to(dtype).cuda(), torch.randn(2 * width).to(dtype)
    bias = bias.cuda()
    torch.cuda.synchronize()
    for rows in (1, 2, 8, 13, 64, 100, 256, 300):
        x = torch.randn(rows, inputs).to(dtype).cuda()
        product = x.double() @ weight.double().T + bias.double()
        gate, up = product.to(dtype).double().chunk(2, dim=1)
        for invariant in (False, True):
            found = linear(x, weight, bias, invariant=invariant)
            torch.testing.assert_close(found.double(), product, rtol=4 * eps, atol=16 * eps)
            found = gated_linear(x, weight, bias, invariant=invariant)
            torch.testing.assert_close(found.double(), gate * gate.sigmoid() * up, rtol=8 * eps, atol=32 * eps)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("width", "inputs"), [(1024, 2048), (6144, 4096), (4096, 14336)])
def test_invariant_rows_have_the_same_bits(width: int, inputs: int, gated: bool) -> None:
    weight = torch.randn(2 * width, inputs, device="cuda").mul_(inputs**-0.5).bfloat16()
    x = torch.randn(2048, inputs, device="cuda").bfloat16()
    torch.cuda.synchronize()
    whole = multiply(x, weight, None, gated=gated, invariant=True)
    for rows in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 128, 129, 255, 256, 257, 300, 513, 1024):
        for first in (0, 2048 - rows):
            part = slice(first, first + rows)
            assert torch.equal(multiply(x[part], weight, None, gated=gated, invariant=True), whole[part]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 48, 200])
def test_a_graph_gives_what_calls_give(rows: int, invariant: bool) -> None:
    """A chain of kernels that overlap each other, replayed many times over on inputs that change."""
    hidden, inner = 1024, 3072
    weights = [torch.randn(2 * inner, hidden), torch.randn(hidden, inner)]
    gate_up, down = (weight.mul_(weight.shape[1] ** -0.5).bfloat16().cuda() for weight in weights)
    norm, x = torch.ones(hidden, dtype=torch.bfloat16, device="cuda"), torch.zeros(rows, hidden, device="cuda")
    x = x.bfloat16()

    def chain() -> torch.Tensor:
        total, delta = x, x
        for _ in range(6):
            normed, total = add_norm(delta, total, norm, 1e-5)
            delta = linear(gated_linear(normed, gate_up, invariant=invariant), down, invariant=invariant)
        return delta

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        x.copy_(torch.randn(rows, hidden))
        expected = chain()
        graph.replay()
        assert torch.equal(found, expected)
