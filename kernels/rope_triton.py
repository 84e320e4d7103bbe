"""A step's cosines and sines in Triton, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.launch import overlaps
from penstock.kernels.rope import Rotation


def rotation_rows(table: Tensor, positions: Tensor) -> Rotation:
    """`kernels.rope.gather_rotation` by the kernel, one program a token."""
    tokens, dim = len(positions), table.shape[1]
    assert table.is_contiguous()
    assert positions.is_contiguous()
    cos, sin = (torch.empty(tokens, 1, dim, dtype=table.dtype, device=table.device) for _ in range(2))
    ahead = overlaps(table.device)
    rotation_kernel[(tokens,)](
        table, positions, cos, sin,
        HALF=dim // 2, TILE=triton.next_power_of_2(dim // 2), AHEAD=ahead, num_warps=1, launch_pdl=ahead,
    )  # fmt: skip
    return Rotation(cos, sin)


@triton.jit(do_not_specialize_on_alignment=("positions",))
def rotation_kernel(table, positions, cos, sin, HALF: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr):
    """One token: each half of the row twice, the first of the sines negated."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILE)
    there = places < HALF
    row = table + tl.load(positions + token).to(tl.int64) * (2 * HALF) + places
    c = tl.load(row, mask=there)
    s = tl.load(row + HALF, mask=there)
    out = token * (2 * HALF) + places
    tl.store(cos + out, c, mask=there)
    tl.store(cos + out + HALF, c, mask=there)
    tl.store(sin + out, -s, mask=there)
    tl.store(sin + out + HALF, s, mask=there)
