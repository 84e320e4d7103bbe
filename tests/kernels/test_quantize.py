"""Rows rounded to 8 bits: kernels give the reference's values and scales, to the bit."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import activation_triton, norm_triton, quantize_triton
from penstock.kernels.activation import SILU
from penstock.kernels.quantize import quantize, row_format
from penstock.kernels.quantized import (
    FLOAT8,
    Float4Weight,
    Float8Weight,
    Int8Weight,
    QuantizedRows,
    RowFormat,
    quantize_rows,
)

pytestmark = pytest.mark.sweep

SCALE = torch.tensor([0.03])
FORMS = [(FLOAT8, 0, None), (torch.int8, 0, None), (FLOAT8, 32, None), (FLOAT8, 0, SCALE), (torch.int8, 0, SCALE)]


def heavy(rows: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose largest numbers are far from the others, one of zeros, and one below the smallest scale."""
    torch.manual_seed(rows * inputs)
    x = torch.randn(rows, inputs) * torch.randn(rows, inputs).mul(2).exp()
    x[0] = 0.0
    x[-1] *= 1e-14
    return x.to(dtype)


@pytest.mark.parametrize("inputs", [32, 100, 1500])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernel_rounds_as_the_reference_does(
    form: tuple[torch.dtype, int, torch.Tensor | None], inputs: int, device: str
) -> None:
    kind, block, scale = form
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wide = heavy(5, inputs + 7, dtype).to(device)
        x = wide[:, :inputs]  # rows that lie apart
        given = None if scale is None else scale.to(device)
        expected, scales = quantize_rows(x, kind, block, given)
        found = quantize_triton.quantize_rows(x, RowFormat(kind, block, given))
        assert torch.equal(found.values.view(torch.int8), expected.view(torch.int8))
        assert torch.equal(found.scales, scales)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("inputs", "first", "held"), [(64, 0, 4), (100, 1, 2)])
def test_rows_are_rounded_once_for_each_of_their_pairs(inputs: int, first: int, held: int, device: str) -> None:
    """Pairs of experts that are not held have no place."""
    form = RowFormat(FLOAT8, 32)
    x = heavy(7, inputs, torch.bfloat16).to(device)
    experts = torch.rand(7, 4).argsort(1)[:, :2].int().contiguous().to(device)
    there = ((experts >= first) & (experts < first + held)).flatten()
    places = torch.full_like(there, -1, dtype=torch.int32)
    places[there] = torch.randperm(int(there.sum()), device=device).int()
    expected = quantize_triton.quantize_rows(x, form)
    found = quantize_triton.quantize_pairs(x, form, experts, places, first, held)
    token = there.nonzero()[:, 0] // 2
    own = places[there].long()
    assert torch.equal(found.values[own].view(torch.int8), expected.values[token].view(torch.int8))
    assert torch.equal(found.scales[own], expected.scales[token])


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
def test_a_row_that_is_not_finite_stays_so_and_alone(bad: float, block: int, device: str) -> None:
    for kind in (FLOAT8, torch.int8):
        x = heavy(4, 96, torch.float32).to(device)
        x[1, 5] = bad
        found = quantize_triton.quantize_rows(x, RowFormat(kind, block))
        assert not found.scales[1].isfinite().all()
        assert found.scales[[0, 2, 3]].isfinite().all()


def test_a_weight_says_what_its_rows_have_to_be() -> None:
    values, scales = torch.zeros(4, 256).to(FLOAT8), torch.ones(4)
    assert row_format(torch.zeros(4, 4)) is None
    assert row_format(Float4Weight(torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 1), 32)) is None
    assert row_format(Float8Weight(values, scales, activations="none")) is None
    assert row_format(Float8Weight(values, torch.ones(1, 2), (128, 128), "none")) is None
    for weight, expected in (
        (Float8Weight(values, scales), (FLOAT8, 0, None)),
        (Float8Weight(values, torch.ones(1, 2), (128, 128), "block"), (FLOAT8, 128, None)),
        (Float8Weight(values, scales, None, "static", SCALE), (FLOAT8, 0, SCALE)),
        (Int8Weight(values.to(torch.int8), scales), (torch.int8, 0, None)),
    ):
        form = row_format(weight)
        assert form is not None
        assert (form.kind, form.block, form.scale) == expected
    made = quantize(torch.ones(2, 256), RowFormat(FLOAT8, 128))
    assert made.values.dtype == FLOAT8
    assert made.scales.shape == (2, 2)


@pytest.mark.parametrize("width", [96, 1100])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_norm_and_gate_round_as_a_kernel_behind_them_would(
    form: tuple[torch.dtype, int, torch.Tensor | None], width: int, device: str
) -> None:
    kind, block, scale = form
    rows = RowFormat(kind, block, None if scale is None else scale.to(device))
    for dtype in (torch.float32, torch.float16):
        x, residual = heavy(3, width, dtype).to(device), torch.randn(3, width).to(dtype).to(device)
        weight, bias = torch.rand(width).to(dtype).to(device), torch.rand(width).to(dtype).to(device)
        for given in (None, bias):
            normed, total = norm_triton.add_norm_rows(x, residual, weight, 1e-5, given, 0.5)
            found, sums = norm_triton.add_norm_rounded_rows(x, residual, weight, 1e-5, rows, given, 0.5)
            assert torch.equal(sums, total)
            check(found, normed, rows)
        product = torch.cat((x, residual), 1)
        gated = activation_triton.activate_rows(product, SILU, gated=True)
        check(activation_triton.gate_rows(product, SILU, rows), gated, rows)


def check(found: QuantizedRows, rows: torch.Tensor, form: RowFormat) -> None:
    expected = quantize_triton.quantize_rows(rows, form)
    assert torch.equal(found.values.view(torch.int8), expected.values.view(torch.int8))
    assert torch.equal(found.scales, expected.scales)
    assert found.dtype == rows.dtype
