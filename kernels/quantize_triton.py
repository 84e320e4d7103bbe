"""Rounds rows to 8 bits in Triton: in a kernel of its own, and in those of the norm and the gate before a product.

A row's scale and values depend on the row alone. They are those of `kernels.quantized.quantize_rows` to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.quantized import SMALLEST as SMALLEST_SCALE
from penstock.kernels.quantized import QuantizedRows, RowFormat

SMALLEST = tl.constexpr(SMALLEST_SCALE)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it is rounded to an integer, of two the even
BLOCKS_TILE = 2048  # inputs of a program where scales are of blocks


def empty_rows(rows: int, inputs: int, form: RowFormat, like: Tensor) -> QuantizedRows:
    """Memory for rows of that tensor's type in a format; the scales are the given one where there is one."""
    values = torch.empty(rows, inputs, dtype=form.kind, device=like.device)
    if form.scale is not None:
        return QuantizedRows(values, form.scale.expand(rows, 1), like.dtype)
    blocks = triton.cdiv(inputs, form.block) if form.block else 1
    return QuantizedRows(values, torch.empty(blocks, rows, dtype=torch.float32, device=like.device).t(), like.dtype)


def row_tile(inputs: int, form: RowFormat) -> int:
    """Inputs of a program: all of a row that has one scale, and whole blocks."""
    whole: int = max(triton.next_power_of_2(inputs), form.block)
    return min(whole, BLOCKS_TILE) if form.block or form.scale is not None else whole


def row_warps(tile: int) -> int:
    return min(16, max(4, tile // 512))


def quantize_rows(x: Tensor, form: RowFormat) -> QuantizedRows:
    """`kernels.quantize.quantize` by the kernel."""
    rows, inputs = x.shape
    assert x.stride(1) == 1
    found = empty_rows(rows, inputs, form, x)
    tile = row_tile(inputs, form)
    pdl = chip_of(x.device).pdl
    quantize_kernel[(rows, triton.cdiv(inputs, tile))](
        x, found.values, found.scales, x.stride(0), WIDTH=inputs, TILE=tile, BLOCK=form.block,
        STATIC=form.scale is not None, PDL=pdl, num_warps=row_warps(tile), launch_pdl=pdl,
    )  # fmt: skip
    return found


@triton.jit
def larger(one, other):
    """NaN where either is."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scales_of(parts, TYPE: tl.constexpr):
    """The scale of each line of a tile."""
    SHARE: tl.constexpr = 1.0 / (127.0 if tl.int8 == TYPE else 448.0)
    largest = tl.reduce(tl.abs(parts), 1, larger)
    return tl.maximum(largest * SHARE, SMALLEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(parts, scale, TYPE: tl.constexpr):
    """Lines of a tile over their scales, rounded to e4m3 or integers of 8 bits."""
    LARGEST: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
    found = parts * tl.div_rn(1.0, scale)[:, None]
    found = tl.minimum(tl.maximum(found, -LARGEST), LARGEST)
    if tl.int8 == TYPE:
        found = (found + ROUNDING) - ROUNDING
    return found.to(TYPE)


@triton.jit
def store_rounded(
    values, row, rows, first, out, scales,
    WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Part of a row from `first` on, fp32 and 0 beyond its end, rounded to out's type; its scales are written, but
    where they are given (STATIC). BLOCK: inputs of a scale; 0: the part is a row and has one."""
    TYPE: tl.constexpr = out.dtype.element_ty
    SIZE: tl.constexpr = BLOCK if BLOCK > 0 else TILE
    parts = tl.reshape(values, [TILE // SIZE, SIZE])
    if STATIC:
        scale = tl.zeros([TILE // SIZE], tl.float32) + tl.load(scales)
    else:
        scale = scales_of(parts, TYPE)
        BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK if BLOCK > 0 else 1
        block = first // SIZE + tl.arange(0, TILE // SIZE)
        tl.store(scales + block * rows + row, scale, mask=block < BLOCKS)
    found = tl.reshape(rounded(parts, scale, TYPE), [TILE])
    places = first + tl.arange(0, TILE)
    tl.store(out + row * WIDTH + places, found, mask=places < WIDTH)


@triton.jit
def quantize_kernel(
    x, out, scales, x_stride,
    WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, or with scales of blocks a part of it."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    places = first + tl.arange(0, TILE)
    values = tl.load(x + row * x_stride + places, mask=places < WIDTH, other=0.0).to(tl.float32)
    store_rounded(values, row, tl.num_programs(0), first, out, scales, WIDTH, TILE, BLOCK, STATIC)


def quantize_pairs(
    x: Tensor, form: RowFormat, experts: Tensor, places: Tensor, first: int, held: int
) -> QuantizedRows:  # fmt: skip
    """Each row of x in blocks for each of its `experts  # [rows, chosen]` that is held, where `places` says: see
    `kernels.routing_triton.Schedule`. Other rows of the result stay unset."""
    rows, inputs = x.shape
    assert x.stride(1) == 1
    assert form.block
    found = empty_rows(experts.numel(), inputs, form, x)
    tile = row_tile(inputs, form)
    pdl = chip_of(x.device).pdl
    pairs_kernel[(rows, triton.cdiv(inputs, tile))](
        x, experts, places, found.values, found.scales, x.stride(0), first, HELD=held, CHOSEN=experts.shape[1],
        WIDTH=inputs, TILE=tile, BLOCK=form.block, PDL=pdl, num_warps=row_warps(tile), launch_pdl=pdl,
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=("first",))
def pairs_kernel(
    x, experts, places, out, scales, x_stride, first,
    HELD: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Part of a row, rounded once and written for each of its pairs."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE
    column = start + tl.arange(0, TILE)
    values = tl.load(x + row * x_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    parts = tl.reshape(values, [TILE // BLOCK, BLOCK])
    scale = scales_of(parts, out.dtype.element_ty)
    found = tl.reshape(rounded(parts, scale, out.dtype.element_ty), [TILE])
    block = start // BLOCK + tl.arange(0, TILE // BLOCK)
    for at in tl.static_range(CHOSEN):
        pair = row * CHOSEN + at
        expert = tl.load(experts + pair) - first
        size = tl.where((expert >= 0) & (expert < HELD), WIDTH, 0)  # of what is written
        place = tl.load(places + pair, mask=size > 0, other=0).to(tl.int64)
        tl.store(out + place * WIDTH + column, found, mask=column < size)
        tl.store(scales + block * (tl.num_programs(0) * CHOSEN) + place, scale, mask=block * BLOCK < size)
