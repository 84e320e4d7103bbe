"""Low-rank additions to a product (LoRA: Hu et al., 2021), of another adapter for each row.

Adapters stand in places of one memory, a matrix `a` that shrinks and a matrix `b` that expands for each. A product may
have several parts, one beside the other, each of which is adapted by itself. Rows without an adapter stay as they are,
to the last bit. On a GPU rows are sorted by place, nothing waits for the device, and no sum depends on other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.records import OUTPUT_TILE, AdapterRows, LowRankSum, LowRankWeight


def output_tiles(parts: tuple[slice, ...], rank: int, device: torch.device) -> Tensor:
    """`LowRankWeight.tiles`."""
    lines = [
        (first, min(first + OUTPUT_TILE, part.stop), at * rank)
        for at, part in enumerate(parts)
        for first in range(part.start, part.stop, OUTPUT_TILE)
    ]
    return torch.tensor(lines, dtype=torch.int32).to(device)


def adapter_rows(places: Tensor, count: int, *, invariant: bool = False) -> AdapterRows:
    """Rows sorted by their place, of `places  # int32 [rows]`: 0 has no adapter, place p is index p - 1 of `count`."""
    if chip_of(places.device).runs_triton:
        from penstock.kernels.low_rank_triton import sort_rows

        return sort_rows(places, count, invariant=invariant)
    found = sorted(set(places.tolist()) - {0})
    return AdapterRows(places, tuple((place - 1, (places == place).nonzero()[:, 0]) for place in found), None, 0)


def shrink(x: Tensor, rows: AdapterRows, weight: LowRankWeight) -> LowRankSum:
    """a @ x of each row's adapter, of `x  # [rows, inputs]`."""
    if chip_of(x.device).runs_triton:
        from penstock.kernels.low_rank_triton import shrink_rows

        return shrink_rows(x, rows, weight)
    shrunk = x.new_empty(len(x), weight.a.shape[1])
    for place, own in rows.groups:
        shrunk[own] = x[own] @ weight.a[place].T
    return LowRankSum(shrunk, rows, weight)


def expand(out: Tensor, addition: LowRankSum) -> None:
    """Add to `out  # [rows, outputs]`, in place, each part of its adapter's b @ a @ x."""
    if chip_of(out.device).runs_triton:
        from penstock.kernels.low_rank_triton import expand_rows

        expand_rows(out, addition)
        return
    shrunk, rows, weight = addition
    for place, own in rows.groups:
        parts = [
            shrunk[own, at * weight.rank : (at + 1) * weight.rank] @ weight.b[place, part].T
            for at, part in enumerate(weight.parts)
        ]
        out.index_add_(0, own, torch.cat(parts, 1))
