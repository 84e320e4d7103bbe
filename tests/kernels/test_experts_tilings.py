"""How products with experts are cut: tiles grow with the tokens that an expert has on average."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.chip import CHIPS
from penstock.kernels.linear_tilings import BY_MEAN, SINGLE, ExpertTiling, Product, Way, ruled

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
