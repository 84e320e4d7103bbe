"""Partial results of attention rows and their combination, for `kernels.attention_stream`: in Gluon.

A tile's units may be spread over several programs, and a row's keys over two tiles: those it shares with others and its
own. Each program stores its partial result and the logarithm of its sum of weights (LSE), and counts it; the one that
counts a row's last partial combines all of them in the order of the keys (flash decoding: Dao et al., 2023).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from penstock.kernels.gluon_names import barrier


@gluon.jit
def partial_row(program, programs, units, begin, size, whole, BLOCK_M: gl.constexpr):
    """Where a program stores its partial result of a tile: at the tile's own rows if it computes all of the tile, else
    at the program's first or second tile of rows, as its units begin in the tile or only end there.
    """
    first = program * units // programs
    end = (program + 1) * units // programs
    edge = (2 * program + (first < begin).to(gl.int32)) * BLOCK_M
    return gl.where((first <= begin) & (end >= begin + size), whole, edge)


@gluon.jit
def combine_partials(
    partials, lses, found, row_max, row_sum, low, high, programs, units, begin, size, whole, offset,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_M: gl.constexpr, GROUP_TILE: gl.constexpr, WIDE: gl.constexpr,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Combine a row's partials with those that the programs low .. high have stored of one tile, in order."""
    tile_rows = gl.arange(0, GROUP_TILE, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    for start in range(low, high + 1, AT_ONCE):
        for step in gl.static_range(AT_ONCE):  # independent loads
            program = start + step
            real = (tile_rows < GROUP) & (program <= high)
            at = partial_row(program, programs, units, begin, size, whole, BLOCK_M) + offset + tile_rows
            lse = gl.load(lses + at, mask=real, other=float("-inf"))
            partial = gl.load(partials + at[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
            highest = gl.maximum(row_max, lse)
            level = gl.where(highest == float("-inf"), 0.0, highest)
            alpha = gl.exp2(row_max - level)
            weight = gl.exp2(lse - level)
            found = partial * weight[:, None] + found * alpha[:, None]
            row_sum = row_sum * alpha + weight
            row_max = highest
    return found, row_max, row_sum


@gluon.jit
def count_partial(
    arrivals, schedule, base, only, head, rows, shared, groups, own, units, programs,
    KV_HEADS: gl.constexpr, TOGETHER: gl.constexpr, BLOCK_M: gl.constexpr, HEADER: gl.constexpr,
):  # fmt: skip
    """Count a partial for the rows base .. base + only - 1; returns a bit for each that now has all of its partials,
    and whose counter is zero again.
    """
    MEMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    within = gl.arange(0, 128, MEMBERS)  # a thread to each, of which no more than BLOCK_M are rows
    row = base + within
    there = (within < only) & (row < rows)
    start = gl.load(schedule + HEADER + row, mask=there, other=0)
    past = gl.load(schedule + HEADER + row + 1, mask=there, other=0)
    there = there & (past > start)
    each = groups * shared + own
    origin = head * each + groups * shared
    expected = ((origin + past) * programs - 1) // units - ((origin + start + 1) * programs - 1) // units + 1
    prefix = head * each + row // TOGETHER * shared
    expected += ((prefix + shared) * programs - 1) // units - ((prefix + 1) * programs - 1) // units + 1
    barrier()  # every thread's partial is written
    counters = arrivals + row * KV_HEADS + head
    before = gl.atomic_add(counters, gl.full([128], 1, gl.int32, MEMBERS), mask=there, sem="acq_rel")
    complete = there & (before + 1 == expected)
    gl.store(counters, gl.zeros_like(row), mask=complete)
    return gl.sum(complete.to(gl.int64) << (within % BLOCK_M).to(gl.int64), 0)


@gluon.jit
def combine_row(
    out, partials, lses, schedule, query_start, row, head, rows, shared, groups, own, units, programs,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_M: gl.constexpr,
    HEADER: gl.constexpr, GROUP_TILE: gl.constexpr,
):  # fmt: skip
    """Combine all partials of a row and write the result."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOGETHER: gl.constexpr = BLOCK_M // GROUP
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    tile_rows = gl.arange(0, GROUP_TILE, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    found = gl.zeros([GROUP_TILE, DIM], gl.float32, WIDE)
    row_max = gl.full([GROUP_TILE], float("-inf"), gl.float32, gl.SliceLayout(1, WIDE))
    row_sum = gl.zeros([GROUP_TILE], gl.float32, gl.SliceLayout(1, WIDE))
    each = groups * shared + own
    at = row // TOGETHER
    begin = head * each + at * shared
    low = ((begin + 1) * programs - 1) // units
    high = ((begin + shared) * programs - 1) // units
    whole = 2 * programs * BLOCK_M + rows * HEADS + (at * KV_HEADS + head) * BLOCK_M
    found, row_max, row_sum = combine_partials(
        partials, lses, found, row_max, row_sum, low, high, programs, units, begin, shared, whole,
        row % TOGETHER * GROUP, GROUP, DIM, BLOCK_M, GROUP_TILE, WIDE, 2,
    )  # fmt: skip
    start = gl.load(schedule + HEADER + row)
    size = gl.load(schedule + HEADER + row + 1) - start
    begin = head * each + groups * shared + start
    low = ((begin + 1) * programs - 1) // units
    high = ((begin + size) * programs - 1) // units
    whole = 2 * programs * BLOCK_M + (row * KV_HEADS + head) * GROUP
    found, row_max, row_sum = combine_partials(
        partials, lses, found, row_max, row_sum, low, high, programs, units, begin, size, whole, 0,
        GROUP, DIM, BLOCK_M, GROUP_TILE, WIDE, 4,
    )  # fmt: skip
    found = found / gl.where(row_sum > 0, row_sum, 1.0)[:, None]
    token = gl.load(query_start + row).to(gl.int64)
    places = (token * HEADS + head * GROUP + tile_rows)[:, None] * DIM + dims[None, :]
    gl.store(out + places, found.to(out.dtype.element_ty), mask=(tile_rows < GROUP)[:, None] & (dims >= 0)[None, :])


@gluon.jit
def store_partial(
    partials, lses, found, lse, first, base, only, rows,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_M: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Store a partial result for the real rows of a tile."""
    tile_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    real = (tile_rows // GROUP < only) & (base + tile_rows // GROUP < rows)
    targets = partials + (first + tile_rows)[:, None] * DIM + dims[None, :]
    gl.store(targets, found, mask=real[:, None] & (dims >= 0)[None, :])
    gl.store(lses + first + tile_rows, gl.convert_layout(lse, gl.SliceLayout(1, SUMS)), mask=real)
