"""Low-rank additions to a product in Triton.

Rows are sorted by place as experts' pairs are, in tiles of one place; a base row is in none. The first kernel shrinks:
its programs have a share of the inputs each, since ranks are too few outputs to fill a chip, and leave partial sums.
The second adds these up in their order, expands them and adds to the product. How inputs are shared follows from the
weight alone, and matrix units add in order whatever the tile, so that a row's sums are the same among any others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.linear_triton import load_tile
from penstock.kernels.records import OUTPUT_TILE, AdapterRows, LowRankWeight
from penstock.kernels.routing_triton import load_tile_pairs, sort_pairs

INPUTS = 128  # multiplied at once
FEW = 256  # rows up to which tiles are small
SMALL, LARGE = 16, 32  # rows of a tile: matrix units take these in one way on every chip
BLOCK = 64  # lines of `a` in one program, and of `b` multiplied at once
PARTIALS = 1024  # lines of partial sums in all: fewer lines of `a` are shared out more finely
MOST_SHARES = 16


def sort_rows(places: Tensor, count: int, *, invariant: bool) -> AdapterRows:
    """`kernels.low_rank.adapter_rows` by the kernel."""
    tile = SMALL if invariant or len(places) <= FEW else LARGE
    return AdapterRows((), sort_pairs(places[:, None], 1, count, tile), tile)


def shares_of(lines: int, inputs: int) -> tuple[int, int]:
    """Into how many shares a weight's inputs are cut, and how many inputs are one."""
    wanted = max(1, min(MOST_SHARES, PARTIALS // lines, triton.cdiv(inputs, INPUTS)))
    share = triton.cdiv(triton.cdiv(inputs, wanted), INPUTS) * INPUTS
    return triton.cdiv(inputs, share), share


def add_products(out: Tensor, x: Tensor, rows: AdapterRows, weight: LowRankWeight) -> None:
    """`kernels.low_rank.add_low_rank` by the kernels."""
    assert rows.schedule is not None, "sorted on this device"
    (order, places, total), chip = rows.schedule, chip_of(x.device)
    lines, inputs, rank = weight.a.shape[1], x.shape[1], weight.rank
    assert rank % 16 == 0, "as matrix units want it"
    assert x.stride(1) == out.stride(1) == weight.a.stride(2) == weight.b.stride(2) == 1
    assert weight.a.stride(1) == inputs
    assert weight.b.stride(1) == rank
    shares, share = shares_of(lines, inputs)
    block = BLOCK if lines >= BLOCK else triton.next_power_of_2(lines)
    partials = torch.empty(shares, len(x), lines, dtype=torch.float32, device=x.device)
    tiles = len(places)
    shrink_kernel[(tiles * shares, triton.cdiv(lines, block))](
        x, weight.a, partials, order, places, total, len(x), lines, inputs, x.stride(0),
        weight.a.stride(0), SHARE=share, SHARES=shares, ROWS=rows.tile, LINES=block, INPUTS=INPUTS,
        EVEN=inputs % INPUTS == 0, PDL=chip.pdl, num_warps=chip.loop_warps, num_stages=2, launch_pdl=chip.pdl,
    )  # fmt: skip
    expand_kernel[(tiles, len(weight.tiles))](
        out, partials, weight.b, weight.tiles, order, places, total, len(x), lines,
        out.stride(0), weight.b.stride(0), SHARES=shares, ROWS=rows.tile, RANK=rank, BLOCK=least_block(rank),
        OUTPUTS=OUTPUT_TILE, PDL=chip.pdl, num_warps=chip.loop_warps, num_stages=2, launch_pdl=chip.pdl,
    )  # fmt: skip


def least_block(rank: int) -> int:
    """The largest power of two up to BLOCK that divides a rank."""
    return min(BLOCK, rank & -rank)


@triton.jit(do_not_specialize=("rows",))
def shrink_kernel(
    x, a, partials, order, tiles, count, rows, lines, inputs, x_stride, a_stride,
    SHARE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The partial sums of one tile of rows, some lines of its place's `a` and a share of the inputs."""
    begin_pdl(PDL)
    tile = tl.program_id(0) // SHARES
    if tile >= tl.load(count):
        return
    share = tl.program_id(0) % SHARES
    place, at, size, row = load_tile_pairs(order, tiles, tile, ROWS)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    x_lines = x + row * x_stride
    a_lines = a + place.to(tl.int64) * a_stride + tl.minimum(line, lines - 1) * inputs
    sums = tl.zeros([ROWS, LINES], tl.float32)
    begin = share * SHARE
    for start in range(begin, tl.minimum(begin + SHARE, inputs), INPUTS):
        values = load_tile(x_lines, start, inputs, INPUTS, EVEN, False)
        weights = load_tile(a_lines, start, inputs, INPUTS, EVEN, True)
        sums = tl.dot(values, weights, sums, input_precision="ieee")
    found = partials + (share.to(tl.int64) * rows + row)[:, None] * lines + line[None, :]
    tl.store(found, sums, mask=(at < size)[:, None] & (line < lines)[None, :])


@triton.jit(do_not_specialize=("rows",))
def expand_kernel(
    out, partials, b, outputs, order, tiles, count, rows, lines, out_stride, b_stride,
    SHARES: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of rows and of outputs."""
    begin_pdl(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(count):
        return
    place, at, size, row = load_tile_pairs(order, tiles, tile, ROWS)
    own = outputs + tl.program_id(1) * 3
    output = tl.load(own) + tl.arange(0, OUTPUTS)
    end = tl.load(own + 1)
    first = tl.load(own + 2)
    b_lines = b + place.to(tl.int64) * b_stride + tl.minimum(output, end - 1) * RANK
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, RANK, BLOCK):
        line = start + tl.arange(0, BLOCK)
        values = tl.zeros([ROWS, BLOCK], tl.float32)
        for share in range(SHARES):
            values += tl.load(partials + (share * rows.to(tl.int64) + row)[:, None] * lines + (first + line)[None, :])
        weights = tl.load(b_lines[None, :] + line[:, None])
        sums = tl.dot(values.to(b.dtype.element_ty), weights, sums, input_precision="ieee")
    there = (at < size)[:, None] & (output < end)[None, :]
    found = out + row[:, None] * out_stride + output[None, :]
    sums += tl.load(found, mask=there, other=0.0).to(tl.float32)
    tl.store(found, sums.to(out.dtype.element_ty), mask=there)
