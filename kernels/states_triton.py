"""What a step's rows do to their states, found on the device once for all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl


def launch_begin(
    query_start: Tensor, slots: Tensor, starts: Tensor, stepping: Tensor, bases: Tensor, piece: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.states.advance_bases` by the kernel: one program for all rows."""
    rows = len(slots)
    row_bases, first, busy = (torch.empty(rows + more, dtype=torch.int32, device=slots.device) for more in (0, 1, 1))
    tile = triton.next_power_of_2(rows)
    pdl = chip_of(slots.device).pdl
    begin_kernel[(1,)](
        query_start, slots, starts, stepping, bases, row_bases, first, busy, rows,
        PIECE=piece, TILE=tile, PDL=pdl, num_warps=min(max(tile // 32, 1), 8), launch_pdl=pdl,
    )  # fmt: skip
    return row_bases, first, busy


@triton.jit(do_not_specialize=("rows",))
def begin_kernel(
    query_start, slots, starts, stepping, bases, row_bases, first, busy, rows,
    PIECE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of several tokens' slots are different ones; a slot of rows without tokens is not written."""
    begin_pdl(PDL)
    row = tl.arange(0, TILE)
    there = row < rows
    count = tl.load(query_start + row + 1, mask=there, other=0) - tl.load(query_start + row, mask=there, other=0)
    start = tl.load(starts + row, mask=there, other=0)
    slot = tl.load(slots + row, mask=there, other=0)
    steps = tl.load(stepping + row, mask=there, other=0) > 0
    held = tl.load(bases + slot, mask=there, other=0)
    behind = start - held
    base = tl.where((behind < 0) | (behind >= 2 * PIECE), start // PIECE * PIECE, held)
    stays = tl.where(steps, start, start + count)
    reached = tl.maximum(stays // PIECE * PIECE, base)
    last = tl.where(steps, reached, tl.cdiv(stays, PIECE) * PIECE)
    some = there & (count > 0)
    pieces = tl.where(some, (last - base) // PIECE, 0)
    tl.store(row_bases + row, base, mask=there)
    tl.store(first + row + 1, tl.cumsum(pieces, 0), mask=there)
    tl.store(first + row, 0, mask=row == 0)
    tl.store(bases + slot, reached, mask=some)
    works = pieces > 0
    ones = works.to(tl.int32)
    tl.store(busy + tl.cumsum(ones, 0), row, mask=works)
    tl.store(busy + row, tl.sum(ones, 0), mask=row == 0)
