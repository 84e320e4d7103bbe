"""The kernels' randomness against the reference: words bit for bit, noise within float32."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels import random
from penstock.kernels.random_triton import gumbel_noise, noise_bound, tile_words, token_noise

FULL = 0xFFFFFFFF


@triton.jit
def tile_kernel(noise, seeds, position, first, TILE: tl.constexpr):
    """Noise of a tile of tokens."""
    lanes = tl.arange(0, TILE)
    tl.store(noise + lanes, gumbel_noise(tile_words(tl.load(seeds), position, first, TILE)))


@triton.jit
def token_kernel(noise, seeds, position, tokens, TILE: tl.constexpr):
    """Noise of some tokens."""
    lanes = tl.arange(0, TILE)
    tl.store(noise + lanes, token_noise(tl.load(seeds), position, tl.load(tokens + lanes)))


@triton.jit
def noise_kernel(noise, words, TILE: tl.constexpr):
    """Noise of some words."""
    lanes = tl.arange(0, TILE)
    tl.store(noise + lanes, gumbel_noise(tl.load(words + lanes).to(tl.uint32)))


@triton.jit
def bound_kernel(bounds, words, TILE: tl.constexpr):
    """The bound of some words' noise, a tile a program."""
    lanes = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(bounds + lanes, noise_bound(tl.load(words + lanes).to(tl.uint32)))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few units in the last place, of the noise or of the 1 that it is made around."""
    assert torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234567_89ABCDEF])
@pytest.mark.parametrize("position", [0, 77, 2**31 - 1])
def test_tiles_and_single_tokens_have_the_references_noise(seed: int, position: int, device: str) -> None:
    seeds, tile, first = torch.tensor([seed], device=device), 256, 3 * 256
    expected = random.gumbel_rows(torch.tensor([seed]), torch.tensor([position]), first + tile)[0]
    noise = torch.empty(tile, device=device)
    tile_kernel[(1,)](noise, seeds, position, first, TILE=tile)
    close(noise, expected[first:])
    tokens = torch.randint(first + tile, (tile,), generator=torch.Generator().manual_seed(1)).int()
    token_kernel[(1,)](noise, seeds, position, tokens.to(device), TILE=tile)
    close(noise, expected[tokens.long()])


def test_extreme_words_are_within_the_bounds(device: str) -> None:
    words = torch.tensor([0, 1, 2, 255, 256, 2**24, 2**31, FULL - 2**8, FULL - 1, FULL] * 2)[:16]
    noise = torch.empty(16, device=device)
    noise_kernel[(1,)](noise, words.to(device), TILE=16)
    close(noise, random.gumbel(words))
    assert noise.min() >= random.GUMBEL_MIN
    assert noise.max() <= random.GUMBEL_MAX


def test_the_bound_lies_above_the_noise_and_near_large_noise(device: str) -> None:
    chance = torch.Generator().manual_seed(1)
    words = torch.cat([torch.randint(2**32, (1 << 12,), generator=chance) >> shift for shift in (0, 6, 12, 18)])
    words[:4] = torch.tensor([0, 1, FULL - 1, FULL])
    bound = torch.empty(len(words), device=device)
    bound_kernel[(len(words) // 512,)](bound, words.to(device), TILE=512)
    noise = random.gumbel(words)
    assert (bound.cpu() >= noise).all()
    decides = (noise > 5) & (words > 256)  # the half that is added to a word is left out of the bound
    assert (bound.cpu() - noise)[decides].max() < 0.07
