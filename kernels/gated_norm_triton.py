"""Norms with a gate in Triton, each group by itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.quantize_triton import row_warps


def gated_norm_rows(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *, gate_first: bool) -> Tensor:
    """`kernels.gated_norm.gated_norm` by the kernel; how groups are joined to a tile follows from their size alone."""
    tokens, groups, size = x.shape
    assert x.stride(2) == gate.stride(2) == 1
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = triton.next_power_of_2(size)
    joined = max(1024 // width, 1)
    pdl = chip_of(x.device).pdl
    gated_kernel[(tokens, triton.cdiv(groups, joined))](
        x, gate, x if weight is None else weight, found, *x.stride()[:2], *gate.stride()[:2], eps,
        GROUPS=groups, SIZE=size, JOINED=joined, WIDTH=width, NORMED=weight is not None,
        BY_GROUP=weight is not None and weight.dim() == 2, GATE_FIRST=gate_first, PDL=pdl,
        num_warps=row_warps(joined * width), launch_pdl=pdl,
    )  # fmt: skip
    return found


@triton.jit
def gated_kernel(
    x, gate, weight, out, x_stride, x_group, gate_stride, gate_group, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, JOINED: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr,
    BY_GROUP: tl.constexpr, GATE_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some groups of one token."""
    begin_pdl(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * JOINED + tl.arange(0, JOINED))[:, None]
    place = tl.arange(0, WIDTH)[None, :]
    there = (group < GROUPS) & (place < SIZE)
    found = tl.load(x + token * x_stride + group * x_group + place, mask=there, other=0.0).to(tl.float32)
    z = tl.load(gate + token * gate_stride + group * gate_group + place, mask=there, other=0.0).to(tl.float32)
    gain = z * tl.sigmoid(z)
    if GATE_FIRST or not NORMED:
        found *= gain
    if NORMED:
        found *= tl.rsqrt(tl.sum(found * found, 1) / SIZE + eps)[:, None]
        own = place + group * SIZE if BY_GROUP else place + group * 0
        found *= tl.load(weight + own, mask=there, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            found *= gain
    tl.store(out + (token * GROUPS + group) * SIZE + place, found.to(out.dtype.element_ty), mask=there)
