"""Gates of recurrent layers in Triton, an element from its own alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.states import Gates

TILE = 512


def launch_gates(a: Tensor, b: Tensor | None, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """`kernels.state_gates` by the kernel: `delta_gates` where there is b, else `time_gates`."""
    tokens, heads = a.shape
    assert a.stride(1) == 1
    assert b is None or b.stride(1) == 1
    gates = Gates(*(torch.empty((tokens, heads), dtype=torch.float32, device=a.device) for _ in range(2)))
    pdl = chip_of(a.device).pdl
    other = a if b is None else b
    gate_kernel[(triton.cdiv(tokens * heads, TILE),)](
        a, other, a_log, dt_bias, *gates, tokens * heads, a.stride(0), other.stride(0),
        HEADS=heads, DELTA=b is not None, TILE=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return gates


@triton.jit(do_not_specialize=("count",))
def gate_kernel(
    a, b, a_log, dt_bias, decay, weight, count, a_stride, b_stride,
    HEADS: tl.constexpr, DELTA: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some elements of `[tokens, heads]`."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < count
    head, token = place % HEADS, (place // HEADS).to(tl.int64)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    begin_pdl(PDL)
    x = tl.load(a + token * a_stride + head, mask=there, other=0.0).to(tl.float32) + bias
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (1.0 / 3.0)))  # of the logarithm, where a sum with 1 loses digits
    step = tl.maximum(x, 0.0) + tl.where(small < 0.01, series, tl.log(1.0 + small))  # softplus
    if DELTA:
        given = tl.load(b + token * b_stride + head, mask=there, other=0.0).to(tl.float32)
        tl.store(weight + place, tl.sigmoid(given), mask=there)
    else:
        tl.store(weight + place, step, mask=there)
    tl.store(decay + place, rate * step, mask=there)
