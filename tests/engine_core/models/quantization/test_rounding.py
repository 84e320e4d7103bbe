"""Matrices rounded to each format: near to what they were, exact where the format holds them."""

from __future__ import annotations

import pytest
import torch

from penstock.engine_core.models.quantization.rounding import round_matrix
from penstock.engine_core.models.quantization.weight_format import WeightFormat
from penstock.kernels.quantized import FLOAT4, Float4Weight, GroupedWeight, held_bytes

# Formats with the largest error, as a share of the largest number that shares a scale.
FORMS = {
    "fp8": (WeightFormat(kind="float8", activations="row"), 1 / 28),
    "fp8 a tensor": (WeightFormat(kind="float8", per_tensor=True, activations="static"), 1 / 28),
    "fp8 blocks": (WeightFormat(kind="float8", block=(16, 32), activations="block"), 1 / 28),
    "int8": (WeightFormat(kind="int8", activations="row"), 1 / 253),
    "int4": (WeightFormat(kind="grouped", bits=4, group=32), 1 / 14),
    "int4 with zero points": (WeightFormat(kind="grouped", bits=4, group=32, symmetric=False), 1 / 7),
    "int8 a row": (WeightFormat(kind="grouped", bits=8), 1 / 254),
    "mxfp4": (WeightFormat(kind="float4", bits=4, group=32), 1 / 3.9),
    "nvfp4": (WeightFormat(kind="float4", bits=4, group=16), 1 / 5),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", [(24, 96), (40, 64), (3, 24, 64)])
def test_errors_are_the_formats(name: str, shape: tuple[int, ...]) -> None:
    form, share = FORMS[name]
    dense = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) ** 3).bfloat16()
    found = round_matrix(form, dense)
    assert found.shape == dense.shape
    error = (found.dequantized(torch.float32) - dense.float()).abs()
    assert error.max() <= share * dense.abs().max()
    if form.group:
        groups = dense.unflatten(-1, (-1, form.group)).abs().amax(-1, keepdim=True)
        assert (error.unflatten(-1, (-1, form.group)) <= share * groups).all()
    if len(shape) == 2:
        assert held_bytes(found) == pytest.approx(form.held_bytes(*shape), rel=0.1)


@pytest.mark.parametrize("name", FORMS)
def test_zeros_stay_zeros(name: str) -> None:
    found = round_matrix(FORMS[name][0], torch.zeros(32, 64)).dequantized(torch.float32)
    assert torch.equal(found, torch.zeros(32, 64))


def test_numbers_of_four_bits_are_the_nearest() -> None:
    """Every value of E2M1 is met exactly, and between two the nearer is taken."""
    values = torch.tensor([*FLOAT4, *(-value for value in FLOAT4)]).repeat(2)[None]
    found = round_matrix(WeightFormat(kind="float4", bits=4, group=32), values)
    assert torch.equal(found.dequantized(torch.float32), values)
    assert isinstance(found, Float4Weight)
    between = values.clone()
    between[0, 1], between[0, 2] = 0.7, 2.6
    near = round_matrix(WeightFormat(kind="float4", bits=4, group=32), between).dequantized(torch.float32)
    assert near[0, 1:3].tolist() == [0.5, 3.0]


def test_groups_with_zero_points_reach_from_the_least_to_the_largest() -> None:
    dense = torch.linspace(-1.0, 14.0, 16).repeat(1, 2)
    found = round_matrix(WeightFormat(kind="grouped", bits=4, group=16, symmetric=False), dense)
    assert isinstance(found, GroupedWeight)
    assert found.zeros is not None
    assert found.zeros.tolist() == [[1, 1]]
    assert torch.equal(found.dequantized(torch.float32), dense)


def test_scales_are_of_the_matrix_type() -> None:
    dense = torch.randn(8, 64, dtype=torch.bfloat16)
    found = round_matrix(WeightFormat(kind="grouped", bits=4, group=32), dense)
    assert found.scales.dtype is torch.bfloat16
