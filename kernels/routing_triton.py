"""Expert routing and the sort of tokens by expert, in Triton: other kernels use the results as an index.

Pairs of a token and one of its experts are sorted by expert, then by token, by counting: few by a program for each
expert, many by one for each chunk of them. So the order is deterministic, and neither it nor the tiles need the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.records import Routes, Routing

FEW = 512  # pairs that one program counts for an expert
CHUNK = 1024  # pairs that one program counts where there are more
PART = 128  # pairs that one program finds places for there, at most
MOST = 16384  # elements of a tile with a line for each of those, and a column for each expert


class Schedule(NamedTuple):
    """Which pairs of a token and an expert are multiplied together. Pair p is of token p // chosen."""

    order: Tensor  # int32 [pairs], pairs of the experts that are held, expert by expert; the rest is not written
    tiles: Tensor  # int32 [most, 3]: expert, counted from the first that is held, first place in `order`, pairs
    total: Tensor  # int32 [1], tiles


def route_rows(
    logits: Tensor, routing: Routing, gates: Tensor | None = None, real: Tensor | None = None
) -> Routes:  # fmt: skip
    """`kernels.experts.route` by the kernel."""
    rows, count = logits.shape
    assert logits.stride(1) == 1
    assert gates is None or gates.stride(0) == logits.stride(0)
    wide = routing.chosen + routing.shared
    experts = torch.empty(rows, wide, dtype=torch.int32, device=logits.device)
    shares = torch.empty(rows, wide, dtype=torch.float32, device=logits.device)
    pdl = chip_of(logits.device).pdl
    route_kernel[(rows,)](
        logits, logits if routing.bias is None else routing.bias, experts, shares, logits.stride(0),
        SIZE=count // routing.groups, GROUPS=routing.groups, TOP_GROUPS=routing.top_groups,
        GROUP_BEST=routing.group_best, WIDE=triton.next_power_of_2(count // routing.groups),
        HIGH=triton.next_power_of_2(routing.groups), CHOSEN=routing.chosen,
        SLOTS=triton.next_power_of_2(wide), NORMALISED=routing.normalised, SIGMOID=routing.sigmoid,
        BIASED=routing.bias is not None, SCALE=routing.scale, SHARED=routing.shared, PDL=pdl, gates=gates, real=real,
        num_warps=1 if count <= 256 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return Routes(experts, shares, count)


def most_tiles(pairs: int, held: int, rows: int) -> int:
    """Tiles of so many rows that pairs spread over experts make at most: none lies over two experts."""
    return min(pairs, pairs // rows + held)


def sort_pairs(
    experts: Tensor, first: int, held: int, rows: int, *, early: bool = True, sizes: Tensor | None = None,
    places: Tensor | None = None,
) -> Schedule:  # fmt: skip
    """The schedule of `experts  # [tokens, chosen]` for those from `first` on, in tiles of up to `rows` pairs.

    early: the next kernel may start before it is complete; if not, all that follow may read it before they wait. sizes:
    int32 [held], takes each expert's pairs. places: int32 [pairs], takes where in the order each stands."""
    pairs = experts.numel()
    assert experts.is_contiguous()
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(most_tiles(pairs, held, rows), 3, dtype=torch.int32, device=experts.device)
    count = torch.empty(1, dtype=torch.int32, device=experts.device)
    pdl = chip_of(experts.device).pdl
    if pairs <= FEW:
        sort_kernel[(held,)](
            experts, order, tiles, count, pairs, first, rows,
            HELD=held, BINS=triton.next_power_of_2(held + 1), CHUNK=FEW, EARLY=early, PDL=pdl,
            sizes=sizes, places=places, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        return Schedule(order, tiles, count)
    bins = triton.next_power_of_2(held)
    part = min(PART, max(16, MOST // bins))
    counts = torch.empty(triton.cdiv(pairs, CHUNK), bins, dtype=torch.int32, device=experts.device)
    given = {"HELD": held, "BINS": bins, "CHUNK": CHUNK, "PDL": pdl, "launch_pdl": pdl}
    count_kernel[(len(counts),)](experts, counts, pairs, first, num_warps=4, **given)
    place_kernel[(triton.cdiv(pairs, part),)](
        experts, counts, order, tiles, count, pairs, first, rows, PART=part, EARLY=early,
        sizes=sizes, places=places, num_warps=8, **given,
    )  # fmt: skip
    return Schedule(order, tiles, count)


@triton.jit
def route_kernel(
    logits, bias, experts, shares, stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, WIDE: tl.constexpr,
    HIGH: tl.constexpr, CHOSEN: tl.constexpr, SLOTS: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, SCALE: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr, gates=None, real=None,
):  # fmt: skip
    """One row, whose lanes are those of HIGH groups of WIDE experts. NaN makes all shares NaN, and is chosen like the
    least likely."""
    begin_pdl(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, HIGH * WIDE)
    place = lane // WIDE * SIZE + lane % WIDE
    slot = tl.arange(0, SLOTS)
    there = (lane % WIDE < SIZE) & (lane < GROUPS * WIDE)
    values = tl.load(logits + row * stride + place, mask=there, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.where(there, 1.0 / (1.0 + tl.exp(-values)), 0.0)
        total = 1.0 + 0.0 * tl.sum(scores, 0)  # NaN where one is
    else:
        highest = tl.max(tl.where(values == values, values, float("-inf")), 0)
        scores = tl.exp(values - highest)
        total = tl.sum(scores, 0)
    left = values
    if BIASED or GROUP_BEST > 1:  # scores are added to something
        left = tl.where(there, scores if SIGMOID else scores / total, float("-inf"))
    if BIASED:
        left += tl.load(bias + place, mask=there, other=0.0)
    left = tl.where(left == left, left, float("-inf"))
    if GROUPS > 1:
        left = limit_groups(tl.reshape(left, [HIGH, WIDE]), TOP_GROUPS, GROUP_BEST, HIGH, WIDE)
        left = tl.reshape(left, [HIGH * WIDE])
    chosen = tl.zeros([SLOTS], tl.float32)
    found = tl.zeros([SLOTS], tl.int32)
    for at in tl.static_range(CHOSEN):
        _, expert = tl.max(left, 0, return_indices=True)  # of equals the first
        left = tl.where(lane == expert, float("-inf"), left)
        score = tl.sum(tl.where(lane == expert, scores, 0.0), 0)
        chosen = tl.where(slot == at, score, chosen)
        found = tl.where(slot == at, expert // WIDE * SIZE + expert % WIDE, found)
    if NORMALISED:
        total = tl.where(total == total, tl.sum(chosen, 0), total)  # NaN stays NaN
    chosen = chosen / total * SCALE
    if SHARED:
        own = tl.zeros([SLOTS], tl.float32) + 1.0
        if gates is not None:
            own = tl.sigmoid(own * tl.load(gates + row * stride).to(tl.float32))
        chosen = tl.where(slot == CHOSEN, own, chosen)
        found = tl.where(slot == CHOSEN, GROUPS * SIZE, found)
    if real is not None:
        found = tl.where(row < tl.load(real), found, -1)
    last = slot < CHOSEN + SHARED
    tl.store(experts + row * (CHOSEN + SHARED) + slot, found, mask=last)
    tl.store(shares + row * (CHOSEN + SHARED) + slot, chosen, mask=last)


@triton.jit
def limit_groups(
    ranked, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """`ranked  # [groups, experts]` of the best groups, of equals the first; -inf in others."""
    group = tl.arange(0, HIGH)
    scores, best = tl.max(ranked, 1, return_indices=True)
    if GROUP_BEST == 2:
        expert = tl.arange(0, WIDE)
        scores += tl.max(tl.where(expert[None, :] == best[:, None], float("-inf"), ranked), 1)
    kept = tl.zeros([HIGH], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, top = tl.max(scores, 0, return_indices=True)
        kept = tl.where(group == top, 1, kept)
        scores = tl.where(group == top, float("-inf"), scores)
    return tl.where(kept[:, None] != 0, ranked, float("-inf"))


@triton.jit
def load_experts(experts, start, pairs, first, HELD: tl.constexpr, CHUNK: tl.constexpr):
    """Experts of some pairs, counted from the first that is held; HELD: another rank's, or past the end."""
    place = start + tl.arange(0, CHUNK)
    found = tl.load(experts + place, mask=place < pairs, other=-1) - first
    return tl.where((place < pairs) & (found >= 0) & (found < HELD), found, HELD)


@triton.jit
def begin_sort(EARLY: tl.constexpr, PDL: tl.constexpr):
    """As `begin_pdl`, but let the next kernel start only if EARLY."""
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=("pairs", "first", "rows"))
def sort_kernel(
    experts, order, tiles, count, pairs, first, rows,
    HELD: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr, sizes=None,
    places=None,
):  # fmt: skip
    """Pairs and tiles of one expert, of so few pairs that each program counts all."""
    begin_sort(EARLY, PDL)
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    found = load_experts(experts, 0, pairs, first, HELD, CHUNK)
    counts = tl.histogram(found, BINS)
    own = tl.sum(tl.where(bins == expert, counts, 0), 0)
    begin = tl.sum(tl.where(bins < expert, counts, 0), 0)
    tile = tl.sum(tl.where(bins < expert, tl.cdiv(counts, rows), 0), 0)
    if sizes is not None:
        tl.store(sizes + expert, own)
    if expert == HELD - 1:
        tl.store(count, tile + tl.cdiv(own, rows))
    for at in range(tl.cdiv(own, rows)):
        line = tiles + (tile + at) * 3
        tl.store(line, expert)
        tl.store(line + 1, begin + at * rows)
        tl.store(line + 2, tl.minimum(own - at * rows, rows))
    mine = found == expert
    place = begin + tl.cumsum(mine.to(tl.int32), 0) - 1
    pair = tl.arange(0, CHUNK)
    tl.store(order + place, pair, mask=mine)
    if places is not None:
        tl.store(places + pair, place, mask=mine)


@triton.jit(do_not_specialize=("pairs", "first"))
def count_kernel(
    experts, counts, pairs, first,
    HELD: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """How many of a chunk's pairs each expert has."""
    begin_pdl(PDL)
    found = load_experts(experts, tl.program_id(0) * CHUNK, pairs, first, HELD, CHUNK)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(found, BINS, mask=found < HELD))


@triton.jit(do_not_specialize=("pairs", "first", "rows"))
def place_kernel(
    experts, counts, order, tiles, count, pairs, first, rows,
    HELD: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr, sizes=None, places=None,
):  # fmt: skip
    """Places of some pairs of a chunk, and every so many-th tile of each expert. counts: of `count_kernel`."""
    begin_sort(EARLY, PDL)
    start = tl.program_id(0) * PART
    chunk = start // CHUNK
    chunks = tl.cdiv(pairs, CHUNK)
    bins = tl.arange(0, BINS)
    line = tl.arange(0, PART)
    earlier = load_experts(experts, chunk * CHUNK, start, first, HELD, CHUNK)
    before = tl.histogram(earlier, BINS, mask=earlier < HELD)
    own = tl.zeros([BINS], tl.int32)
    for row in range(0, chunks, PART):
        at = (row + line)[:, None]
        found = tl.load(counts + at * BINS + bins[None, :], mask=at < chunks, other=0)
        own += tl.sum(found, 0)
        before += tl.sum(tl.where(at < chunk, found, 0), 0)
    begin = tl.cumsum(own, 0) - own
    last = tl.cumsum(tl.cdiv(own, rows), 0)
    tile = last - tl.cdiv(own, rows)
    for turn in range(tl.program_id(0), tl.max(last - tile, 0), tl.num_programs(0)):
        there = tile + turn < last  # experts that have so many tiles
        target = tiles + (tile + turn) * 3
        tl.store(target, bins, mask=there)
        tl.store(target + 1, begin + turn * rows, mask=there)
        tl.store(target + 2, tl.minimum(own - turn * rows, rows), mask=there)
    if start == 0:
        tl.store(count, tl.max(last, 0))
        if sizes is not None:
            tl.store(sizes + bins, own, mask=bins < HELD)
    expert = load_experts(experts, start, pairs, first, HELD, PART)
    rank = tl.sum(((expert[:, None] == expert[None, :]) & (line[None, :] < line[:, None])).to(tl.int32), 1)
    mine = expert[:, None] == bins[None, :]
    place = tl.sum(tl.where(mine, (begin + before)[None, :], 0), 1) + rank
    tl.store(order + place, start + line, mask=expert < HELD)
    if places is not None:
        tl.store(places + start + line, place, mask=expert < HELD)


@triton.jit
def load_tile_pairs(order, tiles, tile, ROWS: tl.constexpr):
    """A tile's expert, counted from the first that is held, its lines, how many of them are real, and their pairs:
    lines past the last repeat it."""
    expert = tl.load(tiles + tile * 3)
    begin = tl.load(tiles + tile * 3 + 1)
    size = tl.load(tiles + tile * 3 + 2)
    line = tl.arange(0, ROWS)
    pair = tl.load(order + begin + tl.minimum(line, size - 1)).to(tl.int64)
    return expert, line, size, pair
