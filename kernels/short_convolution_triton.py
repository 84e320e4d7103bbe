"""Short convolutions in Triton: tiles of a step's chunks first, then steps' rows, which also leave inputs in the ring.

Entries that a chunk leaves may stand where another of its tiles still reads those of before it, so they are two
launches; a step without chunks has the second alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.gather_triton import find_rows
from penstock.kernels.launch import begin_pdl
from penstock.kernels.states import StateBatch, UnitHeads

TOKENS = 32  # of a tile of chunks


def convolve_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, batch: StateBatch, activated: bool, unit: UnitHeads,
    tails: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.short_convolution.short_convolution` by the kernels."""
    (tokens, channels), width, rows = x.shape, weight.shape[1], len(batch.slots)
    assert x.stride(1) == ring.stride(2) == 1
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, unit.dim)
    pdl = chip_of(x.device).pdl
    given = (
        x, weight, weight if bias is None else bias, ring, batch.query_start, batch.slots, batch.starts, batch.stepping,
        out, rows, x.stride(0), ring.stride(0), ring.stride(1), ring.shape[1], unit.eps,
    )  # fmt: skip
    constants = {
        "CHANNELS": channels, "WIDTH": width, "BIAS": bias is not None, "ACTIVATED": activated,
        "UNIT": unit.channels, "DIM": unit.dim, "LANES": triton.next_power_of_2(unit.dim), "PDL": pdl,
        "num_warps": 4, "launch_pdl": pdl,
    }  # fmt: skip
    if batch.has_chunks:
        steps = rows.bit_length() + 1
        lines, kept = ring if tails is None else tails, batch.slots if batch.kept is None else batch.kept
        tile_kernel[(triton.cdiv(tokens, TOKENS), blocks)](
            *given, tokens, steps, kept, 0 if batch.kept is None else len(kept), lines, *lines.stride()[:2],
            TOKENS=TOKENS, KEEPS=tails is not None, **constants,
        )  # fmt: skip
    held = triton.next_power_of_2(max(batch.most_steps, width - 1))
    row_kernel[(rows, blocks)](*given, TOKENS=held, **constants)
    return out


@triton.jit
def load_inputs(x, line, token, position, start, channel, wanted, x_stride, entry, length):
    """Of positions `[TOKENS]`, `token` being where they stand in x: those before `start` from the ring."""
    new = (position >= start)[:, None] & wanted
    old = ((position < start) & (position >= 0))[:, None] & wanted
    place = (tl.maximum(position, 0) % length) * entry
    taken = tl.load(x + (token * x_stride)[:, None] + channel[None, :], mask=new, other=0.0)
    held = tl.load(line[:, None] + place[:, None] + channel[None, :], mask=old, other=0.0)
    return tl.where(new, taken, held)


@triton.jit
def convolve_tile(
    x, weight, bias, line, out, token, position, start, there, block, x_stride, entry, length, eps,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, ACTIVATED: tl.constexpr, UNIT: tl.constexpr,
    DIM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Tokens `[TOKENS]` in a block of channels; line: of each token's row in the ring; start: its row's."""
    lane = tl.arange(0, LANES)
    channel = block * DIM + lane
    within = (lane < DIM) & (channel < CHANNELS)
    wanted = there[:, None] & within[None, :]
    found = tl.zeros([token.shape[0], LANES], tl.float32)
    if BIAS:
        found += tl.load(bias + channel, mask=within, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        back = tap + 1 - WIDTH
        inputs = load_inputs(
            x, line, token + back, position + back, start, channel, wanted, x_stride, entry, length
        )  # fmt: skip
        factor = tl.load(weight + channel * WIDTH + tap, mask=within, other=0.0).to(tl.float32)
        found += inputs.to(tl.float32) * factor[None, :]
    if ACTIVATED:
        found *= tl.sigmoid(found)
    if block * DIM < UNIT:
        found *= tl.rsqrt(tl.sum(found * found, 1) + eps)[:, None]
    tl.store(out + (token * CHANNELS)[:, None] + channel[None, :], found.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=("rows", "tokens", "steps", "kept_tokens"))
def tile_kernel(
    x, weight, bias, ring, query_start, slots, starts, stepping, out, rows, x_stride, slot_stride, entry, length, eps,
    tokens, steps, kept, kept_tokens, tails, tail_place, tail_entry,
    TOKENS: tl.constexpr, KEEPS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATED: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of a step's tokens, of those that are of chunks, and what snapshots hold of their inputs."""
    begin_pdl(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = find_rows(query_start, token, rows, steps)
    there = (token < tokens) & (row < rows)
    row = tl.minimum(row, rows - 1)
    there = there & (tl.load(stepping + row) == 0)
    start = tl.load(starts + row)
    position = start + token - tl.load(query_start + row)
    line = ring + tl.load(slots + row).to(tl.int64) * slot_stride
    token = token.to(tl.int64)
    convolve_tile(
        x, weight, bias, line, out, token, position, start, there, tl.program_id(1), x_stride, entry, length, eps,
        CHANNELS, WIDTH, BIAS, ACTIVATED, UNIT, DIM, LANES,
    )  # fmt: skip
    if KEEPS:
        place = tl.load(kept + token, mask=there & (token < kept_tokens), other=-1)
        if tl.max(place, 0) >= 0:
            lane = tl.arange(0, LANES)
            channel = tl.program_id(1) * DIM + lane
            wanted = (place >= 0)[:, None] & ((lane < DIM) & (channel < CHANNELS))[None, :]
            target = tails + (place.to(tl.int64) * tail_place)[:, None] + channel[None, :]
            for tap in tl.static_range(1, WIDTH):
                back = tap + 1 - WIDTH
                inputs = load_inputs(
                    x, line, token + back, position + back, start, channel, wanted, x_stride, entry, length
                )  # fmt: skip
                tl.store(target + (tap - 1) * tail_entry, inputs, mask=wanted)


@triton.jit(do_not_specialize=("rows",))
def row_kernel(
    x, weight, bias, ring, query_start, slots, starts, stepping, out, rows, x_stride, slot_stride, entry, length, eps,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, ACTIVATED: tl.constexpr,
    UNIT: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tokens of a row of steps, and the last inputs of any row into the ring."""
    begin_pdl(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - first).to(tl.int32)
    steps = tl.load(stepping + row) > 0
    start = tl.load(starts + row)
    line = ring + tl.load(slots + row).to(tl.int64) * slot_stride
    lane = tl.arange(0, TOKENS)
    if steps:
        convolve_tile(
            x, weight, bias, line + lane * 0, out, first + lane, start + lane, start, lane < count, block, x_stride,
            entry, length, eps, CHANNELS, WIDTH, BIAS, ACTIVATED, UNIT, DIM, LANES,
        )  # fmt: skip
    kept = tl.minimum(count, TOKENS)
    if not steps:
        kept = tl.minimum(kept, WIDTH - 1)
    at = count - kept + lane
    there = lane < kept
    part = tl.arange(0, LANES)
    channel = block * DIM + part
    wanted = there[:, None] & ((part < DIM) & (channel < CHANNELS))[None, :]
    inputs = tl.load(x + ((first + at) * x_stride)[:, None] + channel[None, :], mask=wanted, other=0.0)
    tl.store(line + ((start + at) % length * entry)[:, None] + channel[None, :], inputs, mask=wanted)
