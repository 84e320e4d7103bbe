"""How products are cut: by rules that are an H200's, fitted to the chip."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.kernels.chip import CHIPS, Chip
from penstock.kernels.linear_tilings import (
    PIPELINED_BYTES,
    SCALED,
    TURN,
    WIDE,
    ExpertTiling,
    PipelinedTiling,
    Plan,
    Product,
    Rescaled,
    SplitTiling,
    Tiling,
    VectorTiling,
    Way,
    all_candidates,
    candidates,
    describe,
    fits,
    fitted,
    ruled,
    shared_bytes,
)

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (128256, 4096))
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 64, 65, 128, 129, 256, 300, 1024, 8192, 20000)
H200 = CHIPS["sm_90"]
SMALL_H200 = replace(H200, shared_memory=99 << 10, tma=False, pdl=False, wgmma=False)
PRODUCTS = [
    *(Product(*shape, torch.bfloat16, gated) for shape in SHAPES for gated in (False, True)),
    *(
        Product(width, inputs, torch.float16, experts=experts)
        for width, inputs, experts in ((768, 2048, 128), (3584, 4096, 8))
    ),
    Product(768, 2048, torch.bfloat16, experts=128, weight="fp8_blocks"),
]


def chosen(rows: int, width: int, inputs: int = 4096, *, gated: bool = False, invariant: bool = False,
           dtype: torch.dtype = torch.bfloat16, chip: Chip = H200) -> Way:  # fmt: skip
    return ruled(Product(width, inputs, dtype, gated), chip, invariant=invariant).way(rows)


def test_the_rules_choose_what_was_measured_on_an_h200() -> None:
    """Every choice up to 8192 rows, as it was when products were cut for that chip alone."""
    plans = json.loads(Path(__file__).with_name("h200_plans.json").read_bytes())
    assert len(plans) == 48
    for width, inputs, gated, invariant, expected in plans:
        plan = ruled(Product(width, inputs, torch.bfloat16, gated), H200, invariant=invariant)
        assert [[rows, msgspec.to_builtins(way)] for rows, way in zip(plan.rows, plan.ways, strict=True)] == expected


def test_a_plan_has_a_way_for_any_rows() -> None:
    ways = tuple(VectorTiling(1, size, 4) for size in (1, 2, 3))
    plan = Plan((1, 8, 64), ways)
    assert [plan.way(rows) for rows in (0.5, 1, 2, 8, 9, 64, 65, 10**6)] == [
        ways[at] for at in (0, 0, 1, 1, 2, 2, 2, 2)
    ]


@pytest.mark.parametrize("chip", [*CHIPS.values(), SMALL_H200], ids=lambda chip: f"{chip.name}, {chip.shared_memory}")
def test_every_rule_fits_every_chip(chip: Chip) -> None:
    for product, invariant in itertools.product(PRODUCTS, (False, True)):
        for rows in ROWS:
            way = ruled(product, chip, invariant=invariant).way(rows)
            assert fits(way, product, chip), (product, rows, way)
            assert fitted(way, product, chip) == way
            for part in (way.gate_up, way.down) if isinstance(way, ExpertTiling) else (way,):
                if isinstance(part, Tiling):
                    outputs = part.outputs * (2 if product.gated and part.gated else 1)
                    assert part.rows * outputs <= 128 * 32 * part.warps, "sums in registers"
                    assert part.stages >= 2
                    assert part.inputs >= 16
                    assert chip.tma or not part.tma
                assert chip.tma or not isinstance(part, PipelinedTiling)


def test_a_chip_with_less_memory_has_shorter_pipelines() -> None:
    gated = Product(14336, 4096, torch.bfloat16, gated=True)
    l4 = CHIPS["sm_89"]
    assert ruled(gated, l4, invariant=False).way(8) == Tiling(8, 64, 64, 4, 6, swap_ab=True)
    assert ruled(gated, l4, invariant=True).way(64) == Tiling(64, 64, 128, 4, 3, swap_ab=True)
    tall = ruled(gated, l4, invariant=True).way(1024)
    assert isinstance(tall, Tiling)
    assert (tall.rows, tall.tma, tall.flat, tall.ctas_per_sm) == (128, False, False, 1)


def test_shared_memory_is_that_of_the_stages() -> None:
    """As Triton's compiler gave it, within a kilobyte, on sm_90 and on chips whose matrix units read registers."""
    for way, gated, hopper, others in (
        (Tiling(8, 64, 64, 4, 8, swap_ab=True), True, 139264, 121856),
        (Tiling(64, 64, 128, 4, 4, swap_ab=True), True, 196608, 147456),
        (Tiling(64, 64, 128, 4, 6), False, 196656, 163880),
        (Tiling(128, 256, 64, 8, 4, tma=True, gated=False), True, 196656, 147480),
    ):
        for chip, expected in (
            (H200, hopper),
            (CHIPS["sm_100"], hopper),
            (CHIPS["sm_89"], others),
            (CHIPS["sm_80"], others),
        ):
            assert 0 <= shared_bytes(way, chip, gated=gated) - expected <= 1024
    assert shared_bytes(PipelinedTiling(8, 1, 4), H200, gated=True) - 4 * 256 * 2 * (8 + 32) == 1024
    assert shared_bytes(None, H200, gated=False) == shared_bytes(VectorTiling(1, 1024, 4), H200, gated=False) == 0


def test_without_tma_nothing_uses_it() -> None:
    product = Product(4096, 4096, torch.bfloat16)
    for way in (PipelinedTiling(8, 1, 2), Tiling(64, 64, 64, 4, 2, tma=True)):
        assert fits(way, product, H200)
        assert not fits(way, product, replace(H200, tma=False))
    assert not fits(PipelinedTiling(8, 1, 2), product, replace(H200, pdl=False))


def test_invariant_products_are_tiles() -> None:
    """Neither cuBLAS nor the kernel of one row, whose sums are made in another order."""
    for dtype, rows, shape, gated in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), ROWS, SHAPES, (False, True)
    ):
        assert isinstance(chosen(rows, *shape, gated=gated, invariant=True, dtype=dtype), Tiling)


def test_one_row_of_16_bits_is_a_vector() -> None:
    for shape, gated in itertools.product(SHAPES, (False, True)):
        assert isinstance(chosen(1, *shape, gated=gated), VectorTiling)
        assert chosen(1, *shape, gated=gated, dtype=torch.float32) is None


def test_weights_of_2_to_8_rows_are_fetched_ahead() -> None:
    """All programs of a product stand on the device at once, where two turns of each fit."""
    for rows, (width, inputs), gated in itertools.product((2, 5, 8), SHAPES, (False, True)):
        if gated or width < WIDE:
            found = chosen(rows, width, inputs, gated=gated, dtype=torch.float16)
            assert isinstance(found, PipelinedTiling)
            assert rows <= found.rows
            size = PIPELINED_BYTES * found.stages * (found.rows + 16 * found.warps * (2 if gated else 1))
            assert size <= H200.shared_memory
            programs = -(-width // (16 * found.warps * H200.num_sms))
            assert found.stages == 2 or size * programs <= H200.shared_memory
    assert isinstance(chosen(8, 128256), Tiling)
    assert chosen(8, 4096, dtype=torch.float32) is None


def test_from_65_to_128_rows_every_processor_has_a_tile_or_cublas_multiplies() -> None:
    for chip in (H200, CHIPS["sm_80"]):
        widths = [width for width in range(2048, 8192, 256) if width * 4096 > 4096 * 1024]
        filled = [width for width in widths if 0.8 * chip.num_sms <= 2 * -(-width // 64) <= chip.num_sms]
        assert filled
        for width in widths:
            assert (chosen(128, width, chip=chip) is not None) == (width in filled)
    assert chosen(128, 4096, gated=True) is None
    assert chosen(129, 4096) is None
    assert chosen(128, 4096, dtype=torch.float32) is None


def test_long_products_of_many_rows_begin_when_their_turn_comes() -> None:
    for rows, width, inputs, ahead in ((64, 28672, 4096, True), (256, 4096, 1024, True), (256, 6144, 4096, False)):
        found = chosen(rows, width, inputs, invariant=True)
        assert isinstance(found, Tiling)
        assert found.pdl == ahead
    assert chosen(256, 4096) is None  # cuBLAS
    assert chosen(256, 1024, 3072) is not None


def test_ways_are_read_as_they_are_written() -> None:
    ways = dict.fromkeys(way for product in PRODUCTS for way in ruled(product, H200, invariant=False).ways)
    data = msgspec.json.encode(list(ways))
    assert msgspec.json.decode(data, type=list[Way]) == list(ways)
    assert len(set(map(describe, ways))) == len(ways)


def test_candidates_fit_and_differ() -> None:
    assert len({(one.way, one.gated, one.scaled) for one in all_candidates()}) == len(all_candidates())
    for product in PRODUCTS:
        for rows in ROWS:
            found = candidates(product, rows, H200)
            assert len(set(found)) == len(found)
            assert {isinstance(way, ExpertTiling) for way in found} <= {bool(product.experts)}
            assert all(fits(way, product, H200) for way in found)
            small = candidates(product, rows, CHIPS["sm_89"])
            assert rows == 1 or set(small) <= set(found)
            assert all(fits(way, product, CHIPS["sm_89"]) for way in small)
            for way in found:
                assert product.experts or isinstance(way, VectorTiling) == (rows == 1), "one row, and kernels overlap"
                assert not isinstance(way, PipelinedTiling) or rows <= way.rows


@pytest.mark.parametrize("weight", SCALED)
def test_weights_of_8_bits_have_ways_of_their_own(weight: str) -> None:
    for width, inputs, gated in ((6144, 4096, False), (14336, 4096, True), (4096, 14336, False)):
        product = Product(width, inputs, torch.bfloat16, gated, weight=weight)
        for chip in CHIPS.values():
            for invariant in (False, True):
                assert all(fits(way, product, chip) for way in ruled(product, chip, invariant=invariant).ways)
            assert None not in ruled(product, chip, invariant=True).ways
        for rows in ROWS:
            found = candidates(product, rows, H200)
            assert found or rows > 512
            for way in found:
                assert not isinstance(way, SplitTiling) or (weight in ("fp8", "fp8_blocks") and rows <= way.rows)
                assert not isinstance(way, Rescaled | PipelinedTiling) or weight == "fp8"
                assert not isinstance(way, Tiling) or way.inputs == TURN, "sums of e4m3 are fp32 after as many inputs"
            assert not any(isinstance(way, SplitTiling) for way in candidates(product, rows, CHIPS["sm_100"]))


def test_few_rows_of_e4m3_share_inputs_where_outputs_are_few() -> None:
    """On Hopper, whose kernel of them has its first weights under way before the rows are known."""

    def way(rows: int, width: int, inputs: int, weight: str = "fp8", *, gated: bool = False) -> Way:
        return ruled(Product(width, inputs, torch.bfloat16, gated, weight=weight), H200, invariant=False).way(rows)

    for rows, height in ((1, 8), (8, 8), (9, 16), (32, 32)):
        assert way(rows, 6144, 4096) == way(rows, 6144, 4096, "fp8_blocks") == SplitTiling(height, 4, 4)
        assert way(rows, 6144, 1024) == SplitTiling(height, 1, 4), "a share of inputs is worth a program"
        assert way(rows, 8512, 4096) == SplitTiling(height, 1, 4), "each SM has outputs enough"
    assert way(64, 4096, 4096) == SplitTiling(64, 1, 3), "each program fetches the rows of its share"
    assert way(64, 4096, 14336) == SplitTiling(64, 4, 3)
    assert [way(rows, 14336, 4096, gated=True) for rows in (8, 64)] == [SplitTiling(8, 1, 3), SplitTiling(64, 1, 2)]
    for other in (
        way(64, 4096, 4096, "fp8_blocks"),
        way(8, WIDE, 4096),
        way(65, 4096, 4096),
        way(8, 4096, 4096, "int8"),
    ):
        assert isinstance(other, Tiling), "sums of so many blocks spill, outputs fill the device, another format's"
    half = replace(H200, shared_memory=99 << 10)
    gated = Product(14336, 4096, torch.bfloat16, gated=True, weight="fp8")
    assert isinstance(ruled(gated, half, invariant=False).way(64), Tiling), "a ring of one stage is none"
    for chip in CHIPS.values():
        for invariant in (False, True):
            ways = ruled(Product(6144, 4096, torch.bfloat16, weight="fp8"), chip, invariant=invariant).ways
            assert any(isinstance(one, SplitTiling) for one in ways) == (chip.wgmma and not invariant)
