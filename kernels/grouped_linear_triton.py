"""Products with weights of 4 and 8 bits in groups, in Triton: values become 16-bit numbers in registers.

A weight is operand A of the matrix units, so its fragments are unpacked where they are multiplied. A group's sum is
multiplied with its scale in fp32. Products of few rows have too few tiles to keep the memory busy: warps take parts of
the inputs (`parts`), and programs shares of them, which the last one adds up (`shares`). With one part and one share a
row is the same to the last bit in every tiling, so invariant products are made of those.

From about 64 rows on `kernels.grouped_hopper` takes over where it knows the chip and the weight. More than it takes are
multiplied by the library, slice after slice of the weight, each made dense first.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels import gluon
from penstock.kernels.activation import activate
from penstock.kernels.activation_triton import gate_values
from penstock.kernels.attention_triton import arrives_last
from penstock.kernels.chip import chip_of
from penstock.kernels.grouped_linear import RUNS, PlaneWeight
from penstock.kernels.grouped_tilings import GroupedTiling, WideTiling
from penstock.kernels.linear_plans import plans_of
from penstock.kernels.linear_tilings import Product, Way, choose_grouped_tiling, fitted
from penstock.kernels.linear_triton import tma_compatible
from penstock.kernels.triton_names import interpreted

SLICE = 64 << 20  # bytes of a dense slice, most of which stays in the L2 cache
WHOLE = 256  # outputs of a slice are a multiple of, so that the library's tiles are whole
DENSE_LINES = 64  # of a program that makes a slice dense
COMPILED: bool = not interpreted()


def multiply(x: Tensor, weight: PlaneWeight, bias: Tensor | None, *, gated: bool, invariant: bool) -> Tensor:
    """`kernels.quantized_linear.multiply_quantized` of such a weight."""
    outputs, inputs = weight.shape
    width = outputs // 2 if gated else outputs
    plan = plans_of(x.device).find((width, inputs, x.dtype, gated, 0, weight.form.name, invariant))
    return multiply_by(plan.way(len(x)), x, weight, bias, gated=gated)


def multiply_by(way: Way, x: Tensor, weight: PlaneWeight, bias: Tensor | None, *, gated: bool) -> Tensor:
    """The product in one way."""
    if weight.order is not None:
        x = x[:, weight.order]
    if isinstance(way, WideTiling):
        hopper = gluon.load("grouped_hopper") if weight.form.run == RUNS[0] and tma_compatible(x) else None
        if hopper is not None:
            wide: Tensor = hopper.multiply_wide(x, weight, bias, way, gated=gated)
            return wide
        way = general_way(x, weight, gated=gated)
    if isinstance(way, GroupedTiling):
        return multiply_planes(x, weight, bias, way, gated=gated)
    found = multiply_slices(x, weight, bias)
    return activate(found) if gated else found


def general_way(x: Tensor, weight: PlaneWeight, *, gated: bool) -> Way:
    """What the rules choose among the ways below."""
    outputs, inputs = weight.shape
    product = Product(outputs // 2 if gated else outputs, inputs, x.dtype, gated, weight=weight.form.name)
    chip = chip_of(x.device)
    return fitted(choose_grouped_tiling(len(x), product, chip, invariant=False), product, chip)


def multiply_planes(
    x: Tensor, weight: PlaneWeight, bias: Tensor | None, tiling: GroupedTiling, *, gated: bool
) -> Tensor:
    """The product, a program to a tile or its share."""
    rows, inputs = x.shape
    form, width = weight.form, weight.shape[0] // (2 if gated else 1)
    assert x.stride(1) == 1
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    high, wide = triton.cdiv(rows, tiling.rows), triton.cdiv(width, tiling.lines // (2 if gated else 1))
    partials, arrivals = out, weight.arrivals
    if high * wide > len(arrivals):
        tiling = msgspec.structs.replace(tiling, shares=1)
    if tiling.shares > 1:
        sums = high * wide * tiling.shares * tiling.lines * tiling.rows
        partials = torch.empty(sums, dtype=torch.float32, device=x.device)
    pdl = tiling.pdl and chip_of(x.device).pdl
    zeros = weight.scales if weight.zeros is None else weight.zeros
    factors = x if weight.factors is None else weight.factors
    plane_kernel[(high, wide, tiling.shares)](
        x, weight.values, weight.scales, zeros, factors, x if bias is None else bias, out, partials, arrivals,
        rows, width, inputs, x.stride(0),
        ROWS=tiling.rows, LINES=tiling.lines, PARTS=tiling.parts, SHARES=tiling.shares, **form.constants, GATED=gated,
        ZEROS=weight.zeros is not None, FACTORS=weight.factors is not None, BIAS=bias is not None,
        EVEN=inputs % (form.block * tiling.parts * tiling.shares) == 0, SCALED=tiling.scaled,
        CUT=min(tiling.cut, form.run // 16), COMPILED=COMPILED, PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, launch_pdl=pdl,
    )  # fmt: skip
    return out


def multiply_slices(x: Tensor, weight: PlaneWeight, bias: Tensor | None) -> Tensor:
    """The product by the library, with some outputs of the weight at a time."""
    outputs, inputs = weight.shape
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    size = max(WHOLE, SLICE // (inputs * x.itemsize) // WHOLE * WHOLE)
    for first in range(0, outputs, size):
        dense = dequantize(weight, x.dtype, first, min(first + size, outputs))
        target = out[:, first : first + size]
        if bias is None:
            torch.mm(x, dense.T, out=target)
        else:
            torch.addmm(bias[first : first + size], x, dense.T, out=target)
    return out


def dequantize(weight: PlaneWeight, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """Outputs from first to before last, `[outputs, inputs]`, in the order of the weight's inputs."""
    form = weight.form
    dense = torch.empty(last - first, weight.inputs, dtype=dtype, device=weight.values.device)
    blocks, outputs = weight.scales.shape
    pdl = chip_of(dense.device).pdl
    dequantize_kernel[(triton.cdiv(last - first, DENSE_LINES), blocks)](
        weight.values, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        weight.scales if weight.factors is None else weight.factors, dense, first, last, outputs, weight.inputs,
        LINES=DENSE_LINES, **form.constants,
        ZEROS=weight.zeros is not None, FACTORS=weight.factors is not None, COMPILED=COMPILED, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return dense


@triton.constexpr_function
def unpacking(numbers, plane, bf16):
    """PTX for two neighbouring words: a plane of both as 16-bit floats. Integers are set into the mantissa of 128 in
    bfloat16, or 1024 in float16, which the offset takes away. E2M1 becomes a small float with its bits, which a
    power of two brings to its size."""
    if numbers == "INT4":
        bits = "0x43004300" if bf16 else "0x64006400"
        moved = f"shr.u32 t, $1, {4 * plane}; " if plane else "mov.b32 t, $1; "
        add = "mov.b32 u, 0x3F803F80; fma.rn.bf16x2 $0, t, u, $2; " if bf16 else "add.rn.f16x2 $0, t, $2; "
        return "{ .reg .b32 t, u; " + moved + f"lop3.b32 t, t, 0x000F000F, {bits}, 0xEA; " + add + "}"
    size, mask = (6, "0x01C001C0") if bf16 else (9, "0x0E000E00")
    shift = size - 4 * plane
    moved = f"shl.b32 t, $1, {shift}; " if shift >= 0 else f"shr.u32 t, $1, {-shift}; "
    sign = f"shl.b32 u, $1, {12 - 4 * plane}; and.b32 u, u, 0x80008000; "
    scale = "mov.b32 u, 0x7E807E80; mov.b32 v, 0x80008000; fma.rn.bf16x2 $0, t, u, v; "
    if not bf16:
        scale = "mov.b32 u, 0x74007400; mul.rn.f16x2 $0, t, u; "
    return "{ .reg .b32 t, u, v; " + moved + sign + f"lop3.b32 t, t, {mask}, u, 0xEA; " + scale + "}"


@triton.jit
def unpack(words, zero, PLANE: tl.constexpr, NUMBERS: tl.constexpr, TYPE: tl.constexpr, COMPILED: tl.constexpr):
    """A plane of words in a floating-point type, exactly: integers less their zero point, or E2M1."""
    if NUMBERS == "INT8":
        found = ((words.to(tl.int32) >> 8 * PLANE & 255).to(tl.float32) - zero).to(TYPE)
    elif COMPILED and TYPE.primitive_bitwidth == 16:
        BF16: tl.constexpr = TYPE.is_bf16()
        ptx: tl.constexpr = unpacking(NUMBERS, PLANE, BF16)
        offset = ((-128.0 if BF16 else -1024.0) - zero).to(TYPE)
        found = tl.inline_asm_elementwise(ptx, "=r,r,r", [words, offset], offset.dtype, is_pure=True, pack=2)
    else:
        codes = words.to(tl.int32) >> 4 * PLANE & 15
        if NUMBERS == "INT4":
            found = (codes.to(tl.float32) - zero).to(TYPE)
        else:
            half = (codes & 1).to(tl.float32) * 0.5
            power = (codes >> 1 & 3).to(tl.float32)
            size = tl.where(power > 0.0, (1.0 + half) * tl.exp2(power - 1.0), half)
            found = tl.where(codes > 7, -size, size).to(TYPE)
    return found


@triton.jit
def multiply_pairs(weights, sizes, COMPILED: tl.constexpr):
    """The product of 16-bit floats, rounded once."""
    if COMPILED and weights.dtype.primitive_bitwidth == 16:
        BF16: tl.constexpr = weights.dtype.is_bf16()
        ptx: tl.constexpr = (
            "{ .reg .b32 t; mov.b32 t, 0x80008000; fma.rn.bf16x2 $0, $1, $2, t; }"
            if BF16
            else "mul.rn.f16x2 $0, $1, $2;"
        )
        found = tl.inline_asm_elementwise(ptx, "=r,r,r", [weights, sizes], weights.dtype, is_pure=True, pack=2)
    else:
        found = (weights.to(tl.float32) * sizes.to(tl.float32)).to(weights.dtype)
    return found


@triton.jit
def scale_of(words, AT: tl.constexpr, SCALE: tl.constexpr):
    """A block's scale in fp32, from its word."""
    if SCALE == "FP32":
        found = (words >> 32 * AT).to(tl.int32).to(tl.float32, bitcast=True)
    elif SCALE == "BF16":
        found = ((words >> 16 * AT).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif SCALE == "FP16":
        found = (words >> 16 * AT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = words >> 8 * AT & 255
        if SCALE == "E4M3":  # its bits in those of a float whose exponent begins 120 lower
            bits = (bits & 127) << 20 | (bits & 128) << 24
            found = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        else:
            found = (bits << 23).to(tl.float32, bitcast=True)
    return found


@triton.jit
def zero_of(words, AT: tl.constexpr, NUMBERS: tl.constexpr, ZEROS: tl.constexpr):
    """A block's zero point in fp32, from its word, or the middle of the range."""
    if ZEROS:
        found = (words >> 8 * AT & 255).to(tl.float32)
    else:
        found = tl.full(words.shape, 128.0 if NUMBERS == "INT8" else 8.0, tl.float32)
    return found


@triton.jit(do_not_specialize=("rows",))
def plane_kernel(
    x, values, scales, zeros, factors, bias, out, partials, arrivals, rows, width, inputs, x_stride,
    ROWS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr, SHARES: tl.constexpr, RUN: tl.constexpr,
    PLANES: tl.constexpr, SCALES: tl.constexpr, NUMBERS: tl.constexpr, SCALE: tl.constexpr, GATED: tl.constexpr,
    ZEROS: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
    CUT: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of LINES lines of the weight, or one share of it. GATED: of 16 lines 8 are gates and 8 their ups."""
    TYPE: tl.constexpr = x.dtype.element_ty
    BLOCK: tl.constexpr = PLANES * RUN
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    line = tl.arange(0, LINES)
    if GATED:
        output = tl.program_id(1) * (LINES // 2) + line // 16 * 8 + line % 8
        line = tl.minimum(output, width - 1) + line % 16 // 8 * width
        outputs = 2 * width
    else:
        output = tl.program_id(1) * LINES + line
        line = tl.minimum(output, width - 1)
        outputs = width
    blocks = tl.cdiv(inputs, BLOCK)
    turns = tl.cdiv(blocks, PARTS * SHARES)
    part = tl.arange(0, PARTS) + tl.program_id(2) * (turns * PARTS)
    places = tl.arange(0, RUN // CUT)
    if PARTS > 1:
        places_x = places[None, :, None]
        part = part[:, None, None]
        x_lines = x + row.to(tl.int64)[None, None, :] * x_stride
        lines = values + (line.to(tl.int64) * (blocks * RUN))[None, :, None] + places[None, None, :]
        real = (row < rows)[None, None, :]
        held = line[None, :, None]
        sums = tl.zeros([PARTS, LINES, ROWS], tl.float32)
    else:
        places_x = places[:, None]
        part = tl.program_id(2) * turns
        x_lines = x + row.to(tl.int64)[None, :] * x_stride
        lines = values + (line.to(tl.int64) * (blocks * RUN))[:, None] + places[None, :]
        real = (row < rows)[None, :]
        held = line[:, None]
        sums = tl.zeros([LINES, ROWS], tl.float32)
    following = tl.load(scales + held + tl.minimum(part, blocks - 1) * outputs)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for turn in range(turns * CUT):
        block = part + turn // CUT * PARTS
        first = block * BLOCK + turn % CUT * (RUN // CUT) + places_x
        there_block = block if EVEN else tl.minimum(block, blocks - 1)
        numbers = tl.load(lines + there_block * RUN + turn % CUT * (RUN // CUT))
        if SCALED:
            scale = tl.load(scales + held + there_block * outputs)
        else:
            scale = following
            following = tl.load(scales + held + tl.minimum(block + PARTS, blocks - 1) * outputs)
        zero = tl.load(zeros + held + there_block * outputs) if ZEROS else scale
        for at in tl.static_range(SCALES):
            zero_point = zero_of(zero, at, NUMBERS, ZEROS)
            size = scale_of(scale, at, SCALE)
            found = sums if SCALED else tl.zeros(sums.shape, tl.float32)
            for plane in tl.static_range(at * PLANES // SCALES, (at + 1) * PLANES // SCALES):
                there = real if EVEN else real & (first < inputs - plane * RUN)
                rows_of_x = tl.load(x_lines + first + plane * RUN, mask=there, other=0.0)
                weights = unpack(numbers, zero_point, plane, NUMBERS, TYPE, COMPILED)
                if SCALED:
                    weights = multiply_pairs(weights, size.to(TYPE), COMPILED)
                found = tl.dot(weights, rows_of_x, found, input_precision="ieee")
            sums = found if SCALED else sums + found * size
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS > 1:
        sums = tl.sum(sums, 0)
    finish_tile(
        sums, partials, arrivals, factors, bias, out, row, line, output, rows, width,
        LINES, ROWS, SHARES, GATED, FACTORS, BIAS,
    )  # fmt: skip


@triton.jit
def finish_tile(
    sums, partials, arrivals, factors, bias, out, row, line, output, rows, width,
    LINES: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, GATED: tl.constexpr, FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Store a tile, or a share of it; the last share adds up all, in their order."""
    if SHARES > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        spots = tl.arange(0, LINES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        targets = partials + tile.to(tl.int64) * (SHARES * LINES * ROWS) + spots
        tl.store(targets + tl.program_id(2) * (LINES * ROWS), sums)
        if arrives_last(arrivals + tile, SHARES):
            sums = tl.zeros([LINES, ROWS], tl.float32)
            for share in tl.static_range(SHARES):
                sums += tl.load(targets + share * (LINES * ROWS), cache_modifier=".cg")
            store_lines(sums, factors, bias, out, row, line, output, rows, width, LINES, ROWS, GATED, FACTORS, BIAS)
    else:
        store_lines(sums, factors, bias, out, row, line, output, rows, width, LINES, ROWS, GATED, FACTORS, BIAS)


@triton.jit
def store_lines(
    sums, factors, bias, out, row, line, output, rows, width,
    LINES: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, FACTORS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Factors, bias, gate and rounding of a finished tile; what lies past the last row or output is not written."""
    TYPE: tl.constexpr = out.dtype.element_ty
    if FACTORS:
        sums *= tl.load(factors + line)[:, None]
    if BIAS:
        sums += tl.load(bias + line).to(tl.float32)[:, None]
    if GATED:
        halves = sums.to(TYPE).reshape(LINES // 16, 2, 8, ROWS).permute(0, 2, 3, 1)
        gate, up = tl.split(halves)
        sums = gate_values(gate, up).reshape(LINES // 2, ROWS)
        at = tl.arange(0, LINES // 2)
        output = tl.program_id(1) * (LINES // 2) + at
    targets = out + row.to(tl.int64)[None, :] * width + output[:, None]
    tl.store(targets, sums.to(TYPE), mask=(row < rows)[None, :] & (output < width)[:, None])


@triton.jit
def dequantize_kernel(
    values, scales, zeros, factors, out, first, last, outputs, inputs,
    LINES: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr, SCALES: tl.constexpr, NUMBERS: tl.constexpr,
    SCALE: tl.constexpr, ZEROS: tl.constexpr, FACTORS: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of some lines, rounded once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TYPE: tl.constexpr = out.dtype.element_ty
    block = tl.program_id(1)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    held = tl.minimum(first + line, last - 1)
    places = tl.arange(0, RUN)
    numbers = tl.load(
        values + held.to(tl.int64)[:, None] * (tl.num_programs(1) * RUN) + (block * RUN + places)[None, :]
    )
    scale = tl.load(scales + block * outputs + held)
    zero = tl.load(zeros + block * outputs + held) if ZEROS else scale
    targets = out + line.to(tl.int64)[:, None] * inputs + (block * (PLANES * RUN) + places)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for plane in tl.static_range(PLANES):
        zero_point = zero_of(zero, plane * SCALES // PLANES, NUMBERS, ZEROS)[:, None]
        weights = unpack(numbers, zero_point, plane, NUMBERS, TYPE, COMPILED).to(tl.float32)
        size = scale_of(scale, plane * SCALES // PLANES, SCALE)
        if FACTORS:
            size *= tl.load(factors + held)
        there = (line < last - first)[:, None] & (places < inputs - block * (PLANES * RUN) - plane * RUN)[None, :]
        tl.store(targets + plane * RUN, (weights * size[:, None]).to(TYPE), mask=there)
