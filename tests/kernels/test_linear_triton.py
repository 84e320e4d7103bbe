"""Products with a weight: every kernel against double precision, and the same bits in every tiling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_tilings import Product, Tiling, VectorTiling, ruled
from penstock.kernels.linear_triton import multiply_tiles, multiply_tma, multiply_vector, tma_compatible

pytestmark = pytest.mark.sweep

SMALL = (
    Tiling(16, 16, 32, 4, 2),
    Tiling(16, 32, 16, 4, 2, swap_ab=True),
    Tiling(32, 16, 32, 4, 2, tma=True),
    Tiling(16, 32, 64, 4, 2, swap_ab=True, tma=True, flat=True),
)
LARGE = tuple(
    {
        way: None
        for width, inputs in ((1024, 2048), (4096, 1024), (4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096))
        for gated in (False, True)
        for chip in (CHIPS["sm_90"], CHIPS["sm_89"])
        for way in ruled(Product(width, inputs, torch.bfloat16, gated), chip, invariant=True).ways
    }
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def types(device: str) -> list[torch.dtype]:
    """The interpreter's products of bfloat16 fail."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])]


def gate(found: Tensor, dtype: torch.dtype) -> Tensor:
    """The gate of a product in double precision: both halves are rounded first."""
    first, second = found.to(dtype).double().chunk(2, dim=1)
    return first / (1 + (-first).exp()) * second


def check(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> None:
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    if gated:
        expected = gate(expected, x.dtype)
    eps = torch.finfo(x.dtype).eps
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps, atol=16 * eps)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, *, gated: bool = False) -> Tensor:
    return (multiply_tma if tiling.tma else multiply_tiles)(x, weight, bias, tiling, gated=gated)


def operands(rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of a scale at which outputs are about 1. They are complete when this returns."""
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    found = x.to(device), weight.to(device), bias.to(device)
    if device == "cuda":
        torch.cuda.synchronize()
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 128), (38, 200), (6, 72)])
@pytest.mark.parametrize("tiling", [VectorTiling(1, 64, 1), VectorTiling(4, 32, 4)])
def test_one_row(tiling: VectorTiling, outputs: int, inputs: int, biased: bool, gated: bool, device: str) -> None:
    for dtype in types(device):
        x, weight, bias = operands(1, outputs, inputs, dtype, device)
        chosen = bias if biased else None
        check(multiply_vector(x, weight, chosen, tiling, gated=gated), x, weight, chosen, gated)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(16, 64, 64), (37, 72, 96), (1, 40, 48)])
@pytest.mark.parametrize("tiling", SMALL)
def test_several_rows(
    tiling: Tiling, rows: int, outputs: int, inputs: int, biased: bool, gated: bool, device: str
) -> None:
    for dtype in types(device):
        x, weight, bias = operands(rows, outputs, inputs, dtype, device)
        chosen = bias if biased else None
        check(multiply(x, weight, chosen, tiling, gated=gated), x, weight, chosen, gated)


@pytest.mark.parametrize("tma", [False, True])
def test_rows_that_lie_apart(tma: bool, device: str) -> None:
    wide, weight, _ = operands(5, 24, 64, torch.float32, device)
    x = torch.cat((wide, wide), dim=1)[:, 32:96]
    tiling = Tiling(16, 16, 32, 4, 2, tma=tma)
    check(multiply(x, weight, None, tiling), x, weight, None, False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [1, 3])
def test_one_output(rows: int, device: str) -> None:
    """As of a gate that a whole MLP has: the compiler takes a width of one for a constant."""
    for dtype in types(device):
        x, weight, bias = operands(rows, 1, 64, dtype, device)
        check(multiply(x, weight, bias, SMALL[0]), x, weight, bias, False)
        if rows == 1:
            check(multiply_vector(x, weight, bias, VectorTiling(1, 64, 1), gated=False), x, weight, bias, False)


def test_what_the_accelerator_can_read() -> None:
    rows = torch.zeros(8, 64, dtype=torch.float16)
    assert tma_compatible(rows)
    assert tma_compatible(rows[:, 8:16])
    assert not tma_compatible(rows[:, 4:12])  # begins off a multiple of 16 bytes
    assert not tma_compatible(torch.zeros(8, 60, dtype=torch.float16))
    assert not tma_compatible(rows.t())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tiling", SMALL)
def test_a_row_does_not_depend_on_its_neighbours(tiling: Tiling, gated: bool, device: str) -> None:
    """Not on their number, their values or its place among them, to the last bit."""
    for dtype in types(device):
        x, weight, bias = operands(37, 40, 160, dtype, device)
        together = multiply(x, weight, bias, tiling, gated=gated)
        shuffled = torch.randperm(37, device=device)
        assert torch.equal(multiply(x[shuffled], weight, bias, tiling, gated=gated), together[shuffled])
        for row in (0, 15, 36):
            assert torch.equal(multiply(x[row : row + 1], weight, bias, tiling, gated=gated), together[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 4096), (264, 14336), (1024, 200)])
def test_tilings_of_the_product_give_the_same_bits(outputs: int, inputs: int) -> None:
    """Whatever the size of the matrix instruction and the operand that the weight is."""
    x, weight, bias = operands(300, outputs, inputs, torch.bfloat16, "cuda")
    check(first := multiply(x, weight, bias, SMALL[0]), x, weight, bias, False)
    for tiling in (*LARGE, *SMALL):
        assert isinstance(tiling, Tiling)
        assert torch.equal(first, multiply(x, weight, bias, tiling)), tiling
