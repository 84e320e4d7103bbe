"""The counter RNG of kernels/random.py in Triton: the same words, bit for bit, and noise equal within float32."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from penstock.kernels import random

BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
PURPOSE = tl.constexpr(random.SAMPLING)
ACCEPTANCE = tl.constexpr(random.ACCEPTANCE)
LOG_2 = tl.constexpr(math.log(2.0))
SLACK = tl.constexpr(1e-3)  # more than float32 takes away


@triton.jit
def gumbel_noise(words):
    """Standard Gumbel noise in fp32 from uint32 words, as `kernels.random.gumbel`."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), BELOW_ONE)
    rest = 1.0 - u
    # log1p(-u) for want of one: what rounding took from 1 - u is put back by the quotient (Kahan; HP-15C, 1982).
    near = rest == 1.0
    log = tl.where(near, -u, tl.log(rest) * tl.div_rn(u, tl.where(near, 1.0, 1.0 - rest)))
    return -tl.log(-log)


@triton.jit
def noise_bound(words):
    """No less than the noise of the words, by less than 0.07 where that is large, for a fraction of its price.

    Noise is at most -log(u), as log1p(-u) is at most -u; and the bits of a float, read as a number, are its logarithm
    in base 2 with a straight line from each power of 2 to the next, which lies below.
    """
    bits = words.to(tl.float32).to(tl.int32, bitcast=True)
    return (32.0 + 127.0 - bits.to(tl.float32) * (2.0**-23)) * LOG_2 + SLACK


@triton.jit
def tile_words(seed, position, first, TILE: tl.constexpr):
    """Words of the tokens first .. first + TILE - 1, which begin at a multiple of 4: uint32 [TILE]."""
    counters = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zero = counters * 0
    a, b, c, d = tl.philox(seed, counters, zero + position.to(tl.uint32), zero + PURPOSE, zero)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def token_noise(seed, position, tokens):
    """Noise of single tokens: fp32, shaped as they are."""
    counters = (tokens >> 2).to(tl.uint32)
    zero = counters * 0
    a, b, c, d = tl.philox(seed, counters, zero + position.to(tl.uint32), zero + PURPOSE, zero)
    lane = tokens & 3
    return gumbel_noise(tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d))))


@triton.jit
def acceptance_word(seed, position):
    """The word of which the chance of a position's draft decides: a scalar, int64."""
    zero = (position * 0).to(tl.uint32)
    a, _b, _c, _d = tl.philox(seed, zero, position.to(tl.uint32), zero + ACCEPTANCE, zero)
    return a.to(tl.int64)
