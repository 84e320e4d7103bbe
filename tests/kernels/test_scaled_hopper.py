"""Products of few rows with e4m3 weights whose inputs several programs share, held to double precision on a GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import gluon
from penstock.kernels.linear_tilings import SplitTiling
from penstock.kernels.quantize import quantize
from penstock.kernels.quantized import FLOAT8, Float8Weight, RowFormat, spread_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "static", "blocks", "blocks by row"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("width", "inputs"), [(4096, 4096), (256, 512), (1024, 14336), (384, 400)])
def test_shared_inputs(width: int, inputs: int, gated: bool, kind: str) -> None:
    """Whoever of the programs is last, and however often: sums are added in one order."""
    hopper = gluon.load("scaled_hopper")
    if hopper is None:
        pytest.skip("this is no GPU of Hopper's generation")
    torch.manual_seed(width + inputs)
    outputs = width * (1 + gated)
    values = (torch.randn(outputs, inputs, device="cuda") * 16).to(FLOAT8)
    given = torch.tensor([0.02], device="cuda") if kind == "static" else None
    if kind.startswith("blocks"):
        scales = torch.rand(outputs // 128, -(-inputs // 128), device="cuda") * 0.01 + 0.001
        weight = Float8Weight(values, scales, (128, 128), "block" if kind == "blocks" else "row")
    else:
        weight = Float8Weight(values, torch.rand(outputs, device="cuda") * 0.01 + 0.001)
    x = torch.randn(64, inputs, device="cuda").bfloat16()
    rows = quantize(x, RowFormat(FLOAT8, 128 if kind == "blocks" else 0, given))
    exact = (
        rows.values.double() * spread_blocks(rows.scales, (1, 128 if kind == "blocks" else inputs), x.shape).double()
    )
    bias = torch.randn(outputs, device="cuda").bfloat16()
    product = exact @ weight.dequantized(torch.float64).T + bias.double()
    if gated:
        gate, up = product.chunk(2, dim=1)
        product = gate * gate.sigmoid() * up
    for height, splits, stages in ((8, 1, 4), (8, 8, 2), (16, 4, 3), (64, 2, 2), (64, 4, 2)):
        tiling, first = SplitTiling(height, splits, stages), None
        for count in (height, 1, height - 3, height):
            some = quantize(x[:count], RowFormat(FLOAT8, 128 if kind == "blocks" else 0, given))
            found = hopper.multiply_split(some, weight, bias, tiling, gated=gated)
            first = found if first is None else first
            assert torch.equal(found, first[:count]), (tiling, count)
            error = (found.double() - product[:count]).norm() / product[:count].norm()
            assert error < 8e-3, (tiling, count)
