"""How products with experts are cut: tiles fit the chip, and grow with the tokens that an expert has on average."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.linear_tilings import BY_MEAN, MEMORY, SINGLE, ExpertTiling, Tiling, choose_expert_tiling

LOWEST, LOW, MIDDLE, HIGH = (tiling for _, tiling in BY_MEAN)
TOKENS = (1, 2, 8, 64, 128, 256, 512, 1024, 8192)


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    found = [choose_expert_tiling(8 * tokens, 128, torch.bfloat16) for tokens in TOKENS]
    assert found == [*[LOWEST] * 5, LOW, MIDDLE, *[HIGH] * 2]
    rows = [tiling.down.rows for _, tiling in BY_MEAN]
    assert rows == sorted(set(rows))


@pytest.mark.parametrize(("most", "tiling"), BY_MEAN[:-1])
def test_borders_belong_to_the_smaller_tiles(most: int, tiling: ExpertTiling) -> None:
    for experts in (8, 128):
        assert choose_expert_tiling(most * experts, experts, torch.float16) is tiling
        assert choose_expert_tiling(most * experts + 1, experts, torch.float16) is not tiling


@pytest.mark.parametrize("pairs", [1, 8, 65536])
def test_single_precision_has_one_tiling(pairs: int) -> None:
    assert choose_expert_tiling(pairs, 8, torch.float32) == ExpertTiling(SINGLE, SINGLE)


@pytest.mark.parametrize("tiling", [LOWEST, LOW, MIDDLE, HIGH])
def test_tiles_fit_the_chip(tiling: ExpertTiling) -> None:
    def check(one: Tiling, outputs: int) -> None:
        assert 2 * (one.rows + outputs) * one.inputs * one.stages <= MEMORY
        assert one.rows * outputs <= 128 * 32 * one.warps  # sums in registers

    assert tiling.gate_up.rows == tiling.down.rows
    check(tiling.gate_up, 2 * tiling.gate_up.outputs)
    check(tiling.down, tiling.down.outputs)


@pytest.mark.skipif(not __debug__, reason="an assertion")
def test_both_products_have_the_same_tiles_of_rows() -> None:
    with pytest.raises(AssertionError):
        ExpertTiling(LOW.gate_up, HIGH.down)
