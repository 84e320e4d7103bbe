"""Products of tokens with experts whose weights are quantized, in Triton: tiles of `kernels.experts_triton`.

Rows of 8 bits are multiplied with weights of 8 bits by matrix instructions whose sums are kept short: those of Hopper
have few bits, so every block of inputs is summed by itself, scaled and added up in fp32. The same blocks in every
tiling make the same bits in every tiling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels import gluon
from penstock.kernels.activation import SILU, activate
from penstock.kernels.activation_triton import finish_tile
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_linear import PlaneWeight
from penstock.kernels.linear_tilings import ExpertTiling, Tiling
from penstock.kernels.linear_triton import line_pointers, load_tile, load_weights, tma_compatible
from penstock.kernels.low_rank_experts_triton import Added
from penstock.kernels.quantize import quantize, row_format
from penstock.kernels.quantize_triton import empty_rows, quantize_pairs, rounded, scales_of
from penstock.kernels.quantized import (
    FLOAT8,
    Float8Weight,
    Int8Weight,
    QuantizedRows,
    QuantizedWeight,
    RowFormat,
    Rows,
)
from penstock.kernels.records import Activation, ExpertBiases
from penstock.kernels.routing_triton import Schedule, load_tile_pairs, sort_pairs
from penstock.kernels.scaled_linear_triton import float8_values, outer, readable


def multiply_pairs(
    x: Tensor, gate_up: QuantizedWeight, down: QuantizedWeight, schedule: Schedule, tiling: ExpertTiling, chosen: int,
    biases: ExpertBiases, activation: Activation, added: Added, *, gated: bool = True,
) -> Tensor:  # fmt: skip
    """Both products: a row `[hidden]` for each pair."""
    form, inner_form = row_format(gate_up), row_format(down)
    rows = x if form is None else quantize(x, form)
    gate = activation if gated and added.adapters is None else None
    tile_form = inner_form if gate is not None else None  # rows are rounded behind the activation
    if inner_form is not None and inner_form.scale is None and inner_form.block != tiling.gate_up.outputs:
        tile_form = None  # a scale is of more or fewer numbers than a tile has
    inner = multiply_scaled_tiles(
        rows, gate_up, biases.gate_up, schedule, tiling.gate_up, chosen, gate, x.dtype,
        tile_form,
    )  # fmt: skip
    plain: Rows = inner
    if isinstance(inner, Tensor) and gate is None:
        added.to_gate_up(inner, x)
        plain = inner = activate(inner, activation, gated=gated)
    if isinstance(inner, Tensor) and inner_form is not None:
        inner = quantize(inner, inner_form)
    lines = multiply_scaled_tiles(inner, down, biases.down, schedule, tiling.down, 1, None, x.dtype, None)
    assert isinstance(lines, Tensor)
    if isinstance(plain, Tensor):
        added.to_down(lines, plain)
    return lines


def multiply_in_order(
    x: Tensor, experts: Tensor, gate_up: Tensor | QuantizedWeight | PlaneWeight,
    down: Tensor | QuantizedWeight | PlaneWeight, first: int,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Both products of gated experts, SiLU, by `kernels.experts_hopper`: a row `[hidden]` for each pair, and where each
    pair's stands. None where this Triton does not compile it, or the weights are not in blocks of 128 by 128."""
    hopper, one, two = gluon.load("experts_hopper"), in_blocks(gate_up), in_blocks(down)
    if hopper is None or one is None or two is None:
        return None
    form, held = RowFormat(FLOAT8, hopper.BLOCK.value), len(two.values)
    places = torch.empty(experts.numel(), dtype=torch.int32, device=x.device)
    schedule = sort_pairs(experts, first, held, hopper.GROUPS * hopper.ROWS, places=places)
    inner = hopper.multiply_blocks(quantize_pairs(x, form, experts, places, first, held), one, schedule, form)
    return hopper.multiply_blocks(inner, two, schedule, None), places


def in_blocks(weight: Tensor | QuantizedWeight | PlaneWeight) -> Float8Weight | None:
    """The weight, if it and its rows are e4m3 in blocks of 128 by 128, or 128."""
    if isinstance(weight, Float8Weight) and weight.block == (128, 128) and weight.activations == "block":
        return weight
    return None


def multiply_scaled_tiles(
    x: Tensor | QuantizedRows, weight: QuantizedWeight, bias: Tensor | None, schedule: Schedule,
    tiling: Tiling, chosen: int, gate: Activation | None, dtype: torch.dtype, form: RowFormat | None,
) -> Tensor | QuantizedRows:  # fmt: skip
    """`kernels.experts_triton.multiply_tiles` with weights of 8 bits. form: of the result; None:
    dtype."""
    held, outputs, inputs = weight.shape
    width = outputs // 2 if gate is not None else outputs
    kind, slope, limit, shift = gate or SILU
    assert isinstance(weight, Float8Weight | Int8Weight)
    block = weight.block if isinstance(weight, Float8Weight) else None
    values = x.values if isinstance(x, QuantizedRows) else x
    size = tiling.inputs
    if block is not None:
        size = block[1]
        assert gate is None or width % block[0] == 0
    assert values.stride(1) == 1
    assert weight.values.is_contiguous()
    assert weight.scales.is_contiguous()
    lines = readable(weight.values).view(held * outputs, inputs)
    tma = tiling.tma and tma_compatible(lines)
    if form is None:
        out: Tensor | QuantizedRows = torch.empty(len(schedule.order), width, dtype=dtype, device=values.device)
    else:
        assert form.scale is not None or form.block == tiling.outputs
        out = empty_rows(len(schedule.order), width, form, values.new_empty(0, dtype=dtype))
    columns = triton.cdiv(width, tiling.outputs)
    given = weight.input_scale
    pdl = chip_of(values.device).pdl
    scaled_expert_kernel[(columns * len(schedule.tiles),)](
        values, x.scales if isinstance(x, QuantizedRows) else weight.scales if given is None else given,
        TensorDescriptor(lines, list(lines.shape), [inputs, 1], [tiling.outputs, size]) if tma else lines,
        weight.scales, weight.scales if bias is None else bias,
        schedule.order, schedule.tiles, schedule.total, *(out[:2] if isinstance(out, QuantizedRows) else (out, out)),
        width, inputs, values.stride(0), columns, len(values), len(schedule.order),
        CHOSEN=chosen, ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=size, SWAP_AB=tiling.swap_ab,
        BLOCK=0 if block is None else block[0], STATIC=given is not None,
        PLAIN=weight.activations == "none", ROUND_OUT=form is not None,
        STATIC_OUT=form is not None and form.scale is not None,
        GATED=gate is not None, KIND=kind, SLOPE=slope, LIMIT=limit, SHIFT=shift, BIAS=bias is not None,
        DTYPE=getattr(tl, str(dtype).removeprefix("torch.")), TMA=tma, EVEN=inputs % size == 0, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def add_scaled(values, weights, row_scale, scale, sums, SWAP_AB: tl.constexpr, VECTOR: tl.constexpr):
    """sums + values @ weights by the scales of rows and of all outputs, VECTOR: of each; SWAP_AB: turned over."""
    weights = float8_values(weights, values.dtype) if weights.dtype != values.dtype else weights
    if VECTOR:
        factors = outer(row_scale, scale, SWAP_AB)
    elif SWAP_AB:
        factors = (row_scale * scale)[None, :]
    else:
        factors = (row_scale * scale)[:, None]
    if SWAP_AB:
        found = tl.dot(weights, values, input_precision="ieee")
    else:
        found = tl.dot(values, weights, input_precision="ieee")
    return sums + found.to(tl.float32) * factors


@triton.jit
def block_scale_lines(scales, expert, first, output, outputs, blocks, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Where the scales of a tile's outputs begin: of all, VECTOR: of each."""
    block = tl.minimum(output, outputs - 1) // BLOCK if VECTOR else first // BLOCK
    return scales + (expert * tl.cdiv(outputs, BLOCK) + block).to(tl.int64) * blocks


@triton.jit(do_not_specialize=("columns", "x_rows", "out_rows"))
def scaled_expert_kernel(
    x, x_scales, weight, scales, bias, order, tiles, count, out, out_scales, width, inputs, x_stride, columns,
    x_rows, out_rows,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAP_AB: tl.constexpr,
    BLOCK: tl.constexpr, STATIC: tl.constexpr, PLAIN: tl.constexpr, ROUND_OUT: tl.constexpr,
    STATIC_OUT: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`kernels.experts_triton.expert_kernel` of 8 bits.

    BLOCK: outputs of a weight's scale, which is of a block of inputs, as are those of rows then; 0: an output's, and a
    row has one or, STATIC, all have.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0) // columns
    if tile >= tl.load(count):
        return
    expert, line, size, pair = load_tile_pairs(order, tiles, tile, ROWS)
    row = pair // CHOSEN
    first = tl.program_id(0) % columns * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    outputs = 2 * width if GATED else width
    top = expert * outputs
    x_lines = x + row * x_stride
    sums = tl.zeros([OUTPUTS, ROWS] if SWAP_AB else [ROWS, OUTPUTS], tl.float32)
    ups = sums
    ones = tl.full([ROWS], 1.0, tl.float32)
    lines, up_lines = line_pointers(weight, top + tl.minimum(output, width - 1), width, inputs, TMA)
    blocks = tl.cdiv(inputs, INPUTS)
    VECTOR: tl.constexpr = BLOCK > 0 and BLOCK % OUTPUTS != 0
    if BLOCK:
        block_lines = block_scale_lines(scales, expert, first, output, outputs, blocks, BLOCK, VECTOR)
        up_block_lines = block_lines + width // BLOCK * blocks
    row_scale = ones
    scale = tl.full([OUTPUTS], 1.0, tl.float32) if VECTOR else 1.0
    up_scale = scale
    for start in range(0, inputs, INPUTS):
        if BLOCK:
            block = start // INPUTS
            scale = tl.load(block_lines + block)
            if GATED:
                up_scale = tl.load(up_block_lines + block)
            if not PLAIN:
                row_scale = tl.load(x_scales + block * x_rows + row)
        values = load_tile(x_lines, start, inputs, INPUTS, EVEN, SWAP_AB)
        weights = load_weights(weight, lines, top + first, start, inputs, INPUTS, EVEN, not SWAP_AB, TMA)
        sums = add_scaled(values, weights, row_scale, scale, sums, SWAP_AB, VECTOR)
        if GATED:
            weights = load_weights(weight, up_lines, top + width + first, start, inputs, INPUTS, EVEN, not SWAP_AB, TMA)
            ups = add_scaled(values, weights, row_scale, up_scale, ups, SWAP_AB, VECTOR)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP_AB:
        sums = sums.trans()
        ups = ups.trans()
    real = output < width
    if not BLOCK:
        own = ones
        if STATIC:
            own *= tl.load(x_scales)
        elif not PLAIN:
            own *= tl.load(x_scales + row)
        sums *= own[:, None] * tl.load(scales + top + output, mask=real, other=0.0)[None, :]
        if GATED:
            ups *= own[:, None] * tl.load(scales + top + width + output, mask=real, other=0.0)[None, :]
    found = finish_tile(sums, ups, bias + top, output, width, DTYPE, BIAS, GATED, KIND, SLOPE, LIMIT, SHIFT)
    if ROUND_OUT:
        found = round_tile(found, out, out_scales, pair, line < size, out_rows, first, OUTPUTS, STATIC_OUT)
    tl.store(out + pair[:, None] * width + output[None, :], found, mask=(line < size)[:, None] & real[None, :])


@triton.jit
def round_tile(
    tile, out, scales, pair, there, rows, first, OUTPUTS: tl.constexpr, STATIC: tl.constexpr
):  # fmt: skip
    """A tile of results in out's type; the scale of each of its rows is written, but where one is given (STATIC)."""
    plain = tile.to(tl.float32)
    if STATIC:
        scale = tl.zeros([tile.shape[0]], tl.float32) + tl.load(scales)
    else:
        scale = scales_of(plain, out.dtype.element_ty)
        tl.store(scales + first // OUTPUTS * rows + pair, scale, mask=there)
    return rounded(plain, scale, out.dtype.element_ty)
