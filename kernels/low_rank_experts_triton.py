"""Low-rank additions to experts' products in Triton.

A tile has pairs of one expert, as the products themselves have them, whose tokens may have different adapters: each
that is among them is multiplied with all rows of the tile, and its own rows take the result. The first kernel shrinks,
the second expands and adds; a pair without an adapter is not written. No sum depends on other pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.linear_triton import load_tile
from penstock.kernels.records import ExpertAdapters, LowRankExperts
from penstock.kernels.routing_triton import Schedule, load_tile_pairs

INPUTS = 64  # multiplied at once
BLOCK = 64  # most lines of `a` in one program, and of `b` multiplied at once
OUTPUTS = 64  # of a part in one program


class Added(NamedTuple):
    """What adapters add to the products of one step's pairs, which are in tiles of so many rows."""

    schedule: Schedule
    rows: int
    chosen: int
    adapters: ExpertAdapters | None

    def to_gate_up(self, out: Tensor, x: Tensor) -> None:
        """In place, to `out  # [pairs, outputs]` of the tokens' x `[tokens, inputs]`."""
        if self.adapters is not None:
            add_pairs(out, x, self, self.adapters.gate_up, self.adapters.places, self.chosen)

    def to_down(self, out: Tensor, x: Tensor) -> None:
        """The same, of the pairs' own x `[pairs, inputs]`."""
        if self.adapters is not None:
            add_pairs(out, x, self, self.adapters.down, self.adapters.places, 1)


def add_pairs(out: Tensor, x: Tensor, added: Added, weight: LowRankExperts, places: Tensor, pairs_of_row: int) -> None:
    """Add each pair's part to its line of `out`; x has a row for so many of them, places one for each token."""
    (order, tiles, total), (count, _, lines, inputs) = added.schedule, weight.a.shape
    outputs, rank = weight.b.shape[2:]
    width = outputs // weight.parts
    assert rank % 16 == 0, "as matrix units want it"
    assert x.stride(1) == out.stride(1) == places.stride(0) == 1
    assert weight.a[0, 0].is_contiguous()
    assert weight.b[0, 0].is_contiguous()
    block, pdl = min(BLOCK, rank & -rank), chip_of(x.device).pdl
    shrunk = torch.empty(len(order), lines, dtype=torch.float32, device=x.device)
    warps = 4 if added.rows <= 64 else 8
    shrink_experts_kernel[(len(tiles), lines // block)](
        x, weight.a, places, shrunk, order, tiles, total, lines, inputs, x.stride(0), weight.a.stride(0),
        weight.a.stride(1), COUNT=count, CHOSEN=added.chosen, SHARED=pairs_of_row, ROWS=added.rows, LINES=block,
        INPUTS=INPUTS, EVEN=inputs % INPUTS == 0, PDL=pdl, num_warps=warps, num_stages=2, launch_pdl=pdl,
    )  # fmt: skip
    columns = triton.cdiv(width, OUTPUTS)
    expand_experts_kernel[(len(tiles), columns * weight.parts)](
        out, shrunk, weight.b, places, order, tiles, total, lines, width, columns, out.stride(0), weight.b.stride(0),
        weight.b.stride(1), COUNT=count, CHOSEN=added.chosen, ROWS=added.rows, RANK=rank, BLOCK=block, OUTPUTS=OUTPUTS,
        PDL=pdl, num_warps=warps, num_stages=2, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def shrink_experts_kernel(
    x, a, places, shrunk, order, tiles, total, lines, inputs, x_stride, place_stride, expert_stride,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    INPUTS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of pairs and some lines of their places' `a`."""
    begin_pdl(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(total):
        return
    expert, at, size, pair = load_tile_pairs(order, tiles, tile, ROWS)
    own = tl.load(places + pair // CHOSEN)
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)
    x_lines = x + pair // SHARED * x_stride
    for place in range(1, COUNT + 1):
        mine = own == place
        if tl.sum(mine.to(tl.int32), 0) > 0:
            begin = tl.cast(place_stride, tl.int64) * (place - 1) + expert.to(tl.int64) * expert_stride
            a_lines = a + begin + line * inputs
            sums = tl.zeros([ROWS, LINES], tl.float32)
            for start in range(0, inputs, INPUTS):
                values = load_tile(x_lines, start, inputs, INPUTS, EVEN, False)
                weights = load_tile(a_lines, start, inputs, INPUTS, EVEN, True)
                sums = tl.dot(values, weights, sums, input_precision="ieee")
            there = mine & (at < size)
            tl.store(shrunk + pair[:, None] * lines + line[None, :], sums, mask=there[:, None])


@triton.jit
def expand_experts_kernel(
    out, shrunk, b, places, order, tiles, total, lines, width, columns, out_stride, place_stride, expert_stride,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of pairs and some outputs of one part."""
    begin_pdl(PDL)
    tile = tl.program_id(0)
    if tile >= tl.load(total):
        return
    expert, at, size, pair = load_tile_pairs(order, tiles, tile, ROWS)
    own = tl.load(places + pair // CHOSEN)
    part = tl.program_id(1) // columns
    output = tl.program_id(1) % columns * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < width
    found = out + pair[:, None] * out_stride + (part * width + output)[None, :]
    for place in range(1, COUNT + 1):
        mine = (own == place) & (at < size)
        if tl.sum(mine.to(tl.int32), 0) > 0:
            begin = tl.cast(place_stride, tl.int64) * (place - 1) + expert.to(tl.int64) * expert_stride
            b_lines = b + begin + (part * width + tl.minimum(output, width - 1)) * RANK
            there = mine[:, None] & real[None, :]
            sums = tl.load(found, mask=there, other=0.0).to(tl.float32)
            for start in range(0, RANK, BLOCK):
                line = start + tl.arange(0, BLOCK)
                values = tl.load(
                    shrunk + pair[:, None] * lines + (part * RANK + line)[None, :], mask=mine[:, None], other=0.0
                )
                weights = tl.load(b_lines[None, :] + line[:, None])
                sums = tl.dot(values.to(b.dtype.element_ty), weights, sums, input_precision="ieee")
            tl.store(found, sums.to(out.dtype.element_ty), mask=there)
