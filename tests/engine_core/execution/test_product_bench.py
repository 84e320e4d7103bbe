"""Timing the ways of a product: wrong ones and failing ones are left out. On a GPU, the real thing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from penstock.engine_core.execution import product_bench
from penstock.engine_core.execution.product_bench import MOST_EXPERTS, ProductBench, held_experts, measure, weight_bytes
from penstock.engine_core.execution.product_tuning import Job, jobs_of, tune
from penstock.kernels import linear_triton
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_tilings import GroupedTiling
from penstock.kernels.linear import gated_linear, linear
from penstock.kernels.linear_plans import Plans
from penstock.kernels.linear_tilings import SCALED, ExpertTiling, Product, Tiling, VectorTiling, Way, candidates

GOOD, OFF, NAN, FAILING = (VectorTiling(1, 32, warps) for warps in (1, 2, 4, 8))


class CpuBench(ProductBench):
    """Without graphs: calls take no time."""

    def __init__(self, product: Product) -> None:
        self.device = torch.device("cpu")
        self.pools = {product.dtype: torch.randn(4096).to(product.dtype)}

    def microseconds(self, calls: Callable[[], object]) -> float:
        calls()
        return 12.0


def test_wrong_and_failing_ways_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = linear_triton.multiply_by

    def by(way: Way, x: Tensor, weight: Tensor, bias: None, *, gated: bool) -> Tensor:
        if way == FAILING:
            raise RuntimeError("out of resource: shared memory")
        found = multiply(None, x, weight, bias, gated=gated)
        return found * {OFF: 1.1, NAN: float("nan")}.get(way, 1.0)

    monkeypatch.setattr(linear_triton, "multiply_by", by)
    monkeypatch.setattr(product_bench, "OUTLAST", 2 * 4096)
    product = Product(8, 64, torch.float16, gated=True)
    told: list[tuple[Way, str]] = []
    ways = (None, GOOD, OFF, NAN, FAILING)
    found = CpuBench(product).time(Job(product, 4, ways, GOOD), lambda job, way, why: told.append((way, why)))
    assert found == {None: 12.0 / 6, GOOD: 12.0 / 6}
    assert told == [
        (OFF, "its result is 0.100 off"), (NAN, "its result is nan off"),
        (FAILING, "RuntimeError: out of resource: shared memory"),
    ]  # fmt: skip


def test_calls_read_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_bench, "OUTLAST", 8 * 1024)
    product = Product(16, 32, torch.float16)
    call, calls = CpuBench(product).calls(Job(product, 3, (None,), None))
    assert calls == 8
    found = [call(at, None) for at in range(9)]
    assert torch.equal(found[8], found[0])
    assert not any(torch.equal(found[at], found[0]) for at in range(1, 8))
    assert found[0].shape == (3, 16)


def test_experts_are_as_many_as_memory_holds() -> None:
    some = Product(768, 2048, torch.bfloat16, experts=128)
    assert held_experts(some) == 128
    assert weight_bytes(some) == 3 * 128 * 768 * 2048 * 2
    large = Product(2048, 7168, torch.bfloat16, experts=256)
    assert weight_bytes(large) <= MOST_EXPERTS
    assert held_experts(large) == MOST_EXPERTS // (3 * 2048 * 7168 * 2)
    assert held_experts(Product(1 << 15, 1 << 15, torch.bfloat16, experts=8)) == 1
    assert weight_bytes(Product(8, 4, torch.bfloat16, gated=True)) == 2 * 2 * 8 * 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "product",
    [Product(2048, 1024, torch.bfloat16), Product(1536, 1024, torch.float16, gated=True),
     Product(512, 1024, torch.bfloat16, experts=16),
     *(Product(512, 1024, torch.bfloat16, experts=16, weight=kind) for kind in ("fp8_blocks", "int8")),
     *(Product(1024, 1024, torch.bfloat16, gated, weight="int4-128-bf16") for gated in (False, True))],
    ids=str,
)  # fmt: skip
def test_every_way_of_a_product_is_timed(product: Product) -> None:
    device = torch.device("cuda", 0)
    jobs = jobs_of(product, chip_of(device))
    told: list[tuple[Way, str]] = []
    found = measure(jobs, device, None, lambda job, way, why: told.append((way, why)), lambda at, total: None)
    assert told == []
    for job, times in zip(jobs, found, strict=True):
        assert set(times) == set(job.ways)
        assert all(0.1 < time < 1e5 for time in times.values())


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_measured_plans_give_the_product(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, product = torch.device("cuda", 0), Product(1024, 1536, torch.bfloat16, gated)
    plans = Plans(chip_of(device))
    monkeypatch.setattr(linear_triton, "plans_of", lambda device: plans)
    run = partial(measure, device=device, compilers=None, dropped=lambda *why: None, progress=lambda *at: None)
    found, choices = tune(plans, [product], run, "any")
    assert [plan.product for plan in found.plans] == [product]
    assert all(choice.microseconds < float("inf") for choice in choices)
    weight = torch.randn(1024 * (1 + gated), 1536, device=device).mul_(1536**-0.5).bfloat16()
    for rows in (1, 3, 8, 20, 64, 100, 300, 3000):
        x = torch.randn(rows, 1536, device=device).bfloat16()
        expected = x.double() @ weight.double().T
        if gated:
            gate, up = expected.bfloat16().double().chunk(2, dim=1)
            expected = gate * gate.sigmoid() * up
        made = (gated_linear if gated else linear)(x, weight)
        torch.testing.assert_close(made.double(), expected, rtol=2**-5, atol=2**-4)


@pytest.mark.gpu
def test_tiles_have_the_same_bits() -> None:
    """Whatever tiling is chosen, a row is the same."""
    device, product = torch.device("cuda", 0), Product(1024, 2048, torch.bfloat16)
    weight, x = (torch.randn(rows, 2048, device=device).mul_(2048**-0.5).bfloat16() for rows in (1024, 300))
    ways = {way for rows in (1, 16, 32, 64, 256, 1024) for way in candidates(product, rows, chip_of(device))}
    tiles = [way for way in ways if isinstance(way, Tiling)]
    first = linear_triton.multiply_by(tiles[0], x, weight, None, gated=False)
    for way in tiles[1:]:
        assert torch.equal(linear_triton.multiply_by(way, x, weight, None, gated=False), first), way
    assert not any(isinstance(way, ExpertTiling) for way in ways)


@pytest.mark.parametrize("weight", ["int4-128-bf16", "int8-32-fp16", "e2m1-16-e4m3", "int4-32-fp32"])
def test_weights_in_groups_are_timed_as_they_are(weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_bench, "OUTLAST", 0)
    product = Product(16, 64, torch.float16, weight=weight)
    ways = (GroupedTiling(8, 16, 1, 2), GroupedTiling(8, 16, 2, 2, parts=2))
    told: list[str] = []
    found = CpuBench(product).time(Job(product, 2, ways, ways[0]), lambda job, way, why: told.append(why))
    assert not told
    assert set(found) == set(ways)


@pytest.mark.parametrize("weight", SCALED)
def test_weights_of_8_bits_are_timed_as_they_are(weight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ways of such weights alone, none of which is off."""
    monkeypatch.setattr(product_bench, "OUTLAST", 0)
    product = Product(128, 256, torch.float16, weight=weight)
    ways = (Tiling(16, 16, 128, 2, 2, swap_ab=True), Tiling(16, 64, 128, 4, 2, tma=True), VectorTiling(16, 256, 4))
    told: list[str] = []
    for rows, given in ((2, ways[:2]), (1, (ways[0], ways[2]))):
        found = CpuBench(product).time(Job(product, rows, given, given[0]), lambda job, way, why: told.append(why))
        assert not told
        assert set(found) == set(given)
