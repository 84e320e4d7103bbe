"""Products with weights of 4 bits by Hopper's own matrix instructions: held to double precision on a GPU of that
generation; which products they serve, on any."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks
from penstock.kernels import gluon
from penstock.kernels.chip import CHIPS, Chip
from penstock.kernels.grouped_linear import GROUPED, planes_of
from penstock.kernels.grouped_linear_triton import multiply_by
from penstock.kernels.grouped_tilings import GroupedTiling, WideTiling
from penstock.kernels.linear_tilings import Product, all_candidates, candidates, choose_grouped_tiling, fits, ruled
from penstock.kernels.quantized import GroupedWeight
from tests.kernels.grouped_weights import exact_product, grouped

RESULT = Path(benchmarks.__file__).with_name("results") / "h200" / "grouped_kernels.json"

H200 = CHIPS["sm_90"]
WAY = WideTiling(128, 64, 4, 3, 5, 2)
WIDES = (
    WideTiling(64, 64, 4, 3, 6), WideTiling(64, 128, 8, 2, 4, 3), WAY, WideTiling(128, 64, 4, 2, 4),
    WideTiling(128, 128, 8, 3, 8), WideTiling(128, 128, 4, 2, 4),
)  # fmt: skip
SHAPES = {"qkv": (6144, 4096, False), "output": (4096, 4096, False), "gate_up": (14336, 4096, True),
          "down": (4096, 14336, False)}  # fmt: skip
MOST_SUMS = 128
ROWS = (1, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 1536, 1537, 8192)


def product_of(shape: str = "gate_up", weight: str = "int4-128-bf16", dtype: torch.dtype = torch.bfloat16) -> Product:
    width, inputs, gated = SHAPES[shape]
    return Product(width, inputs, dtype, gated, weight=weight)


def sums_of(way: WideTiling, gated: bool) -> int:
    """Of a thread."""
    return way.rows * way.outputs * (2 if gated else 1) // (32 * way.warps)


def wide_rows(product: Product, chip: Chip = H200, *, invariant: bool = False) -> list[int]:
    """For which of ROWS the rules choose it."""
    plan = ruled(product, chip, invariant=invariant)
    return [rows for rows in ROWS if isinstance(plan.way(rows), WideTiling)]


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 4096), (400, 768), (272, 1152)])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int4 128 bf16", torch.bfloat16), ("int4 64 bf16 zeros", torch.bfloat16),
        ("int4 0 bf16 zeros", torch.bfloat16), ("int4 128 fp16 zeros", torch.float16),
    ],
)  # fmt: skip
def test_products(kind: str, dtype: torch.dtype, outputs: int, inputs: int, gated: bool) -> None:
    """Whoever of the programs of a tile is last, and however often: sums are added in one order."""
    hopper = gluon.load("grouped_hopper") if torch.cuda.get_device_capability() == (9, 0) else None
    if hopper is None:
        pytest.skip("this is no GPU of Hopper's generation")
    torch.manual_seed(outputs + inputs)
    weight = grouped(kind, outputs, inputs, "cuda")
    planes = planes_of(weight)
    assert planes is not None
    bias = torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(300, inputs, device="cuda").to(dtype)
    exact = exact_product(x, weight, bias, gated)
    for way in WIDES:
        if sums_of(way, gated) > MOST_SUMS:
            continue
        for rows in (way.rows, 1, way.rows - 3, 300):
            found = hopper.multiply_wide(x[:rows], planes, bias, way, gated=gated)
            error = (found.double() - exact[:rows]).norm() / exact[:rows].norm()
            assert error < 8e-3, (way, rows)
            assert torch.equal(hopper.multiply_wide(x[:rows], planes, bias, way, gated=gated), found), "counters"
            assert not planes.arrivals.any()


@pytest.mark.parametrize(("shape", "least"), [("gate_up", 33), ("down", 65), ("qkv", 129), ("output", 129)])
def test_from_where_on_they_serve(shape: str, least: int) -> None:
    """To where slices that are made dense should be as fast."""
    assert wide_rows(product_of(shape)) == [rows for rows in ROWS if least <= rows <= 1536]


def test_the_rules_follow_the_figures() -> None:
    """None of an 8B layer's products has a way that is faster by more than the noise of tuning."""
    figures = [one for one in json.loads(RESULT.read_bytes())["figures"] if one["shape"] in SHAPES]
    for rows, shape in {(one["rows"], one["shape"]) for one in figures}:
        times = {one["way"]: one["us"] for one in figures if (one["rows"], one["shape"]) == (rows, shape)}
        way = ruled(product_of(shape), H200, invariant=False).way(rows)
        words = "plan"  # the rules as they were
        if isinstance(way, WideTiling):
            sizes = way.rows, way.outputs, way.warps, way.stages, way.x_stages, way.splits
            words = "wide " + "x".join(map(str, sizes))
        best = min(time for name, time in times.items() if name.split()[0] in ("plan", "wide"))
        assert 0.94 * times[words] <= best, (rows, shape, words)


def test_a_row_of_an_invariant_product_has_one_kernel_at_any_number_of_rows() -> None:
    for shape in SHAPES:
        assert wide_rows(product_of(shape), invariant=True) == []


def test_what_they_do_not_know_is_left_to_others() -> None:
    """By the rules, and as a measured plan or a candidate."""
    known = {f"int4-{group}-bf16" for group in (64, 128, 256)}
    for name in GROUPED:
        product = product_of(weight=name)
        assert bool(wide_rows(product)) == (name in known)
        assert fits(WAY, product, H200) == (name in known)
    half = product_of(dtype=torch.float16)
    assert not fits(WAY, half, H200), "scales of bfloat16 are no numbers of float16"
    assert fits(WAY, product_of(weight="int4-128-fp16", dtype=torch.float16), H200)
    for chip in (*(chip for name, chip in CHIPS.items() if name != "sm_90"), replace(H200, tma=False),
                 replace(H200, wgmma=False), replace(H200, shared_memory=80 << 10)):  # fmt: skip
        assert wide_rows(product_of(), chip) == []
        assert not any(isinstance(way, WideTiling) for way in candidates(product_of(), 256, chip))


def test_every_program_has_inputs() -> None:
    for inputs, four in ((256, False), (1280, False), (1024, True), (1792, True)):
        product = Product(4096, inputs, torch.bfloat16, weight="int4-128-bf16")
        assert fits(WideTiling(128, 64, 4, 3, 5, 4), product, H200) == four


def test_shares_of_a_tensor_parallel_model_fill_the_processors_or_go_the_general_way() -> None:
    for ranks in (1, 2, 4, 8):
        for width, inputs, gated in SHAPES.values():
            whole = Product(width // ranks, inputs, torch.bfloat16, gated, weight="int4-128-bf16")
            for rows in wide_rows(whole):
                way = ruled(whole, H200, invariant=False).way(rows)
                assert isinstance(way, WideTiling)
                tiles = -(-rows // way.rows) * -(-whole.width // way.outputs) * way.splits
                assert tiles >= 0.75 * H200.num_sms, (ranks, rows, way)


def test_sums_of_a_tile_fit_the_registers() -> None:
    """And a gate and its up are one thread's."""
    found = [one for one in all_candidates() if isinstance(one.way, WideTiling)]
    for way, gated in ((one.way, one.gated) for one in found):
        assert isinstance(way, WideTiling)
        assert sums_of(way, bool(gated)) <= MOST_SUMS
        assert way.outputs >= 16 * way.warps
    for product in map(product_of, SHAPES):
        assert any(isinstance(way, WideTiling) for way in candidates(product, 256, H200))


@pytest.mark.parametrize("reason", ["compiler", "form", "alignment"])
def test_a_general_kernel_takes_over(reason: str, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Where the module is given up, the weight has other runs than its name says, or TMA cannot load the rows."""
    taken: list[WideTiling] = []

    def multiply_wide(x: torch.Tensor, weight: Any, bias: None, tiling: WideTiling, *, gated: bool) -> torch.Tensor:
        taken.append(tiling)
        return multiply_by(GroupedTiling(16, 32, 2, 2), x, weight, bias, gated=gated)

    there = SimpleNamespace(multiply_wide=multiply_wide)
    monkeypatch.setattr(gluon, "load", lambda name: {"grouped_hopper": there}[name])
    weight = grouped("int4 128 fp16 zeros", 48, 768, device)
    x = torch.randn(5, 768 + 8).half().to(device)
    expected = exact_product(x[:, :768], weight, None, False)
    for broken in (False, True):
        rows = x[:, :768]
        if broken and reason == "compiler":
            monkeypatch.setattr(gluon, "load", lambda name: None)
        elif broken and reason == "form":
            weight = GroupedWeight(4, 384, weight.values, weight.scales[:, :2])
            expected = exact_product(rows, weight, None, False)
        elif broken:
            rows = torch.empty(5, 769, dtype=x.dtype, device=device)[:, :768].copy_(rows)
        planes = planes_of(weight)
        assert planes is not None
        found = multiply_by(WAY, rows, planes, None, gated=False)
        assert float((found.double() - expected).norm() / expected.norm()) < 2e-3
        assert taken == [WAY], broken


def test_what_takes_over_is_what_the_rules_had_without_it() -> None:
    for shape in SHAPES:
        product = product_of(shape)
        for rows in ROWS:
            way = choose_grouped_tiling(rows, product, H200, invariant=False)
            assert not isinstance(way, WideTiling)
            assert fits(way, product, H200)
