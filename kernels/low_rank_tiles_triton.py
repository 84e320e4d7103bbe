"""Low-rank additions that a product's own tiles add: one launch shrinks the inputs, multiplies and adds.

A kernel before the product costs its latency, 2 to 5 us, since the product waits for it before its first input. So the
first programs of the product's grid shrink while the others multiply, and a tile waits for them at its end alone: by
then they are done, mostly on SMs that the product's last wave leaves free. A tile then multiplies the shrunk rows of
all adapters of a chunk with their expanding weights at once, each row's numbers of other adapters being zero.

Nobody waits for a program that cannot run. Programs are dispatched in the order of their ids, those that shrink are the
first and no more than there are SMs, they wait for nothing but the kernel before (PDL), and no later kernel begins
before all programs of this one have.

Each shares the inputs in a way that follows from the weight alone; the last of a tile of rows to arrive adds up the
shares in their order. So neither a row's neighbours nor the number of programs change its sums. A product counts what
is shrunk in one of two counters, in turns, and clears the one of the product before, which nobody reads any more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.attention_triton import arrives_last
from penstock.kernels.chip import chip_of
from penstock.kernels.linear_tilings import Tiling, shared_bytes
from penstock.kernels.records import LowRankInputs, LowRankWeight
from penstock.kernels.routing_triton import load_tile_pairs

ROWS = tl.constexpr(16)  # of a tile of one adapter's rows: `kernels.low_rank_triton.SMALL`
LINES = 64  # of `a` in one unit of work, at most
INPUTS = tl.constexpr(128)  # multiplied at once
SHARE = 1024  # inputs of a share, at least
SHARES = 8  # at most
UNITS = 4  # shrunk by one program, about
CHUNK = 128  # numbers of shrunk rows that are multiplied at once, at most
LEAST = 16  # as matrix units want it
HELD = 64  # expanding weights of a chunk that a thread holds
BLOCKS = 16  # of lines, at most
COUNTERS = tl.constexpr(2)  # of what is shrunk, before those of tiles


class Parts(NamedTuple):
    """How a weight's inputs and the lines of its `a` are cut."""

    share: int  # inputs
    shares: int
    lines: int
    blocks: int  # of so many lines


def parts_of(weight: LowRankWeight) -> Parts:
    lines, inputs = weight.a.shape[1:]
    share = max(SHARE, -(-inputs // (SHARES * INPUTS.value)) * INPUTS.value)
    block = min(LINES, triton.next_power_of_2(lines))
    return Parts(share, triton.cdiv(inputs, share), block, triton.cdiv(lines, block))


def fits_tiles(added: LowRankInputs, tiling: Tiling, *, gated: bool) -> bool:
    """Whether a tile's outputs are of one part, of each half where it takes the gate, and a program has room."""
    weight, width = added.weight, added.weight.b.shape[1] // 2
    starts = [part.start for part in weight.parts[1:]]
    if len(starts) > 2 or parts_of(weight).blocks > BLOCKS or chunk_of(added, tiling, gated=gated) < LEAST:
        return False
    return all(start == width if gated else start % tiling.outputs == 0 for start in starts)


def chunk_of(added: LowRankInputs, tiling: Tiling, *, gated: bool) -> int:
    """How many numbers of shrunk rows are multiplied at once: their expanding weights stay in shared memory."""
    chip, (count, _, rank) = chip_of(added.x.device), added.weight.b.shape
    outputs, itemsize = tiling.outputs * (2 if gated else 1), added.x.itemsize
    room = chip.shared_memory - shared_bytes(tiling, chip, gated=gated, itemsize=itemsize)
    all_of_them: int = triton.next_power_of_2(count * rank)
    chunk = min(CHUNK, HELD * 32 * tiling.warps // tiling.outputs, max(LEAST, all_of_them))
    while chunk * outputs * itemsize > room and chunk >= LEAST:
        chunk //= 2
    return chunk


def counters(tiles: int, adapters: int, device: torch.device) -> Tensor:
    """Of a step whose rows are in so many tiles at most, with `sizes_in` them."""
    return torch.zeros(COUNTERS.value + adapters + tiles * BLOCKS, dtype=torch.int32, device=device)


def sizes_in(counts: Tensor, adapters: int) -> Tensor:
    """How many rows each adapter has."""
    return counts[COUNTERS.value : COUNTERS.value + adapters]


def tile_arguments(added: LowRankInputs, tiling: Tiling, programs: int, *, gated: bool) -> dict[str, Any]:
    """What the kernel of a product of so many programs takes further, `workers` programs among it."""
    x, rows, weight = added
    assert rows.schedule is not None and rows.counts is not None and rows.turns is not None  # noqa: PT018
    assert rows.tile == ROWS.value
    assert weight.rank % LEAST == 0, "as matrix units want it"
    assert x.stride(1) == weight.a.stride(2) == weight.b.stride(2) == 1
    assert weight.a.stride(1) == x.shape[1]
    assert weight.b.stride(1) == weight.rank
    parts, (count, lines, _), (order, tiles, total) = parts_of(weight), weight.a.shape, rows.schedule
    sms, units = chip_of(x.device).num_sms, len(tiles) * parts.shares * parts.blocks
    free = max(-programs % sms, sms // 4, triton.cdiv(units, UNITS))
    starts = [part.start for part in weight.parts[1:]] + [weight.b.shape[1]] * 2
    return {
        "a": weight.a, "b": weight.b, "places": rows.places, "order": order, "row_tiles": tiles, "total": total,
        "partials": torch.empty(parts.shares, len(x), lines, dtype=torch.float32, device=x.device),
        "shrunk": torch.empty(len(x), lines, dtype=weight.b.dtype, device=x.device), "counts": rows.counts,
        "turn": next(rows.turns), "a_stride": weight.a.stride(0), "b_stride": weight.b.stride(0), "a_lines": lines,
        "adapters": count, "second": starts[0], "third": starts[1], "RANK": weight.rank,
        "CHUNK": chunk_of(added, tiling, gated=gated),
        "SHARE": parts.share, "SHARES": parts.shares, "LINES": parts.lines, "BLOCKS": parts.blocks,
        "workers": max(1, min(units, sms, free)),
    }  # fmt: skip


@triton.jit
def shrink_units(
    x, a, partials, shrunk, counts, turn, order, row_tiles, total, rows, inputs, x_stride, a_stride, lines, adapters,
    workers, SHARE: tl.constexpr, SHARES: tl.constexpr, LINES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Every so many-th unit of work: a tile of one adapter's rows, a share of the inputs, and some lines of its `a`."""
    worker = tl.program_id(0)
    if worker == 0:
        tl.store(counts + (1 - turn), 0)
    for unit in range(worker, tl.load(total) * (SHARES * BLOCKS), workers):
        share = unit % SHARES
        block = unit // SHARES  # of all tiles
        place, at, size, row = load_tile_pairs(order, row_tiles, block // BLOCKS, ROWS)
        line = block % BLOCKS * LINES + tl.arange(0, LINES)
        x_lines = x + row * x_stride
        a_lines = a + place.to(tl.int64) * a_stride + tl.minimum(line, lines - 1) * inputs
        sums = tl.zeros([ROWS, LINES], tl.float32)
        for start in tl.range(share * SHARE, tl.minimum(share * SHARE + SHARE, inputs), INPUTS, num_stages=3):
            inner = start + tl.arange(0, INPUTS)
            there = inner < inputs
            values = tl.load(x_lines[:, None] + inner[None, :], mask=there[None, :], other=0.0)
            weights = tl.load(a_lines[None, :] + inner[:, None], mask=there[:, None], other=0.0)
            sums = tl.dot(values, weights, sums, input_precision="ieee")
        real = (at < size)[:, None] & (line < lines)[None, :]
        found = partials + row[:, None] * lines + line[None, :]
        apart = rows.to(tl.int64) * lines
        tl.store(found + share * apart, sums, mask=real)
        if arrives_last(counts + COUNTERS + adapters + block, SHARES):
            sums = tl.zeros([ROWS, LINES], tl.float32)
            for other in range(SHARES):
                sums += tl.load(found + other * apart, mask=real, other=0.0)
            tl.store(shrunk + row[:, None] * lines + line[None, :], sums.to(shrunk.dtype.element_ty), mask=real)
            tl.debug_barrier()  # every thread's numbers are written
            tl.atomic_add(counts + turn, 1, sem="release")


@triton.jit
def own_columns(start, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """Of a chunk of all adapters' shrunk numbers: whose each is, and which it is of that adapter's."""
    column = start + tl.arange(0, CHUNK)
    return column // RANK, column % RANK


@triton.jit
def expanding_weights(
    b, counts, start, output, width, adapters, b_stride, RANK: tl.constexpr, CHUNK: tl.constexpr,
    SWAP_AB: tl.constexpr,
):  # fmt: skip
    """A chunk's, `[numbers, outputs]`, or with SWAP_AB the other way round; zeros of an adapter that no row has."""
    owner, number = own_columns(start, RANK, CHUNK)
    there = tl.load(counts + COUNTERS + owner, mask=owner < adapters, other=0) > 0
    begin = b + owner.to(tl.int64) * b_stride + number
    line = output * RANK
    real = output < width
    if SWAP_AB:
        found = tl.load(begin[None, :] + line[:, None], mask=there[None, :] & real[:, None], other=0.0)
    else:
        found = tl.load(begin[:, None] + line[None, :], mask=there[:, None] & real[None, :], other=0.0)
    return found


@triton.jit
def expanding_halves(
    b, counts, output, width, adapters, b_stride, RANK: tl.constexpr, CHUNK: tl.constexpr, SWAP_AB: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """The first chunk's, and those of a gate's other half."""
    weights = expanding_weights(b, counts, 0, output, width, adapters, b_stride, RANK, CHUNK, SWAP_AB)
    ups = weights
    if GATED:
        ups = expanding_weights(
            b, counts, 0, width + output, 2 * width, adapters, b_stride, RANK, CHUNK, SWAP_AB
        )  # fmt: skip
    return weights, ups


@triton.jit
def add_chunk(
    sums, weights, shrunk, place, row, start, lines, first, RANK: tl.constexpr, CHUNK: tl.constexpr,
    SWAP_AB: tl.constexpr,
):  # fmt: skip
    """The sums of a tile with a chunk's part."""
    owner, number = own_columns(start, RANK, CHUNK)
    mine = place[:, None] == owner[None, :] + 1
    values = tl.load(shrunk + (row * lines + first)[:, None] + number[None, :], mask=mine, other=0.0)
    if SWAP_AB:
        sums = tl.dot(weights, values.trans(), sums, input_precision="ieee")
    else:
        sums = tl.dot(values, weights, sums, input_precision="ieee")
    return sums


@triton.jit
def add_chunks(
    sums, weights, b, counts, shrunk, place, row, output, width, first, adapters, lines, b_stride,
    RANK: tl.constexpr, CHUNK: tl.constexpr, SWAP_AB: tl.constexpr,
):  # fmt: skip
    """The sums of a tile with all adapters' parts. weights: of the first chunk. width: behind the last output that is
    real. first: of a row's shrunk numbers, of the part that the outputs are in."""
    sums = add_chunk(sums, weights, shrunk, place, row, 0, lines, first, RANK, CHUNK, SWAP_AB)
    for start in range(CHUNK, adapters * RANK, CHUNK):
        here = (place > start // RANK) & (place <= (start + CHUNK - 1) // RANK + 1)
        if tl.max(here.to(tl.int32), 0) > 0:
            weights = expanding_weights(b, counts, start, output, width, adapters, b_stride, RANK, CHUNK, SWAP_AB)
            sums = add_chunk(sums, weights, shrunk, place, row, start, lines, first, RANK, CHUNK, SWAP_AB)
    return sums


@triton.jit
def add_adapters(
    sums, ups, weights, up_weights, b, counts, turn, total, shrunk, place, row, output, width, first_output, second,
    third, adapters, lines, b_stride, RANK: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
    SWAP_AB: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The sums of a tile, and of its gate's other half, with what the rows' adapters add, once all rows are shrunk.
    second, third: where those parts of the outputs begin."""
    wanted = tl.load(total) * BLOCKS
    while tl.atomic_add(counts + turn, 0, sem="acquire") < wanted:
        pass
    first = ((first_output >= second).to(tl.int32) + (first_output >= third).to(tl.int32)) * RANK
    sums = add_chunks(
        sums, weights, b, counts, shrunk, place, row, output, width, first, adapters, lines, b_stride,
        RANK, CHUNK, SWAP_AB,
    )  # fmt: skip
    if GATED:
        first = ((width + first_output >= second).to(tl.int32) + (width + first_output >= third).to(tl.int32)) * RANK
        ups = add_chunks(
            ups, up_weights, b, counts, shrunk, place, row, width + output, 2 * width, first, adapters, lines,
            b_stride, RANK, CHUNK, SWAP_AB,
        )  # fmt: skip
    return sums, ups
