"""Products with weights of 8 bits: every kernel against double precision, and the same bits in every tiling."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import activate
from penstock.kernels.linear_tilings import Rescaled, Tiling, VectorTiling
from penstock.kernels.quantize import quantize, row_format
from penstock.kernels.quantized import FLOAT8, Float8Weight, Int8Weight, Rows, quantize_rows, spread_blocks
from penstock.kernels.quantized_linear import multiply_quantized, multiply_quantized_by
from penstock.kernels.scaled_linear_triton import (
    multiply_scaled_tiles,
    multiply_scaled_vector,
    readable,
    rescale_kernel,
)

pytestmark = pytest.mark.sweep

SMALL = (
    Tiling(16, 16, 32, 4, 2),
    Tiling(16, 32, 32, 4, 2, swap_ab=True),
    Tiling(32, 16, 32, 4, 2, tma=True),
    Tiling(16, 64, 128, 4, 2, swap_ab=True, tma=True, flat=True),
)
BLOCK = (64, 128)
KINDS = ("row", "static", "blocks", "blocks by row", "weights", "blocks of weights", "integers")
WAYS = tuple(itertools.product(KINDS, (False, True)))  # a row of a sweep each: gate and up have scales of their own


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def types(device: str) -> list[torch.dtype]:
    """The interpreter's products of bfloat16 fail."""
    return [torch.float16, torch.bfloat16 if device == "cuda" else torch.float32]


def heavy(rows: int, inputs: int) -> Tensor:
    """Numbers some of which are far from the others."""
    return torch.randn(rows, inputs) * (torch.rand(rows, inputs) < 0.02).float().mul(20).add(1)


def made(kind: str, outputs: int, inputs: int) -> Float8Weight | Int8Weight:
    """A weight whose products with rows of about 1 are about 1."""
    exact = heavy(outputs, inputs) * inputs**-0.5
    if kind == "integers":
        values, scales = quantize_rows(exact, torch.int8)
        return Int8Weight(values, scales[:, 0])
    if not kind.startswith("blocks"):
        values, scales = quantize_rows(exact, FLOAT8)
        activations = {"weights": "none"}.get(kind, kind)
        given = torch.tensor([0.011]) if kind == "static" else None
        return Float8Weight(values, scales[:, 0], None, activations, given)  # type: ignore[arg-type]
    scales = torch.rand(-(-outputs // BLOCK[0]), -(-inputs // BLOCK[1])) * 0.02 + 0.001
    activations = {"blocks by row": "row", "blocks of weights": "none"}.get(kind, "block")
    codes = (exact / spread_blocks(scales, BLOCK, exact.shape)).clamp(-448, 448).to(FLOAT8)
    return Float8Weight(codes, scales, BLOCK, activations)  # type: ignore[arg-type]


def on(weight: Float8Weight | Int8Weight, device: str) -> Float8Weight | Int8Weight:
    moved = {name: part.to(device) for name, part in vars(weight).items() if isinstance(part, Tensor)}
    return type(weight)(**{**vars(weight), **moved})


def rows_of(x: Tensor, weight: Float8Weight | Int8Weight) -> tuple[Rows, Tensor]:
    """Rows as the kernel takes them, and what they stand for in double precision."""
    form = row_format(weight)
    if form is None:
        return x, x.double()
    found = quantize(x, form)
    if form.block:
        return found, found.values.double() * spread_blocks(found.scales, (1, form.block), x.shape).double()
    return found, found.values.double() * found.scales.double()


def check(found: Tensor, exact: Tensor, weight: Float8Weight | Int8Weight, bias: Tensor | None, gated: bool) -> None:
    """As near as the result's type allows, and products of E4M3 as the matrix units add them."""
    expected = exact @ weight.dequantized(torch.float64).T
    if bias is not None:
        expected += bias.double()
    if gated:
        first, second = expected.to(found.dtype).double().chunk(2, dim=1)
        expected = first / (1 + (-first).exp()) * second
    coarse = 2**-9 if found.device.type == "cuda" else 0.0
    eps = torch.finfo(found.dtype).eps
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=4 * eps + coarse, atol=(16 * eps + coarse) * largest)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("outputs", "inputs"), [(38, 200), (128, 400)])
@pytest.mark.parametrize(("kind", "gated"), WAYS)
def test_one_row(kind: str, outputs: int, inputs: int, gated: bool, device: str) -> None:
    if gated and kind.startswith("blocks"):
        outputs = 2 * BLOCK[0]  # blocks of gate and up that do not line up are two weights
    for dtype in types(device):
        weight = on(made(kind, outputs, inputs), device)
        x, exact = rows_of(heavy(1, inputs).to(dtype).to(device), weight)
        for tiling in (VectorTiling(2, 512, 1), VectorTiling(16, 128, 4)):
            bias = torch.randn(outputs).to(dtype).to(device) if tiling.outputs == 2 else None
            found = multiply_scaled_vector(x, weight, bias, tiling, gated=gated)
            check(found, exact, weight, bias, gated)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(37, 74, 144), (16, 128, 256), (1, 40, 48)])
@pytest.mark.parametrize(("kind", "gated"), WAYS)
def test_several_rows(kind: str, rows: int, outputs: int, inputs: int, gated: bool, device: str) -> None:
    if gated and kind.startswith("blocks"):
        outputs = 2 * BLOCK[0]  # blocks of gate and up that do not line up are two weights
    for dtype in types(device):
        weight = on(made(kind, outputs, inputs), device)
        x, exact = rows_of(heavy(rows, inputs).to(dtype).to(device), weight)
        bias = torch.randn(outputs).to(dtype).to(device)
        for tiling in SMALL:
            found = multiply_scaled_tiles(x, weight, bias, tiling, gated=gated)
            check(found, exact, weight, bias, gated)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str, device: str) -> None:
    """Not on their number, their values or its place among them, to the last bit."""
    dtype = types(device)[0]
    weight = on(made(kind, 128, 256), device)
    x = heavy(19, 256).to(dtype).to(device)

    def multiply(some: Tensor, tiling: Tiling) -> Tensor:
        return multiply_scaled_tiles(rows_of(some, weight)[0], weight, None, tiling, gated=False)

    shuffled = torch.randperm(19, device=device)
    for tiling in SMALL[1:3]:
        together = multiply(x, tiling)
        assert torch.equal(multiply(x[shuffled], tiling), together[shuffled])
        assert torch.equal(multiply(x[18:], tiling), together[18:])


def test_weights_are_read_as_bytes_where_the_chip_has_no_such_numbers(device: str) -> None:
    """Every code but NaN's, by the bytes' way and by the type's own."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    codes = codes[(codes & 127) != 127].repeat(2)[:252].view(1, 252)
    x = torch.eye(252, dtype=torch.float16, device=device)
    weight = Float8Weight(codes.view(FLOAT8), torch.ones(1, device=device), None, "none")
    assert readable(weight.values) is weight.values
    plain = object.__new__(Float8Weight)
    for name, value in vars(weight).items():
        object.__setattr__(plain, name, value)
    object.__setattr__(plain, "values", codes)
    for tiling in (SMALL[0], SMALL[1]):
        found = [multiply_scaled_tiles(x, one, None, tiling, gated=False) for one in (weight, plain)]
        assert torch.equal(found[0], weight.dequantized(torch.float16).T)
        assert torch.equal(found[0], found[1])


LARGE = (
    Tiling(8, 64, 128, 4, 4, swap_ab=True),
    Tiling(16, 16, 256, 2, 4, swap_ab=True),
    Tiling(64, 64, 128, 4, 4, tma=True),
    Tiling(64, 128, 128, 4, 4, swap_ab=True, tma=True),
    Tiling(128, 128, 128, 8, 4, tma=True, flat=True),
    Tiling(128, 256, 128, 8, 3, tma=True, flat=True),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 4096), (264, 14336), (1024, 208)])
@pytest.mark.parametrize("kind", KINDS)
def test_tilings_give_the_same_bits(kind: str, outputs: int, inputs: int) -> None:
    """Whatever the size of the matrix instruction and the operand that the weight is, but for tiles of eight rows: they
    have an instruction of their own on an H200, and invariant products have none of them."""
    dtype = torch.bfloat16
    weight = on(made(kind, outputs, inputs), "cuda")
    x, exact = rows_of(heavy(300, inputs).to(dtype).cuda(), weight)
    first = multiply_scaled_tiles(x, weight, None, LARGE[2], gated=False)
    check(first, exact, weight, None, False)
    for tiling in LARGE:
        if weight.values.dtype is FLOAT8 and tiling.inputs > 128:
            continue
        found = multiply_scaled_tiles(x, weight, None, tiling, gated=False)
        check(found, exact, weight, None, False)
        assert tiling.rows == 8 or torch.equal(first, found), tiling


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "gated"), WAYS)
def test_every_plan_gives_the_product(kind: str, gated: bool) -> None:
    """For every number of rows, by the rules as they are served, and by those of invariant products."""
    for width, inputs in ((1024, 512), (392, 1040)):
        if kind.startswith("blocks") and width % 128:
            continue
        for dtype in (torch.bfloat16, torch.float16):
            weight = on(made(kind, width * (1 + gated), inputs), "cuda")
            if kind.startswith("blocks"):
                weight = Float8Weight(weight.values, weight.scales[::2].contiguous(), (128, 128), weight.activations)
            bias = torch.randn(len(weight.values)).to(dtype).cuda()
            for rows in (1, 2, 9, 17, 33, 65, 129, 257, 600):
                x = heavy(rows, inputs).to(dtype).cuda()
                exact = rows_of(x, weight)[1]
                for invariant in (False, True):
                    found = multiply_quantized(x, weight, bias, gated=gated, invariant=invariant)
                    check(found, exact, weight, bias, gated)
        if weight.values.dtype is FLOAT8 and not kind.startswith(("blocks", "weights")):
            x = rows_of(heavy(70, inputs).bfloat16().cuda(), weight)
            found = multiply_quantized_by(Rescaled(), x[0], weight, None, gated=gated)
            check(found, x[1], weight, None, gated)


@pytest.mark.parametrize("gated", [False, True])
def test_sums_are_scaled_afterwards(gated: bool, device: str) -> None:
    sums, x_scales = torch.randn(3, 2060, device=device), torch.rand(3, 1, device=device)
    scales, bias = torch.rand(2060, device=device), torch.randn(2060, device=device)
    width = 1030 if gated else 2060
    for each in ("row", "all"):
        out = torch.full((3, width), float("nan"), device=device)
        rescale_kernel[(3, -(-width // 1024))](
            sums, x_scales, scales, bias, out, WIDTH=width, TILE=1024, EACH=each, GATED=gated, BIAS=True, PDL=False
        )
        expected = sums * (x_scales if each == "row" else x_scales[0]) * scales + bias
        assert torch.allclose(out, activate(expected) if gated else expected, atol=1e-5)
