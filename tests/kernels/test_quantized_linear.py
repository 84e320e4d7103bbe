"""Products with quantized weights: every layout against the reference arithmetic."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import scaled_linear_triton
from penstock.kernels.activation import activate
from penstock.kernels.linear_tilings import SplitTiling, Tiling, VectorTiling
from penstock.kernels.quantize import quantize
from penstock.kernels.quantized import FLOAT8, Float8Weight, RowFormat, Rows, multiply_reference
from penstock.kernels.quantized_linear import multiply_quantized, multiply_quantized_by


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_may_have_a_bias_and_a_gate(gated: bool, biased: bool) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(3, 32), torch.randn(8) if biased else None
    weight = Float8Weight(torch.randn(8, 32).to(FLOAT8), torch.rand(8))
    expected = multiply_reference(x, weight, bias)
    found = multiply_quantized(x, weight, bias, gated=gated, invariant=False)
    assert torch.equal(found, activate(expected) if gated else expected)


@pytest.mark.parametrize("inputs", [48, 40])
def test_rows_that_tma_cannot_load_are_loaded_without_it(
    inputs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each begins at a multiple of 16 bytes, or it is read in the plain way."""
    used: list[bool] = []
    plain = scaled_linear_triton.multiply_scaled_tiles

    def multiply(x: Rows, weight: Float8Weight, bias: None, tiling: Tiling, *, gated: bool) -> torch.Tensor:
        used.append(tiling.tma)
        return plain(x, weight, bias, tiling, gated=gated)

    monkeypatch.setattr(scaled_linear_triton, "multiply_scaled_tiles", multiply)
    torch.manual_seed(0)
    x = torch.randn(3, inputs, device=device)
    weight = Float8Weight(torch.randn(16, inputs, device=device).to(FLOAT8), torch.rand(16, device=device))
    rows = quantize(x, RowFormat(FLOAT8))
    found = multiply_quantized_by(Tiling(16, 16, 128, 4, 2, tma=True), rows, weight, None, gated=False)
    assert torch.allclose(found, multiply_reference(x, weight), atol=1e-4)
    assert used == [inputs == 48]


@pytest.mark.parametrize("height", [32, 1])
def test_one_row_of_lower_blocks_is_a_vector(height: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the plan is for blocks of 128 outputs. Two outputs of a program have one scale, or tiles serve."""
    used: list[VectorTiling] = []
    plain = scaled_linear_triton.multiply_scaled_vector

    def multiply(x: Rows, weight: Float8Weight, bias: None, tiling: VectorTiling, *, gated: bool) -> torch.Tensor:
        used.append(tiling)
        return plain(x, weight, bias, tiling, gated=gated)

    monkeypatch.setattr(scaled_linear_triton, "multiply_scaled_vector", multiply)
    torch.manual_seed(0)
    x = torch.randn(1, 256, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    scales = torch.rand(-(-96 // height), 2, device=device)
    weight = Float8Weight(torch.randn(96, 256, device=device).to(FLOAT8), scales, (height, 128), "block")
    rows = quantize(x, RowFormat(FLOAT8, 128))
    found = multiply_quantized_by(SplitTiling(8, 1, 4), rows, weight, None, gated=False)
    expected = multiply_reference(x, weight)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-2 * float(expected.abs().max()))
    assert bool(used) is (height == 32)
