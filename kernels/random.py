"""Counter-based randomness: Philox4x32-10, so that a draw is a pure function of (seed, position, token).

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the known answers of its library
are a test. The words, which a kernel must use in exactly this way to give the same tokens:

    key      = (seed & 0xffffffff, seed >> 32)                  of the choice's 64-bit seed
    counter  = (token >> 2, position, purpose, 0)               position: index in the sequence of the sampled token
    lane     = token & 3                                        which of the four output words belongs to the token

`purpose` keeps draws for different ends apart: 0 is the noise of sampling, 1 the chance of a position's draft where a
benchmark has set one (the first word of token 0). Words are held in int64, because torch has no arithmetic on unsigned
32-bit integers on every device.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF
SAMPLING, ACCEPTANCE = 0, 1  # purposes

_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1
# No draw of `gumbel` is outside these; the margin covers what float32 rounding and a device's logarithm may add.
GUMBEL_MIN = -math.log(24 * math.log(2.0)) - 1e-3
GUMBEL_MAX = 33 * math.log(2.0) + 1e-3
CACHED_BLOCKS = 1 << 14  # counters worked on at once: their words stay in a core's second-level cache


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit words per counter, as int64; counters and keys broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for turn in range(ROUNDS):
        # The products wrap at 64 bits, whose two halves are what the cipher wants; c1 and c3 keep garbage above bit 31
        # until they are xored into the words that are multiplied next, which are masked.
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((p1 >> 32) ^ c1 ^ (k0 + turn * WEYL_0)) & MASK
        c2 = ((p0 >> 32) ^ c3 ^ (k1 + turn * WEYL_1)) & MASK
        c1, c3 = p1, p0
    return c0, c1 & MASK, c2, c3 & MASK


def uniform(words: Tensor) -> Tensor:
    """float32 in (0, 1) from 32-bit words in int64: (word + 1/2) / 2**32, exact near 0, never 0 and never 1."""
    return words.float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise in float32: -log(-log(1 - u)), within GUMBEL_MIN and GUMBEL_MAX.

    Large values, which decide, come from u near 0, where float32 resolves best.
    """
    return uniform(words).neg_().log1p_().neg_().log_().neg_()


def gumbel_rows(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Noise of every token of every row: seeds and positions int64 [rows] -> float32 [rows, vocabulary]."""
    blocks = torch.arange((vocabulary + 3) // 4)
    rows = max(1, CACHED_BLOCKS // len(blocks))
    noise = torch.empty(len(seeds), vocabulary)
    for first in range(0, len(seeds), rows):
        some = slice(first, first + rows)
        words = sampling_words(seeds[some, None], positions[some, None], blocks[None, :])  # [rows, blocks, 4]
        noise[some] = gumbel(words).flatten(1)[:, :vocabulary]
    return noise


def gumbel_at(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The entries of `gumbel_rows` at chosen tokens: int64 [n] each -> float32 [n]."""
    words = sampling_words(seeds, positions, tokens >> 2)  # [n, 4]
    return gumbel(words.gather(1, (tokens & 3)[:, None])[:, 0])


def sampling_words(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Tensor:
    """The four words of each counter for sampling, int64 [..., 4]; the arguments broadcast against each other.

    By numpy, which runs these many small operations in less time than torch takes to start them.
    """
    words = words_of(seeds.numpy(), positions.numpy(), blocks.numpy(), SAMPLING)
    return torch.from_numpy(np.stack(words, -1))


def acceptance_words(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """One word for each position, of which the chance of its draft decides: int64 [n] each -> int64 [n]."""
    return words_of(seeds, positions, positions & 0, ACCEPTANCE)[0]


def words_of(seeds: Words, positions: Words, blocks: Words, purpose: int) -> tuple[Words, Words, Words, Words]:
    """The four words of each counter."""
    zero = positions & 0
    return philox((blocks, positions & MASK, zero + purpose, zero), (seeds & MASK, (seeds >> 32) & MASK))
