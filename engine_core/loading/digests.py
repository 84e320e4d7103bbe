"""Sums that tell whether two processes hold the same weights, whichever way these are cut.

The sum of a tensor is that of its numbers' bits, each times (2 i + 1) * MULTIPLIER with i its place in the flattened
tensor, modulo 2^64. The sums of slices add up to that of the whole, and numbers that change places change it. It tells
of mistakes, not of malice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.engine_core.loading.checkpoint import cuts
from penstock.engine_core.models.layers import Destination

MULTIPLIER = 0x9E3779B97F4A7C15  # of Fibonacci hashing: Knuth, The Art of Computer Programming, 3, 6.4
MASK = (1 << 64) - 1
CHUNK = 1 << 24  # numbers summed at once
BITS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Of a whole tensor, as the checkpoint has it."""
    return summed(tensor, tuple(slice(0, size) for size in tensor.shape), tuple(tensor.shape))


def slice_sum(destination: Destination, tensor: Tensor) -> int:
    """Of what is held of a checkpoint's tensor."""
    return sum(summed(part, place, destination.shape) for place, part in cuts(destination, tensor)) & MASK


def summed(part: Tensor, place: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    """Of a part that stands at this place of a tensor of this shape."""
    if not part.numel():
        return 0
    if not part.dim():
        part, shape, place = part.view(1), (1,), (slice(0, 1),)
    runs = [range(size)[run] for run, size in zip(fully(place, len(shape)), shape, strict=True)]
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    inner = torch.zeros((), dtype=torch.int64, device=part.device)
    for run, stride in zip(runs[1:], strides[1:], strict=True):
        inner = inner[..., None] + torch.tensor(run, device=part.device) * stride
    first = torch.tensor(runs[0], device=part.device) * strides[0]
    total = 0
    for rows, begins in pieces(part, first):
        bits = rows.contiguous().view(BITS[rows.element_size()]).to(torch.int64)
        bits &= (1 << (8 * rows.element_size())) - 1 if rows.element_size() < 8 else -1
        places = begins.view(-1, *(1,) * inner.dim()) + inner
        total += int((bits * (2 * places + 1)).sum())
    return total * MULTIPLIER & MASK


def pieces(part: Tensor, first: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows at a time."""
    rows = max(1, CHUNK // max(1, part[0].numel()))
    yield from zip(torch.split(part, rows), torch.split(first, rows), strict=True)


def fully(place: tuple[slice, ...], dims: int) -> tuple[slice, ...]:
    return (*place, *(slice(None),) * (dims - len(place)))
