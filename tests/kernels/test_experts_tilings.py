"""How products with experts are cut: tiles fit the chip, and an invariant product has nothing but tiles."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.experts_tilings import (
    FEW_PAIRS,
    HIGH,
    LOW,
    MIDDLE,
    SINGLES,
    ExpertTiling,
    PairTiling,
    choose_expert_tiling,
)
from kernels.linear_tilings import MEMORY, Tiling

MODELS = ((128, 8, 768, 2048), (8, 2, 14336, 4096), (128, 8, 192, 2048), (8, 2, 3584, 4096))  # with shares of 4 ranks
TOKENS = (1, 2, 4, 8, 16, 64, 128, 256, 1024, 8192)


def test_invariant_products_are_tiles() -> None:
    for (experts, chosen, width, hidden), tokens in itertools.product(MODELS, TOKENS):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = choose_expert_tiling(tokens * chosen, experts, width, hidden, dtype, invariant=True)
            assert isinstance(found, ExpertTiling)


def test_few_pairs_are_products_of_their_own() -> None:
    for experts, chosen, width, hidden in MODELS:
        for tokens in TOKENS:
            found = choose_expert_tiling(tokens * chosen, experts, width, hidden, torch.bfloat16, invariant=False)
            few = tokens * chosen <= min(FEW_PAIRS, experts)
            assert isinstance(found, PairTiling) == few
    assert choose_expert_tiling(8, 8, 14336, 4096, torch.float32, invariant=False) is SINGLES


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    found = [choose_expert_tiling(8 * tokens, 128, 768, 2048, torch.bfloat16, invariant=True) for tokens in TOKENS]
    assert found == [LOW] * 7 + [MIDDLE] + [HIGH] * 2


def test_ranks_cut_alike() -> None:
    """A rank that holds some experts alone has the tiles that all of them would have."""
    whole = choose_expert_tiling(512, 128, 768, 2048, torch.bfloat16, invariant=False)
    assert choose_expert_tiling(512, 128, 192, 2048, torch.bfloat16, invariant=False) == whole


@pytest.mark.parametrize("tiling", [LOW, MIDDLE, HIGH])
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
