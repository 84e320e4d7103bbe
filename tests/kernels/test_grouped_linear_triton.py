"""Products with weights in groups: every kernel against double precision."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from penstock.kernels import grouped_linear_triton
from penstock.kernels.chip import CHIPS
from penstock.kernels.grouped_linear import PlaneWeight, planes_of
from penstock.kernels.grouped_linear_triton import dequantize, multiply_by
from penstock.kernels.grouped_tilings import GroupedTiling
from penstock.kernels.linear_tilings import Product, ruled
from tests.kernels.grouped_weights import KINDS, exact_product, grouped

PARTS, SHARES = GroupedTiling(8, 16, 4, 2, parts=4), GroupedTiling(8, 32, 2, 2, shares=2)
SCALED = GroupedTiling(16, 32, 2, 2, scaled=True, cut=2)
TILINGS = (GroupedTiling(16, 32, 2, 2), PARTS, SHARES, SCALED, msgspec.structs.replace(PARTS, scaled=True), None)


def types(device: str) -> list[torch.dtype]:
    """The interpreter rounds to bfloat16 by cutting off, and its products fail."""
    return [torch.bfloat16, torch.float16] if device == "cuda" else [torch.float16]


def planes(weight: object) -> PlaneWeight:
    found = planes_of(weight)  # type: ignore[arg-type]
    assert found is not None
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_slice_is_the_reference_to_the_bit(kind: str, device: str) -> None:
    weight = grouped(kind, 21, 160 if kind.endswith(("0 fp32", "0 fp32 zeros")) else 384, device)
    for dtype in (torch.float32, *types(device)):
        found = dequantize(planes(weight), dtype, 2, 20)
        assert torch.equal(found, weight.dequantized(dtype)[2:20])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_products_of_every_kind(tiling: GroupedTiling | None, kind: str, device: str) -> None:
    """Odd numbers of outputs and blocks, rows with some large numbers."""
    weight = grouped(kind, 42, 384, device)
    for dtype in types(device):
        x = (torch.randn(3, 384) * torch.randn(3, 384).abs() ** 3).clamp(-300, 300).to(dtype).to(device)
        found = multiply_by(tiling, x, planes(weight), None, gated=False)
        assert found.dtype == dtype
        assert distance(found, exact_product(x, weight, None, False)) < torch.finfo(dtype).eps


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tiling", TILINGS)
def test_bias_gate_and_many_tiles(tiling: GroupedTiling | None, gated: bool, device: str) -> None:
    weight = grouped("int4 128 bf16", 84, 256, device)
    for dtype in types(device):
        x = torch.randn(19, 512).to(dtype).to(device)[:, 128:384]
        bias = torch.randn(84).to(dtype).to(device)
        found = multiply_by(tiling, x, planes(weight), bias, gated=gated)
        assert distance(found, exact_product(x, weight, bias, gated)) < torch.finfo(dtype).eps


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(gated: bool, device: str) -> None:
    """Nor on the tiling, as long as no inputs are shared out."""
    weight = planes(grouped("int4 64 bf16 order", 48, 512, device))
    for dtype in types(device):
        x = torch.randn(19, 512).to(dtype).to(device)
        together = multiply_by(GroupedTiling(16, 32, 2, 2), x, weight, None, gated=gated)
        for tiling in (GroupedTiling(8, 16, 1, 3), GroupedTiling(32, 64, 4, 2)):
            shuffled = torch.randperm(19, device=device)
            assert torch.equal(multiply_by(tiling, x[shuffled], weight, None, gated=gated), together[shuffled])
            assert torch.equal(multiply_by(tiling, x[18:], weight, None, gated=gated), together[18:])


def test_counters_of_shares_are_left_zero(device: str) -> None:
    weight = planes(grouped("int4 128 bf16", 80, 512, device))
    x = torch.randn(5, 512).half().to(device)
    first = multiply_by(SHARES, x, weight, None, gated=False)
    assert not weight.arrivals.any()
    assert torch.equal(first, multiply_by(SHARES, x, weight, None, gated=False))


def test_more_tiles_than_counters_share_nothing(device: str) -> None:
    weight = grouped("int4 128 bf16", 16, 256, device)
    x = torch.randn(40, 256).half().to(device)
    found = multiply_by(SHARES, x, planes(weight), None, gated=False)
    alone = multiply_by(msgspec.structs.replace(SHARES, shares=1), x, planes(weight), None, gated=False)
    assert torch.equal(found, alone)


def test_a_slice_of_the_library_s_product_is_whole(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_linear_triton, "SLICE", 1)
    weight = grouped("int4 64 bf16 order", 300, 128, device)
    x, bias = torch.randn(3, 128).half().to(device), torch.randn(300).half().to(device)
    found = multiply_by(None, x, planes(weight), bias, gated=False)
    assert distance(found, exact_product(x, weight, bias, False)) < torch.finfo(x.dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["int4 128 bf16", "int4 128 fp16 zeros", "mxfp4", "nvfp4", "int8 128 bf16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 4096), (264, 14336)])
def test_ways_of_the_product(outputs: int, inputs: int, kind: str, gated: bool) -> None:
    """By the rules, invariant or not, on this chip and a small one; invariant ones have the same bits."""
    weight = grouped(kind, outputs, inputs, "cuda")
    held = planes(weight)
    product = Product(outputs // 2 if gated else outputs, inputs, torch.bfloat16, gated, weight=held.form.name)
    for rows in (1, 5, 16, 40, 64, 130, 600):
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
        expected = exact_product(x, weight, None, gated)
        steady = []
        for chip in (CHIPS["sm_90"], CHIPS["sm_89"]):
            for invariant in (False, True):
                way = ruled(product, chip, invariant=invariant).way(rows)
                found = multiply_by(way, x, held, None, gated=gated)
                assert distance(found, expected) < 0.006, (rows, way)
                if invariant:
                    steady.append(found)
        assert torch.equal(*steady)
