"""What is left of rows in parts, and the joining of them, for `kernels.attention_stream`: in Gluon.

A tile's units may lie in the shares of several programs, and a row's keys in two tiles: those it shares with others and
its own. Each program leaves the mean of what it has seen and the logarithm of its weight, and counts it; the one that
counts the last part of a row joins all of them in the order of the keys (flash decoding: Dao et al., 2023).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

try:
    from triton.experimental.gluon.language import barrier
except ImportError:  # its name in Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier


@gluon.jit
def part_line(program, programs, units, begin, size, whole, LINES: gl.constexpr):
    """Where a program puts its part of a tile: the tile's own place if it has all of it, else the program's first or
    second, as its share begins in the tile or only ends there.
    """
    first = program * units // programs
    end = (program + 1) * units // programs
    edge = (2 * program + (first < begin).to(gl.int32)) * LINES
    return gl.where((first <= begin) & (end >= begin + size), whole, edge)


@gluon.jit
def join_parts(
    parts, masses, found, peak, total, low, high, programs, units, begin, size, whole, offset,
    GROUP: gl.constexpr, DIM: gl.constexpr, LINES: gl.constexpr, GROUP_TILE: gl.constexpr, WIDE: gl.constexpr,
    AT_ONCE: gl.constexpr,
):  # fmt: skip
    """Carry the mean of a row's parts on over those that the programs low .. high have left of one tile, in order."""
    lines = gl.arange(0, GROUP_TILE, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    for start in range(low, high + 1, AT_ONCE):
        for ahead in gl.static_range(AT_ONCE):  # independent loads
            program = start + ahead
            real = (lines < GROUP) & (program <= high)
            line = part_line(program, programs, units, begin, size, whole, LINES) + offset + lines
            mass = gl.load(masses + line, mask=real, other=float("-inf"))
            part = gl.load(parts + line[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
            highest = gl.maximum(peak, mass)
            level = gl.where(highest == float("-inf"), 0.0, highest)
            fade = gl.exp2(peak - level)
            weight = gl.exp2(mass - level)
            found = part * weight[:, None] + found * fade[:, None]
            total = total * fade + weight
            peak = highest
    return found, peak, total


@gluon.jit
def count_part(
    arrivals, schedule, base, only, head, rows, shared, groups, own, units, programs,
    KV_HEADS: gl.constexpr, TOGETHER: gl.constexpr, LINES: gl.constexpr, HEADER: gl.constexpr,
):  # fmt: skip
    """Count a part as done for the rows base .. base + only - 1; a bit for each of them that now has all of its parts,
    and whose counter is zero again.
    """
    MEMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    within = gl.arange(0, 128, MEMBERS)  # a thread to each, of which no more than LINES are rows
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
    barrier()  # every thread's part is written
    counters = arrivals + row * KV_HEADS + head
    before = gl.atomic_add(counters, gl.full([128], 1, gl.int32, MEMBERS), mask=there, sem="acq_rel")
    complete = there & (before + 1 == expected)
    gl.store(counters, gl.zeros_like(row), mask=complete)
    return gl.sum(complete.to(gl.int64) << (within % LINES).to(gl.int64), 0)


@gluon.jit
def join_row(
    out, parts, masses, schedule, query_start, row, head, rows, shared, groups, own, units, programs,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, LINES: gl.constexpr, HEADER: gl.constexpr,
    GROUP_TILE: gl.constexpr,
):  # fmt: skip
    """Write what a row's parts give together."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TOGETHER: gl.constexpr = LINES // GROUP
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    lines = gl.arange(0, GROUP_TILE, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    found = gl.zeros([GROUP_TILE, DIM], gl.float32, WIDE)
    peak = gl.full([GROUP_TILE], float("-inf"), gl.float32, gl.SliceLayout(1, WIDE))
    total = gl.zeros([GROUP_TILE], gl.float32, gl.SliceLayout(1, WIDE))
    each = groups * shared + own
    at = row // TOGETHER
    begin = head * each + at * shared
    low = ((begin + 1) * programs - 1) // units
    high = ((begin + shared) * programs - 1) // units
    whole = 2 * programs * LINES + rows * HEADS + (at * KV_HEADS + head) * LINES
    found, peak, total = join_parts(
        parts, masses, found, peak, total, low, high, programs, units, begin, shared, whole,
        row % TOGETHER * GROUP, GROUP, DIM, LINES, GROUP_TILE, WIDE, 2,
    )  # fmt: skip
    start = gl.load(schedule + HEADER + row)
    size = gl.load(schedule + HEADER + row + 1) - start
    begin = head * each + groups * shared + start
    low = ((begin + 1) * programs - 1) // units
    high = ((begin + size) * programs - 1) // units
    whole = 2 * programs * LINES + (row * KV_HEADS + head) * GROUP
    found, peak, total = join_parts(
        parts, masses, found, peak, total, low, high, programs, units, begin, size, whole, 0,
        GROUP, DIM, LINES, GROUP_TILE, WIDE, 4,
    )  # fmt: skip
    found = found / gl.where(total > 0, total, 1.0)[:, None]
    token = gl.load(query_start + row).to(gl.int64)
    places = (token * HEADS + head * GROUP + lines)[:, None] * DIM + dims[None, :]
    gl.store(out + places, found.to(out.dtype.element_ty), mask=(lines < GROUP)[:, None] & (dims >= 0)[None, :])


@gluon.jit
def put_part(
    parts, masses, found, mass, first, base, only, rows,
    GROUP: gl.constexpr, DIM: gl.constexpr, LINES: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Keep what some of a tile's keys gave for its real lines."""
    lines = gl.arange(0, LINES, gl.SliceLayout(1, SUMS))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    real = (lines // GROUP < only) & (base + lines // GROUP < rows)
    gl.store(parts + (first + lines)[:, None] * DIM + dims[None, :], found, mask=real[:, None] & (dims >= 0)[None, :])
    gl.store(masses + first + lines, gl.convert_layout(mass, gl.SliceLayout(1, SUMS)), mask=real)
