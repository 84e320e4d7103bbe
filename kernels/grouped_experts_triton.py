"""Products of tokens with experts whose weights have groups of 4 or 8 bits, in Triton: tiles of `experts_triton`.

Weights are in planes (`kernels.grouped_linear`), of all experts one behind the other, and become 16-bit numbers in
registers. They are multiplied with their scales where those are numbers of their type, else a group's sum is, in fp32.
Groups are added in order: a row is the same to the last bit in every tiling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.activation import SILU
from penstock.kernels.activation_triton import finish_tile
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_linear import PlaneWeight, scales_exactly
from penstock.kernels.grouped_linear_triton import COMPILED, multiply_pairs, scale_of, unpack, zero_of
from penstock.kernels.linear_tilings import Tiling
from penstock.kernels.records import Activation
from penstock.kernels.routing_triton import Schedule, load_tile_pairs


def multiply_planes(
    x: Tensor, weight: PlaneWeight, bias: Tensor | None, schedule: Schedule, tiling: Tiling, chosen: int,
    gate: Activation | None, held: int,
) -> Tensor:  # fmt: skip
    """`kernels.experts_triton.multiply_tiles` with weights in planes, `[held * outputs, inputs]`."""
    form, inputs = weight.form, weight.inputs
    outputs = weight.shape[0] // held
    width = outputs // 2 if gate is not None else outputs
    kind, slope, limit, shift = gate or SILU
    if weight.order is not None:
        x = x[:, weight.order]
    assert x.stride(1) == 1
    out = torch.empty(len(schedule.order), width, dtype=x.dtype, device=x.device)
    columns = triton.cdiv(width, tiling.outputs)
    pdl = chip_of(x.device).pdl
    plane_expert_kernel[(columns * len(schedule.tiles),)](
        x, weight.values, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        x if weight.factors is None else weight.factors, x if bias is None else bias,
        schedule.order, schedule.tiles, schedule.total, out, width, inputs, weight.shape[0], x.stride(0), columns,
        CHOSEN=chosen, ROWS=tiling.rows, OUTPUTS=tiling.outputs, **form.constants,
        ZEROS=weight.zeros is not None, FACTORS=weight.factors is not None,
        GATED=gate is not None, KIND=kind, SLOPE=slope, LIMIT=limit, SHIFT=shift, BIAS=bias is not None,
        EVEN=inputs % form.block == 0, SCALED=scales_exactly(form.name, x.dtype), COMPILED=COMPILED, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def add_groups(
    sums, numbers, words, zero_words, x_lines, block, inputs,
    RUN: tl.constexpr, PLANES: tl.constexpr, SCALES: tl.constexpr, NUMBERS: tl.constexpr, SCALE: tl.constexpr,
    ZEROS: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """sums and the products of a block of weights, `[outputs, rows]`. SCALED: of values times their scales."""
    TYPE: tl.constexpr = x_lines.dtype.element_ty
    places = tl.arange(0, RUN)
    for at in tl.static_range(SCALES):
        zero = zero_of(zero_words, at, NUMBERS, ZEROS)[:, None]
        scale = scale_of(words, at, SCALE)[:, None]
        found = sums if SCALED else tl.zeros(sums.shape, tl.float32)
        for plane in tl.static_range(at * PLANES // SCALES, (at + 1) * PLANES // SCALES):
            inner = (block * PLANES + plane) * RUN + places
            if EVEN:
                values = tl.load(x_lines[None, :] + inner[:, None])
            else:
                values = tl.load(x_lines[None, :] + inner[:, None], mask=(inner < inputs)[:, None], other=0.0)
            weights = unpack(numbers, zero, plane, NUMBERS, TYPE, COMPILED)
            if SCALED:
                weights = multiply_pairs(weights, scale.to(TYPE), COMPILED)
            found = tl.dot(weights, values, found, input_precision="ieee")
        sums = found if SCALED else sums + found * scale
    return sums


@triton.jit(do_not_specialize=("columns",))
def plane_expert_kernel(
    x, values, scales, zeros, factors, bias, order, tiles, count, out, width, inputs, lines, x_stride, columns,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr,
    SCALES: tl.constexpr, NUMBERS: tl.constexpr, SCALE: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`kernels.experts_triton.expert_kernel` of weights in planes. GATED: of 16 lines 8 are gates and 8 their ups."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0) // columns
    if tile >= tl.load(count):
        return
    expert, row, size, pair = load_tile_pairs(order, tiles, tile, ROWS)
    first = tl.program_id(0) % columns * OUTPUTS
    LINES: tl.constexpr = 2 * OUTPUTS if GATED else OUTPUTS
    line = tl.arange(0, LINES)
    outputs = width
    if GATED:
        line = tl.minimum(first + line // 16 * 8 + line % 8, width - 1) + line % 16 // 8 * width
        outputs = 2 * width
    else:
        line = tl.minimum(first + line, width - 1)
    line += expert * outputs
    blocks = tl.cdiv(inputs, PLANES * RUN)
    x_lines = x + pair // CHOSEN * x_stride
    value_lines = values + (line.to(tl.int64) * (blocks * RUN))[:, None] + tl.arange(0, RUN)[None, :]
    sums = tl.zeros([LINES, ROWS], tl.float32)
    for block in range(blocks):
        words = tl.load(scales + block * lines + line)
        zero_words = words
        if ZEROS:
            zero_words = tl.load(zeros + block * lines + line)
        numbers = tl.load(value_lines + block * RUN)
        sums = add_groups(
            sums, numbers, words, zero_words, x_lines, block, inputs,
            RUN, PLANES, SCALES, NUMBERS, SCALE, ZEROS, EVEN, SCALED, COMPILED,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if FACTORS:
        sums *= tl.load(factors + line)[:, None]
    ups = sums
    if GATED:
        halves = sums.reshape(LINES // 16, 2, 8, ROWS).permute(0, 2, 3, 1)
        gates, ups = tl.split(halves)
        sums = gates.reshape(OUTPUTS, ROWS)
        ups = ups.reshape(OUTPUTS, ROWS)
    output = first + tl.arange(0, OUTPUTS)
    found = finish_tile(
        sums.trans(), ups.trans(), bias + expert * outputs, output, width, out.dtype.element_ty, BIAS, GATED, KIND,
        SLOPE, LIMIT, SHIFT,
    )  # fmt: skip
    real = (row < size)[:, None] & (output < width)[None, :]
    tl.store(out + pair[:, None] * width + output[None, :], found, mask=real)
