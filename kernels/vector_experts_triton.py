"""Products of few tokens with the experts that each was sent to, in Triton, by the plain arithmetic units.

Few tokens hardly share experts, so tiles gain nothing, and pairs of a token and an expert need no order: a program
multiplies some outputs of one pair, then some of a token's sum over its pairs. These two kernels stand in place of the
four of `kernels.experts_triton`. A token's result depends on it alone, but is not to the bit that of tiles.
"""

from __future__ import annotations

from typing import TypeAlias, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.activation import SILU, activate
from penstock.kernels.activation_triton import finish_tile
from penstock.kernels.chip import chip_of
from penstock.kernels.linear_tilings import VectorTiling
from penstock.kernels.quantize import quantize, row_format
from penstock.kernels.quantized import Float8Weight, Int8Weight
from penstock.kernels.records import Activation, ExpertBiases, Routes
from penstock.kernels.scaled_linear_triton import float8_values, parts_of, readable

Weight: TypeAlias = Tensor | Float8Weight | Int8Weight
RUN = 128  # inputs side by side in a tile: those of a block of e4m3, unless its blocks have others
MOST_TOKENS, MOST_SCALED = 4, 2  # with weights of 8 bits more wait for arithmetic (H200)
SHORT = 4 << 20  # numbers of a matrix up to which several tokens gain, from launches saved (H200)


def takes_pairs(weight: object, tokens: int) -> TypeGuard[Weight]:
    """Whether this is the way of so many tokens. weight: `[held, outputs, inputs]`."""
    if not isinstance(weight, Tensor | Float8Weight | Int8Weight):
        return False
    most = MOST_TOKENS if isinstance(weight, Tensor) else MOST_SCALED
    return tokens == 1 or (1 < tokens <= most and weight.shape[1] * weight.shape[2] <= SHORT)


def tilings(weight: Weight) -> tuple[VectorTiling, VectorTiling]:
    """Of both products: within 6 % of the fastest for five shapes of experts (H200)."""
    warps = 4 if isinstance(weight, Tensor) else 2
    return VectorTiling(1, 1024, warps), VectorTiling(2, 512, warps)


def multiply_pair_by_pair(
    x: Tensor, routes: Routes, gate_up: Weight, down: Weight, first: int, biases: ExpertBiases, activation: Activation,
    *, gated: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.experts.expert_mlp` of few tokens."""
    one, two = tilings(down)
    gate = activation if gated else None
    inner = multiply_pairs(x, gate_up, biases.gate_up, routes, first, gate, one, summed=False)
    inner = inner if gated else activate(inner, activation, gated=False)
    return multiply_pairs(inner, down, biases.down, routes, first, None, two, summed=True)


def multiply_pairs(
    x: Tensor, weight: Weight, bias: Tensor | None, routes: Routes, first: int, gate: Activation | None,
    tiling: VectorTiling, *, summed: bool,
) -> Tensor:  # fmt: skip
    """A row for each pair: its token's row of x times its expert, of which the gate is taken if there is one. Or, of a
    row of x for each pair, a token's sum by its shares (`summed`). Experts that are not held give zeros."""
    tokens, chosen = routes.experts.shape
    held, outputs, inputs = weight.shape
    width = outputs // 2 if gate is not None else outputs
    kind, slope, limit, shift = gate or SILU
    form = row_format(weight)
    rows = x if form is None else quantize(x, form)
    values, x_scales = parts_of(rows)
    scaled = not isinstance(weight, Tensor)
    numbers, scales = (weight, weight) if isinstance(weight, Tensor) else (readable(weight.values), weight.scales)
    seen = "NONE" if isinstance(weight, Tensor) else weight.activations.upper()
    high, run = (weight.block if isinstance(weight, Float8Weight) else None) or (0, RUN)
    assert values.stride(1) == 1
    assert numbers.is_contiguous()
    assert scales.is_contiguous()
    out = torch.empty(tokens if summed else tokens * chosen, width, dtype=x.dtype, device=x.device)
    pdl = chip_of(x.device).pdl
    pair_kernel[(triton.cdiv(width, tiling.outputs), len(out))](
        values, values if x_scales is None else x_scales, numbers, scales, out if bias is None else bias,
        routes.experts, routes.shares, out, width, first, values.stride(0), len(values),
        HELD=held, CHOSEN=chosen, OUTPUTS=tiling.outputs, INPUTS=inputs, RUN=run, WIDE=max(1, tiling.inputs // run),
        SUMMED=summed, SEEN=seen, SCALED=scaled, HIGH=high, GATED=gate is not None, KIND=kind,
        SLOPE=slope, LIMIT=limit, SHIFT=shift, BIAS=bias is not None, PDL=pdl,
        num_warps=tiling.warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def scaled_weights(
    lines, scales, line, block, inside, SCALED: tl.constexpr, HIGH: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Some inputs of lines `[outputs, blocks, run]` in fp32, zero outside, by the scales of their blocks if they have
    any. `line` counts from the expert's first, whose scales are `scales`."""
    found = tl.load(lines, mask=inside[None, :, :], other=0.0)
    found = float8_values(found, tl.float32) if SCALED else found.to(tl.float32)
    if HIGH > 0:
        places = (line // HIGH)[:, None] * BLOCKS + block[None, :]
        found *= tl.load(scales + places, mask=(block < BLOCKS)[None, :], other=0.0)[:, :, None]
    return found


@triton.jit(do_not_specialize=("first", "rows"))
def pair_kernel(
    x, x_scales, weight, scales, bias, experts, shares, out, width, first, x_stride, rows,
    HELD: tl.constexpr, CHOSEN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, RUN: tl.constexpr,
    WIDE: tl.constexpr, SUMMED: tl.constexpr, SEEN: tl.constexpr, SCALED: tl.constexpr, HIGH: tl.constexpr,
    GATED: tl.constexpr, KIND: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of one pair, or SUMMED of one token. An iteration has WIDE blocks of RUN inputs.

    SCALED: weights are of 8 bits, with a scale for each line or, HIGH, for each block of so many lines. SEEN: how rows
    were rounded, as `Activations` say.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    own = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.minimum(output, width - 1)
    BLOCKS: tl.constexpr = (INPUTS + RUN - 1) // RUN
    PAIRS: tl.constexpr = CHOSEN if SUMMED else 1
    outputs = 2 * width if GATED else width  # of one expert
    sums = tl.zeros([OUTPUTS, WIDE, RUN], tl.float32)
    ups = sums
    added = tl.zeros([OUTPUTS], tl.float32)
    top = outputs.to(tl.int64)
    for at in tl.static_range(PAIRS):
        pair = own * PAIRS + at
        expert = tl.load(experts + pair) - first
        held = (expert >= 0) & (expert < HELD)
        expert = tl.where(held, expert, 0)
        size = tl.where(held, INPUTS, 0)  # of what is read
        row = (pair if SUMMED else pair // CHOSEN).to(tl.int64)
        top = expert.to(tl.int64) * outputs
        share = tl.where(held, tl.load(shares + pair), 0.0) if SUMMED else 1.0
        times = share
        if SEEN == "ROW":
            times *= tl.load(x_scales + row)
        elif SEEN == "STATIC":
            times *= tl.load(x_scales)
        factor = tl.full([OUTPUTS], 1.0, tl.float32)
        up_factor = factor
        own_scales = scales
        if HIGH > 0:
            own_scales += expert.to(tl.int64) * (tl.cdiv(outputs, HIGH) * BLOCKS)
        elif SCALED:
            factor = tl.load(scales + top + line)
            if GATED:
                up_factor = tl.load(scales + top + width + line)
        for turn in tl.static_range(0, BLOCKS, WIDE):
            block = turn + tl.arange(0, WIDE)
            place = block[:, None] * RUN + tl.arange(0, RUN)[None, :]
            inside = place < size
            lines = weight + (top + line)[:, None, None] * INPUTS + place[None, :, :]
            found = scaled_weights(lines, own_scales, line, block, inside, SCALED, HIGH, BLOCKS)
            values = tl.load(x + row * x_stride + place, mask=inside, other=0.0).to(tl.float32) * times
            if SEEN == "BLOCK":
                values *= tl.load(x_scales + block * rows + row, mask=block * RUN < size, other=0.0)[:, None]
            if SCALED and HIGH == 0:
                found *= factor[:, None, None]
            sums += found * values[None, :, :]
            if GATED:
                lines += width.to(tl.int64) * INPUTS
                found = scaled_weights(lines, own_scales, width + line, block, inside, SCALED, HIGH, BLOCKS)
                if SCALED and HIGH == 0:
                    found *= up_factor[:, None, None]
                ups += found * values[None, :, :]
        if BIAS and SUMMED:
            added += share * tl.load(bias + top + line).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    found = tl.sum(tl.sum(sums, 2), 1)
    if SUMMED:
        found = (found + added).to(out.dtype.element_ty)
    else:
        found = finish_tile(
            found[None, :], tl.sum(tl.sum(ups, 2), 1)[None, :], bias + top, output, width, out.dtype.element_ty, BIAS,
            GATED, KIND, SLOPE, LIMIT, SHIFT,
        )  # fmt: skip
        found = tl.reshape(found, [OUTPUTS])
    tl.store(out + own.to(tl.int64) * width + output, found, mask=output < width)
