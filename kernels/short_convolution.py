"""Causal convolutions of a few positions, each channel for itself, as recurrent layers have them before their state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from penstock.kernels.chip import chip_of
from penstock.kernels.states import StateBatch, UnitHeads

NO_HEADS = UnitHeads(0, 128)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, batch: StateBatch, *,
    activated: bool = True, unit: UnitHeads = NO_HEADS, tails: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over the latest `width` inputs of each channel, then silu if `activated`; returns `[tokens, channels]`.

    x is `[tokens, channels]`, weight `[channels, width]`, whose last column is the token's own, bias `[channels]`. The
    ring `[slots, length, channels]` holds inputs of x's type, that of position p at p % length; it has to be of
    `convolution_length` at least, and need not be cleared for a new text. Sums are fp32 and in one order, so that they
    do not depend on how a text was cut. tails `[places, width - 1, channels]` gets the inputs before snapshots that are
    kept within chunks.
    """
    assert ring.shape[1] >= weight.shape[1] - 1 + batch.most_steps
    if chip_of(x.device).runs_triton:
        from penstock.kernels.short_convolution_triton import convolve_rows

        return convolve_rows(x, weight, bias, ring, batch, activated, unit, tails)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    ends = batch.query_start.tolist()
    for row, (slot, start) in enumerate(zip(batch.slots.tolist(), batch.starts.tolist(), strict=True)):
        own = slice(ends[row], ends[row + 1])
        if own.stop > own.start:
            if tails is not None and batch.kept is not None:
                keep_tails(x[own], ring[slot], start, batch.kept[own].tolist(), tails)
            out[own] = convolve(x[own], weight, bias, ring[slot], start, activated=activated, unit=unit)
    return out


def with_held(x: Tensor, ring: Tensor, start: int, before: int) -> Tensor:
    """A row's inputs behind as many of the ring: [before + tokens, channels]."""
    positions = torch.arange(start - before, start)
    return torch.cat((torch.where(positions[:, None] >= 0, ring[positions % len(ring)], 0), x))


def keep_tails(x: Tensor, ring: Tensor, start: int, kept: Sequence[int], tails: Tensor) -> None:
    """The latest inputs up to each token of a row that has a place, into that."""
    before = tails.shape[1]
    inputs = with_held(x, ring, start, before)
    for token, place in enumerate(kept):
        if place >= 0:
            tails[place] = inputs[token + 1 : token + 1 + before]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, start: int, *, activated: bool, unit: UnitHeads
) -> Tensor:
    """The plain-torch reference for one row, of `ring  # [length, channels]`."""
    count, before = len(x), weight.shape[1] - 1
    inputs = with_held(x, ring, start, before).float()
    found = torch.zeros(x.shape) if bias is None else bias.float().expand(x.shape)
    for tap in range(before + 1):
        found = found + inputs[tap : tap + count] * weight[:, tap].float()
    kept = min(count, len(ring))
    ring[torch.arange(start + count - kept, start + count) % len(ring)] = x[-kept:]
    if activated:
        found = silu(found)
    if unit.heads:
        heads = found[:, : unit.channels].view(len(x), unit.heads, unit.dim)
        heads = heads * (heads.square().sum(-1, keepdim=True) + unit.eps).rsqrt()
        found = torch.cat((heads.flatten(1), found[:, unit.channels :]), 1)
    return found.to(x.dtype)
