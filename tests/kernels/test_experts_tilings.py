"""How products with experts are cut: tiles grow with the tokens that an expert has on average."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec.structs import replace

from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_tilings import BY_MEAN, SCALED_BY_MEAN, SINGLE, ExpertTiling, Product, Way, fitted, ruled

LOWEST, LOW, MIDDLE, HIGH = (tiling for _, tiling in BY_MEAN)
TOKENS = (1, 2, 8, 64, 128, 256, 512, 1024, 8192)


def chosen(pairs: int, experts: int, dtype: torch.dtype) -> Way:
    product = Product(768, 2048, dtype, experts=experts)
    return ruled(product, CHIPS["sm_90"], invariant=False).way(pairs / experts)


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    found = [chosen(8 * tokens, 128, torch.bfloat16) for tokens in TOKENS]
    assert found == [*[LOWEST] * 5, LOW, MIDDLE, *[HIGH] * 2]
    rows = [tiling.down.rows for _, tiling in BY_MEAN]
    assert rows == sorted(set(rows))


@pytest.mark.parametrize(("most", "tiling"), BY_MEAN[:-1])
def test_borders_belong_to_the_smaller_tiles(most: int, tiling: ExpertTiling) -> None:
    for experts in (8, 128):
        assert chosen(most * experts, experts, torch.float16) == tiling
        assert chosen(most * experts + 1, experts, torch.float16) != tiling


@pytest.mark.parametrize("pairs", [1, 8, 65536])
def test_single_precision_has_one_tiling(pairs: int) -> None:
    assert chosen(pairs, 8, torch.float32) == ExpertTiling(SINGLE, SINGLE)


@pytest.mark.skipif(not __debug__, reason="an assertion")
def test_both_products_have_the_same_tiles_of_rows() -> None:
    with pytest.raises(AssertionError):
        ExpertTiling(LOW.gate_up, HIGH.down)


def test_rows_lie_in_order_where_a_chip_and_a_format_have_the_kernel() -> None:
    """Elsewhere the same tiles are taken from wherever rows lie."""
    mixture = Product(768, 2048, torch.bfloat16, experts=128, weight="fp8_blocks")
    for name, product, expected in (
        ("sm_90", mixture, True),
        ("sm_100", mixture, False),
        ("sm_89", mixture, False),
        ("sm_90", replace(mixture, weight="fp8"), False),
        ("sm_90", replace(mixture, weight="int8"), False),
        ("sm_90", replace(mixture, width=704), False),
        ("sm_90", replace(mixture, inputs=2176), False),
        ("sm_90", replace(mixture, dtype=torch.float32), False),
    ):
        many = ruled(product, CHIPS[name], invariant=False).way(64)
        assert isinstance(many, ExpertTiling)
        assert (many.sorted, many.down.rows) == (expected, 64)
        few = ruled(product, CHIPS[name], invariant=False).way(8)
        assert isinstance(few, ExpertTiling)
        assert not few.sorted
    small = dataclasses.replace(CHIPS["sm_90"], shared_memory=200 << 10)
    assert fitted(SCALED_BY_MEAN[-1][1], mixture, small) == replace(SCALED_BY_MEAN[-1][1], sorted=False)
