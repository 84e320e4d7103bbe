"""Products of rows with weights of 8 bits, both with scales, in Triton: by tiles, and by the plain units for one row.

E4M3 and integers are multiplied by the matrix units as they are. Hopper's keep few bits of a sum of E4M3 products, so
each 128 inputs are added to a sum of fp32. Scales of blocks are taken in there, others once at the end. A row's result
is the same to the last bit in every tiling, alone or among others: no tile cuts the inputs, all turns are as long, and
integers are added without rounding.

Weights alone may be E4M3: they are made the rows' type in registers. Chips before 8.9 read them as bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.kernels.activation_triton import gate_values
from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.linear_tilings import Tiling, VectorTiling
from penstock.kernels.linear_triton import load_tile, load_tma_tile, store_tile
from penstock.kernels.quantized import Float8Weight, Int8Weight, QuantizedRows, Rows

RESCALED = 1024  # outputs of a program


def readable(weight: Tensor) -> Tensor:
    """Values as this chip's kernels take them."""
    chip = chip_of(weight.device)
    bytes_alone = weight.dtype is torch.float8_e4m3fn and chip.runs_triton and not chip.float8
    return weight.view(torch.uint8) if bytes_alone else weight


def parts_of(x: Rows) -> tuple[Tensor, Tensor | None]:
    return (x, None) if isinstance(x, Tensor) else (x.values, x.scales)


def forms(x: Rows, weight: Float8Weight | Int8Weight, gated: bool) -> dict[str, object]:
    """What kernels are compiled for: what of the rows has a scale each, and the outputs and inputs of the weight's."""
    high, wide = (weight.block if isinstance(weight, Float8Weight) else None) or (0, 0)
    assert not high or not gated or weight.shape[0] // 2 % high == 0
    if isinstance(x, Tensor):
        each = "none"
    else:
        each = "block" if x.scales.shape[1] > 1 else "row" if x.scales.stride(0) else "all"
    return {
        "EACH": each, "INTEGERS": isinstance(weight, Int8Weight), "HIGH": high, "WIDE": wide, "GATED": gated
    }  # fmt: skip


def multiply_scaled_vector(
    x: Rows, weight: Float8Weight | Int8Weight, bias: Tensor | None, tiling: VectorTiling, *, gated: bool
) -> Tensor:
    """The product of one row `[1, inputs]`. Weights must have been complete when the kernel before this one began."""
    values, x_scales = parts_of(x)
    width, inputs = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    assert values.shape == (1, inputs)
    out = torch.empty(1, width, dtype=x.dtype, device=values.device)
    pdl = chip_of(values.device).pdl
    scaled_vector_kernel[(triton.cdiv(width, tiling.outputs),)](
        values, readable(weight.values), weight.scales if x_scales is None else x_scales, weight.scales,
        out if bias is None else bias, out, width, inputs, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs,
        BIAS=bias is not None, PDL=pdl, num_warps=tiling.warps, launch_pdl=pdl, **forms(x, weight, gated),
    )  # fmt: skip
    return out


def multiply_scaled_tiles(
    x: Rows, weight: Float8Weight | Int8Weight, bias: Tensor | None, tiling: Tiling, *, gated: bool
) -> Tensor:
    """The product of some rows `[rows, inputs]`, in tiles by plain loads or by TMA, whose rows and weights must be
    `tma_compatible`."""
    values, x_scales = parts_of(x)
    rows, inputs = values.shape
    width = weight.shape[0] // (2 if gated else 1)
    turn = min(tiling.inputs, weight_block(weight) or tiling.inputs)
    assert values.stride(1) == 1
    out = torch.empty(rows, width, dtype=x.dtype, device=values.device)
    chip = chip_of(values.device)
    pdl = tiling.pdl and chip.pdl
    weights, scales = readable(weight.values), weight.scales if x_scales is None else x_scales
    named = forms(x, weight, gated) | {
        "ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": turn, "SWAP_AB": tiling.swap_ab,
        "BIAS": bias is not None, "PDL": pdl, "num_warps": tiling.warps, "num_stages": tiling.stages,
        "launch_pdl": pdl,
    }  # fmt: skip
    high, wide = triton.cdiv(rows, tiling.rows), triton.cdiv(width, tiling.outputs)
    others = scales, weight.scales, out if bias is None else bias, out, rows, width, inputs
    if not tiling.tma:
        scaled_tile_kernel[(high, wide)](values, weights, *others, values.stride(0), EVEN=inputs % turn == 0, **named)
        return out
    scaled_tma_kernel[(min(high * wide, tiling.ctas_per_sm * chip.num_sms),)](
        TensorDescriptor(values, [rows, inputs], [values.stride(0), 1], [tiling.rows, turn]),
        TensorDescriptor(weights, list(weights.shape), [inputs, 1], [tiling.outputs, turn]),
        *others, FLAT=tiling.flat, **named,
    )  # fmt: skip
    return out


@lru_cache(maxsize=16)
def unit_of(device: torch.device) -> Tensor:
    """The scale of products that are scaled afterwards."""
    return torch.ones((), device=device)


def multiply_rescaled(
    x: QuantizedRows, weight: Float8Weight | Int8Weight, bias: Tensor | None, *, gated: bool
) -> Tensor:
    """The library's product without scales, then those of rows and outputs, bias and gate in one kernel."""
    rows, outputs = len(x.values), weight.shape[0]
    unit = unit_of(x.values.device)
    sums = torch._scaled_mm(x.values, weight.values.t(), unit, unit, out_dtype=torch.float32, use_fast_accum=True)
    width = outputs // (2 if gated else 1)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.values.device)
    pdl = chip_of(x.values.device).pdl
    rescale_kernel[(rows, triton.cdiv(width, RESCALED))](
        sums, x.scales, weight.scales, out if bias is None else bias, out, WIDTH=width, TILE=RESCALED,
        EACH="row" if x.scales.stride(0) else "all", GATED=gated, BIAS=bias is not None, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out


def weight_block(weight: Float8Weight | Int8Weight) -> int:
    """Inputs of a scale, or 0."""
    return weight.block[1] if isinstance(weight, Float8Weight) and weight.block is not None else 0


@triton.jit
def rescaled(sums, scales, bias, factor, first, places, there, BIAS: tl.constexpr):
    found = tl.load(sums + first + places, mask=there, other=0.0) * factor
    found *= tl.load(scales + first + places, mask=there, other=0.0)
    if BIAS:
        found += tl.load(bias + first + places, mask=there, other=0.0).to(tl.float32)
    return found


@triton.jit
def rescale_kernel(
    sums, x_scales, scales, bias, out, WIDTH: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part of a row of sums, by the scales of row and outputs; bias and gate."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = places < WIDTH
    line = sums + row * (2 * WIDTH if GATED else WIDTH)
    factor = tl.load(x_scales + row if EACH == "row" else x_scales)
    found = rescaled(line, scales, bias, factor, 0, places, there, BIAS)
    if GATED:
        up = rescaled(line, scales, bias, factor, WIDTH, places, there, BIAS)
        found = gate_values(found.to(out.dtype.element_ty), up.to(out.dtype.element_ty))
    tl.store(out + row * WIDTH + places, found.to(out.dtype.element_ty), mask=there)


@triton.jit
def float8_values(codes, TYPE: tl.constexpr):
    """Weights in another type; bytes are E4M3."""
    if codes.dtype == tl.uint8:
        bits = codes.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # of fp16, whose exponents have a bias that is 8 larger
        values = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(TYPE)
    else:
        values = codes.to(tl.float32).to(TYPE)
    return values


@triton.jit
def block_scales(scales, output, start, inputs, width, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """The scale of each output for the inputs from start on, which lie in one block."""
    return tl.load(scales + tl.minimum(output, width - 1) // HIGH * tl.cdiv(inputs, WIDE) + start // WIDE)


@triton.jit
def outer(rows, outputs, SWAP_AB: tl.constexpr):
    """Products of all rows' and outputs' scales, as the sums lie."""
    if SWAP_AB:
        found = rows[None, :] * outputs[:, None]
    else:
        found = rows[:, None] * outputs[None, :]
    return found


@triton.jit
def add_scaled(values, weights, sums, factors, SWAP_AB: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr):
    """sums and the product of one turn, by factors where those are of blocks."""
    if EACH == "none":
        weights = float8_values(weights, values.dtype)
    if SWAP_AB:
        left = weights
        right = values
    else:
        left = values
        right = weights
    if WIDE > 0:
        sums += tl.dot(left, right, input_precision="ieee") * factors
    elif sums.dtype == tl.int32:
        sums = tl.dot(left, right, sums, out_dtype=tl.int32)
    elif EACH != "none":
        sums += tl.dot(left, right)
    else:
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def turn_factors(
    x_scales, scales, row, output, start, inputs, rows, width,
    SWAP_AB: tl.constexpr, EACH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scales of blocks, of rows and of outputs' weights, for one turn; nothing where outputs have one scale each."""
    found = 1.0
    if WIDE > 0:
        of_outputs = block_scales(scales, output, start, inputs, width, HIGH, WIDE)
        of_rows = tl.full(row.shape, 1.0, tl.float32)
        if EACH == "block":
            of_rows = tl.load(x_scales + start // WIDE * rows + tl.minimum(row, rows - 1))
        found = outer(of_rows, of_outputs, SWAP_AB)
    return found


@triton.jit
def store_scaled(
    sums, ups, x_scales, scales, bias, out, row, output, rows, width,
    SWAP_AB: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """A finished tile, by the scales that are not of blocks."""
    of_rows = tl.full(row.shape, 1.0, tl.float32)
    if EACH == "row":
        of_rows = tl.load(x_scales + tl.minimum(row, rows - 1))
    elif EACH == "all":
        of_rows *= tl.load(x_scales)
    of_outputs = tl.full(output.shape, 1.0, tl.float32)
    of_ups = of_outputs
    if WIDE == 0:
        place = tl.minimum(output, width - 1)
        of_outputs = tl.load(scales + place)
        if GATED:
            of_ups = tl.load(scales + width + place)
    sums = sums.to(tl.float32) * outer(of_rows, of_outputs, SWAP_AB)
    if GATED:
        ups = ups.to(tl.float32) * outer(of_rows, of_ups, SWAP_AB)
    else:
        ups = sums
    store_tile(sums, ups, bias, out, row, output, rows, width, SWAP_AB, GATED, BIAS)


@triton.jit
def zero_sums(OUTPUTS: tl.constexpr, ROWS: tl.constexpr, SWAP_AB: tl.constexpr, INTEGERS: tl.constexpr):
    """Sums of a tile: integers of integers, else fp32."""
    return tl.zeros([OUTPUTS, ROWS] if SWAP_AB else [ROWS, OUTPUTS], tl.int32 if INTEGERS else tl.float32)


@triton.jit(do_not_specialize=("rows",))
def scaled_tile_kernel(
    x, weight, x_scales, scales, bias, out, rows, width, inputs, x_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAP_AB: tl.constexpr, GATED: tl.constexpr,
    EACH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, INTEGERS: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile. Lines past the last row or output repeat it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    x_lines = x + tl.minimum(row, rows - 1).to(tl.int64) * x_stride
    lines = weight + tl.minimum(output, width - 1).to(tl.int64) * inputs
    up_lines = lines
    if GATED:
        up_lines += width.to(tl.int64) * inputs  # a width of one is a constant, which has no type
    sums = zero_sums(OUTPUTS, ROWS, SWAP_AB, INTEGERS)
    ups = sums
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, inputs, INPUTS):
        values = load_tile(x_lines, start, inputs, INPUTS, EVEN, SWAP_AB)
        weights = load_tile(lines, start, inputs, INPUTS, EVEN, not SWAP_AB)
        factors = turn_factors(x_scales, scales, row, output, start, inputs, rows, width, SWAP_AB, EACH, HIGH, WIDE)
        sums = add_scaled(values, weights, sums, factors, SWAP_AB, EACH, WIDE)
        if GATED:
            weights = load_tile(up_lines, start, inputs, INPUTS, EVEN, not SWAP_AB)
            factors = turn_factors(
                x_scales, scales, row, width + output, start, inputs, rows, 2 * width,
                SWAP_AB, EACH, HIGH, WIDE,
            )  # fmt: skip
            ups = add_scaled(values, weights, ups, factors, SWAP_AB, EACH, WIDE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    store_scaled(sums, ups, x_scales, scales, bias, out, row, output, rows, width, SWAP_AB, EACH, WIDE, GATED, BIAS)


@triton.jit(do_not_specialize=("rows",))
def scaled_tma_kernel(
    x, weight, x_scales, scales, bias, out, rows, width, inputs,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, SWAP_AB: tl.constexpr, GATED: tl.constexpr,
    EACH: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, INTEGERS: tl.constexpr,
    BIAS: tl.constexpr, FLAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every so many-th tile, in the order of `kernels.linear_triton.tma_kernel`; x and weight are descriptors."""
    high = tl.cdiv(rows, ROWS)
    tiles = high * tl.cdiv(width, OUTPUTS)
    group = 8 * tl.cdiv(width, OUTPUTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        top = tile // group * 8
        size = tl.minimum(high - top, 8)
        first_row = (top + tile % group % size) * ROWS
        first_output = tile % group // size * OUTPUTS
        row = first_row + tl.arange(0, ROWS)
        output = first_output + tl.arange(0, OUTPUTS)
        sums = zero_sums(OUTPUTS, ROWS, SWAP_AB, INTEGERS)
        ups = sums
        for start in range(0, inputs, INPUTS):
            values = load_tma_tile(x, first_row, start, SWAP_AB)
            factors = turn_factors(x_scales, scales, row, output, start, inputs, rows, width, SWAP_AB, EACH, HIGH, WIDE)
            weights = load_tma_tile(weight, first_output, start, not SWAP_AB)
            sums = add_scaled(values, weights, sums, factors, SWAP_AB, EACH, WIDE)
            if GATED:
                factors = turn_factors(
                    x_scales, scales, row, width + output, start, inputs, rows, 2 * width,
                    SWAP_AB, EACH, HIGH, WIDE,
                )  # fmt: skip
                weights = load_tma_tile(weight, width + first_output, start, not SWAP_AB)
                ups = add_scaled(values, weights, ups, factors, SWAP_AB, EACH, WIDE)
        store_scaled(
            sums, ups, x_scales, scales, bias, out, row, output, rows, width,
            SWAP_AB, EACH, WIDE, GATED, BIAS,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def scaled_vector_kernel(
    x, weight, x_scales, scales, bias, out, width, inputs,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr, EACH: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, INTEGERS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row, all in one block of outputs. Each iteration multiplies the weights that the one before
    has loaded."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    real = output < width
    places = tl.arange(0, INPUTS)
    lines = weight + output.to(tl.int64)[:, None] * inputs + places[None, :]
    up_lines = lines
    if GATED:
        up_lines += width.to(tl.int64) * inputs  # a width of one is a constant, which has no type
    there = real[:, None] & (places < inputs)[None, :]
    gates = tl.load(lines, mask=there, other=0.0, eviction_policy="evict_first")
    ups = gates
    if GATED:
        ups = tl.load(up_lines, mask=there, other=0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    up_sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        place = start + places
        values = tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
        if EACH == "block":
            values *= tl.load(x_scales + place // WIDE, mask=place < inputs, other=0.0)
        up_values = values
        if WIDE > 0:
            blocks = tl.cdiv(inputs, WIDE)
            line = scales + place // WIDE
            values *= tl.load(line + first // HIGH * blocks, mask=place < inputs, other=0.0)
            if GATED:
                up_values *= tl.load(line + (width + first) // HIGH * blocks, mask=place < inputs, other=0.0)
        there = real[:, None] & (place + INPUTS < inputs)[None, :]
        following = tl.load(lines + start + INPUTS, mask=there, other=0.0, eviction_policy="evict_first")
        sums += float8_values(gates, tl.float32) * values[None, :]
        gates = following
        if GATED:
            following = tl.load(up_lines + start + INPUTS, mask=there, other=0.0, eviction_policy="evict_first")
            up_sums += float8_values(ups, tl.float32) * up_values[None, :]
            ups = following
    factor = 1.0
    if EACH == "row" or EACH == "all":
        factor = tl.load(x_scales)
    found = tl.sum(sums, 1) * factor
    if WIDE == 0:
        found *= tl.load(scales + output, mask=real, other=0.0)
    if BIAS:
        found += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1) * factor
        if WIDE == 0:
            up *= tl.load(scales + width + output, mask=real, other=0.0)
        if BIAS:
            up += tl.load(bias + width + output, mask=real, other=0.0).to(tl.float32)
        found = gate_values(found.to(out.dtype.element_ty), up.to(out.dtype.element_ty))
    tl.store(out + output, found.to(out.dtype.element_ty), mask=real)
