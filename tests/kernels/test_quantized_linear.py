"""Products with quantized weights: every layout against the reference arithmetic."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.activation import silu_mul
from penstock.kernels.quantized import FLOAT8, Float8Weight, multiply_reference
from penstock.kernels.quantized_linear import multiply_quantized


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_product_may_have_a_bias_and_a_gate(gated: bool, biased: bool) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(3, 32), torch.randn(8) if biased else None
    weight = Float8Weight(torch.randn(8, 32).to(FLOAT8), torch.rand(8))
    expected = multiply_reference(x, weight, bias)
    found = multiply_quantized(x, weight, bias, gated=gated, invariant=False)
    assert torch.equal(found, silu_mul(expected) if gated else expected)
