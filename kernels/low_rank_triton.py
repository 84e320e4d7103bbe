"""Low-rank additions to a product in Triton.

Rows are sorted by place as experts' pairs are, in tiles of one place; a base row is in none. The first kernel shrinks:
its programs have a share of the inputs each, since ranks are too few outputs to fill a chip, and leave partial sums.
The second adds these up in their order, expands them and adds to the product. Of many rows, which many programs expand,
the last program to shrink adds them up. How inputs are shared follows from the weight alone, and matrix units add in
order whatever the tile, so that a row's sums are the same among any others.

With few rows these are mostly launches. So up to 256 rows the tiles of a dense product shrink and add themselves, if
they can (`kernels.low_rank_tiles_triton`). A few rows of a small rank have a product that fetches weights before its
rows are known and adds the sums (`kernels.linear_hopper`); its inputs are shrunk before it, by a kernel that reads its
tile and its weights before it waits. Both cut the inputs in other ways, so invariant rows are left to the two kernels.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_triton import arrives_last
from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.linear_tilings import PIPELINED_ROWS, PipelinedTiling, Tiling
from penstock.kernels.linear_triton import load_tile, multiply_by, pipelined_product, tma_compatible, way_of
from penstock.kernels.low_rank_tiles_triton import counters, fits_tiles, sizes_in
from penstock.kernels.records import OUTPUT_TILE, AdapterRows, LowRankInputs, LowRankSum, LowRankWeight
from penstock.kernels.routing_triton import load_tile_pairs, most_tiles, sort_pairs

FEW = 256  # rows up to which tiles are small, and products add themselves
SMALL, LARGE = 16, 32  # rows of a tile: matrix units take these in one way on every chip
BLOCK = 64  # lines of `a` in one program, and of `b` multiplied at once
PARTIALS = 1024  # lines of partial sums in all: fewer lines of `a` are shared out more finely
BLOCKS = PARTIALS // 2 // BLOCK  # of lines of a weight whose inputs have several shares, at most


class Cut(NamedTuple):
    """How rows are shrunk."""

    inputs: int  # multiplied at once
    lines: int  # of `a` in one program
    shares: int  # of the inputs, at most


PREFETCHED, NARROW = 64, 32  # rows times their rank, and ranks, up to which fetching a product's weights early pays
PLAIN, EARLY = Cut(128, BLOCK, 16), Cut(512, 16, 32)


def sort_rows(places: Tensor, count: int, *, invariant: bool) -> AdapterRows:
    """`kernels.low_rank.adapter_rows` by the kernel."""
    few = len(places) <= FEW
    if invariant or not few:
        tile = SMALL if invariant or few else LARGE
        arrivals = None if few else places.new_zeros(most_tiles(len(places), count, tile) * BLOCKS)
        return AdapterRows(places, (), sort_pairs(places[:, None], 1, count, tile), tile, arrivals=arrivals)
    counts = counters(most_tiles(len(places), count, SMALL), count, places.device)
    schedule = sort_pairs(places[:, None], 1, count, SMALL, early=False, sizes=sizes_in(counts, count))
    return AdapterRows(places, (), schedule, SMALL, True, counts, cycle((0, 1)))


def shares_of(lines: int, inputs: int, cut: Cut) -> tuple[int, int]:
    """Into how many shares a weight's inputs are cut, and how many inputs are one."""
    wanted = max(1, min(cut.shares, PARTIALS // lines, triton.cdiv(inputs, cut.inputs)))
    share = triton.cdiv(triton.cdiv(inputs, wanted), cut.inputs) * cut.inputs
    return triton.cdiv(inputs, share), share


def shrink_rows(x: Tensor, rows: AdapterRows, weight: LowRankWeight) -> LowRankSum:
    """`kernels.low_rank.shrink` by the kernel: sums of each share, fp32 [shares, rows, lines], or of them all."""
    assert rows.schedule is not None, "sorted on this device"
    chip, (lines, inputs) = chip_of(x.device), weight.a.shape[1:]
    assert x.shape[1] == inputs
    assert x.stride(1) == weight.a.stride(2) == 1
    assert weight.a.stride(1) == inputs
    early = rows.early and len(x) <= PIPELINED_ROWS
    cut = EARLY if early else PLAIN
    shares, share = shares_of(lines, inputs, cut)
    block = min(cut.lines, triton.next_power_of_2(lines))
    partials = torch.empty(shares, len(x), lines, dtype=torch.float32, device=x.device)
    summed: dict[str, Any] = {}
    if not early:
        arrivals = rows.arrivals if shares > 1 else None
        summed = {"arrivals": partials if arrivals is None else arrivals, "SUMMED": arrivals is not None}
    (early_kernel if early else shrink_kernel)[(len(rows.schedule[1]) * shares, triton.cdiv(lines, block))](
        x, weight.a, partials, *rows.schedule, len(x), lines, inputs, x.stride(0), weight.a.stride(0),
        SHARE=share, SHARES=shares, ROWS=rows.tile, LINES=block, INPUTS=cut.inputs, EVEN=inputs % cut.inputs == 0,
        PDL=chip.pdl, num_warps=4 if early else chip.loop_warps, num_stages=2, launch_pdl=chip.pdl, **summed,
    )  # fmt: skip
    return LowRankSum(partials[:1] if summed.get("SUMMED") else partials, rows, weight)


def expand_rows(out: Tensor, addition: LowRankSum) -> None:
    """`kernels.low_rank.expand` by the kernel."""
    partials, rows, weight = addition
    assert rows.schedule is not None, "sorted on this device"
    chip, rank = chip_of(out.device), weight.rank
    assert rank % 16 == 0, "as matrix units want it"
    assert out.stride(1) == weight.b.stride(2) == 1
    assert weight.b.stride(1) == rank
    expand_kernel[(len(rows.schedule[1]), len(weight.tiles))](
        out, partials, weight.b, weight.tiles, *rows.schedule, len(out), partials.shape[2], out.stride(0),
        weight.b.stride(0), SHARES=len(partials), ROWS=rows.tile, RANK=rank, BLOCK=least_block(rank),
        OUTPUTS=OUTPUT_TILE, PDL=chip.pdl, num_warps=chip.loop_warps, num_stages=2, launch_pdl=chip.pdl,
    )  # fmt: skip


def multiply_adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, added: LowRankInputs, *, gated: bool, invariant: bool
) -> Tensor | None:
    """`kernels.linear_triton.multiply` with what adapters add, where the product's kernel adds it, of up to 256 rows.
    Where the plan has the library's product, tiles take its place: what they lose is less than two kernels cost."""
    if invariant:
        return None
    way = tiles = way_of(x, weight, gated, invariant, least=2)
    if way is None or isinstance(way, PipelinedTiling):
        tiles = way_of(x, weight, gated, invariant=True, least=2)
    counted = added.rows.counts is not None
    if not (counted and isinstance(tiles, Tiling) and fits_tiles(added, tiles, gated=gated and tiles.gated)):
        tiles = None
    few = added.weight.rank <= NARROW and len(x) * added.weight.rank <= PREFETCHED
    if isinstance(way, PipelinedTiling) and (few or tiles is None):
        pipelined = pipelined_product()
        if pipelined is None or not (tma_compatible(x) and tma_compatible(weight)):
            return None
        if len(added.weight.parts) > 3 or any(part.start % (16 * way.warps) for part in added.weight.parts):
            return None  # a program's outputs would be of two parts
        return pipelined(x, weight, bias, way, gated=gated, addition=shrink_rows(*added))
    return None if tiles is None else multiply_by(tiles, x, weight, bias, gated=gated, added=added)


def least_block(rank: int) -> int:
    """The largest power of two up to BLOCK that divides a rank."""
    return min(BLOCK, rank & -rank)


@triton.jit(do_not_specialize=("rows",))
def shrink_kernel(
    x, a, partials, order, tiles, count, rows, lines, inputs, x_stride, a_stride, arrivals,
    SHARE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr, SUMMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The partial sums of one tile of rows, some lines of its place's `a` and a share of the inputs. SUMMED: where
    those of the first share stand, the last program of all shares leaves their sum."""
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
    real = (at < size)[:, None] & (line < lines)[None, :]
    first = partials + row[:, None] * lines + line[None, :]
    apart = rows.to(tl.int64) * lines
    tl.store(first + share * apart, sums, mask=real)
    if SUMMED:  # noqa: SIM102 - `and` of the language evaluates both sides
        if arrives_last(arrivals + tile * tl.num_programs(1) + tl.program_id(1), SHARES):
            sums = tl.zeros([ROWS, LINES], tl.float32)
            for other in range(SHARES):
                sums += tl.load(first + other * apart, mask=real, other=0.0)
            tl.store(first, sums, mask=real)


@triton.jit
def own_tile(order, tiles, count, tile, ROWS: tl.constexpr):
    """`routing_triton.load_tile_pairs` of a program, and whether it has a tile: if not, all is the first place's."""
    served = tile < tl.load(count)  # what lies behind that many is not written
    place = tl.where(served, tl.load(tiles + tile * 3), 0).to(tl.int64)
    begin = tl.where(served, tl.load(tiles + tile * 3 + 1), 0)
    size = tl.where(served, tl.load(tiles + tile * 3 + 2), 1)
    at = tl.arange(0, ROWS)
    row = tl.where(served, tl.load(order + begin + tl.minimum(at, size - 1)), 0).to(tl.int64)
    return place, at, size, row, served


@triton.jit(do_not_specialize=("rows",))
def early_kernel(
    x, a, partials, order, tiles, count, rows, lines, inputs, x_stride, a_stride,
    SHARE: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, INPUTS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same, which waits when it has its first weights; LINES divides the lines."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place, at, size, row, served = own_tile(order, tiles, count, tl.program_id(0) // SHARES, ROWS)
    share = tl.program_id(0) % SHARES
    begin = share * SHARE
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    a_lines = a + place * a_stride + line * inputs
    weights = load_tile(a_lines, begin, inputs, INPUTS, EVEN, True)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if not served:
        return
    x_lines = x + row * x_stride
    sums = tl.zeros([ROWS, LINES], tl.float32)
    for start in range(begin, tl.minimum(begin + SHARE, inputs), INPUTS):
        values = load_tile(x_lines, start, inputs, INPUTS, EVEN, False)
        sums = tl.dot(values, weights, sums, input_precision="ieee")
        weights = load_tile(a_lines, start + INPUTS, inputs, INPUTS, False, True)
    found = partials + (share.to(tl.int64) * rows + row)[:, None] * lines + line[None, :]
    tl.store(found, sums, mask=(at < size)[:, None])


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
