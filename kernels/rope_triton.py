"""A step's cosines and sines in Triton, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.chip import chip_of
from penstock.kernels.launch import begin_pdl
from penstock.kernels.records import Rotation

if TYPE_CHECKING:
    from penstock.kernels.records import HeadNorms

HEADS_TILE = 8  # heads of one program


def rotation_rows(table: Tensor, positions: Tensor, axes: Tensor | None = None) -> Rotation:
    """`kernels.rope.gather_rotation` by the kernel, one program a token."""
    tokens, dim = positions.shape[-1], table.shape[1]
    by_axis = positions.dim() > 1
    assert axes is not None or not by_axis, "M-RoPE has sections"
    assert table.is_contiguous()
    assert positions.is_contiguous()
    cos, sin = (torch.empty(tokens, 1, dim, dtype=table.dtype, device=table.device) for _ in range(2))
    pdl = chip_of(table.device).pdl
    rotation_kernel[(tokens,)](
        table, positions, positions if axes is None else axes, cos, sin, tokens, AXES=by_axis,
        HALF=dim // 2, TILE=triton.next_power_of_2(dim // 2), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return Rotation(cos, sin)


@triton.jit(do_not_specialize=("tokens",), do_not_specialize_on_alignment=("positions", "axes"))
def rotation_kernel(
    table, positions, axes, cos, sin, tokens,
    AXES: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: each half of the row twice, the first of the sines negated. With AXES each place of the row is of the
    position that its axis says."""
    begin_pdl(PDL)
    token = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, TILE)
    there = places < HALF
    at = token
    if AXES:
        at += tl.load(axes + places, mask=there, other=0).to(tl.int64) * tokens
    row = table + tl.load(positions + at).to(tl.int64) * (2 * HALF) + places
    c = tl.load(row, mask=there)
    s = tl.load(row + HALF, mask=there)
    out = token * (2 * HALF) + places
    tl.store(cos + out, c, mask=there)
    tl.store(cos + out + HALF, c, mask=there)
    tl.store(sin + out, -s, mask=there)
    tl.store(sin + out + HALF, s, mask=there)


def rotate_heads(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor,
    norms: HeadNorms | None, kv_scales: Tensor | None,
) -> Tensor:  # fmt: skip
    """`kernels.rope.rotate_and_store` by the kernel."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    assert all(part.stride(1) == dim and part.stride(2) == 1 for part in (q, k, v))
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    out = torch.empty(tokens, heads, dim, dtype=q.dtype, device=q.device)
    query, key, eps, turned, normed = norms or (q, q, 0.0, False, False)
    scale = rotation.query_scale
    pdl = chip_of(q.device).pdl
    programs = triton.cdiv(heads, HEADS_TILE) + 2 * triton.cdiv(kv_heads, HEADS_TILE)
    rotate_kernel[(tokens, programs)](
        q, k, v, out, k_pages, v_pages, slot_mapping, rotation.cos, rotation.sin,
        rotation.cos if scale is None else scale, query, key,
        q if kv_scales is None else kv_scales, q.stride(0), k.stride(0), v.stride(0), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF_TILE=triton.next_power_of_2(dim // 2),
        HEADS_TILE=HEADS_TILE, NORMS=norms is not None, TURNED=turned, VALUES=normed, SCALED=scale is not None, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def as_stored(x, scales, head, there, TYPE: tl.constexpr):
    """Some heads `[heads, numbers]` as they are stored: see `kernels.attention.quantized`. The conversion saturates."""
    if tl.float8e4nv == TYPE:
        x = x.to(tl.float32) * tl.div_rn(1.0, tl.load(scales + head, mask=there, other=1.0))[:, None]
    return x.to(TYPE)


@triton.jit
def norm_pairs(left, right, weight, eps, DIM: tl.constexpr, HALF_TILE: tl.constexpr):
    """The norm of both halves of some heads, `[heads, pairs]` each."""
    HALF: tl.constexpr = DIM // 2
    pairs = tl.arange(0, HALF_TILE)
    gain = tl.rsqrt(tl.sum(left * left + right * right, 1) / DIM + eps)
    left *= gain[:, None] * tl.load(weight + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
    right *= gain[:, None] * tl.load(weight + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
    return left, right


@triton.jit
def turn_heads(
    source, target, scales, weight, cos, sin, eps, query_scale, head, there,
    DIM: tl.constexpr, HALF_TILE: tl.constexpr, NORM: tl.constexpr, TURNED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Some heads `[heads]` of one token, from source to target, turned by its angles; computed in fp32. The norm comes
    before that, or behind it if TURNED."""
    TYPE: tl.constexpr = target.dtype.element_ty
    HALF: tl.constexpr = DIM // 2
    pairs = tl.arange(0, HALF_TILE)
    held = there[:, None] & (pairs < HALF)[None, :]  # [heads, pairs]
    places = head[:, None] * DIM + pairs[None, :]
    left = tl.load(source + places, mask=held, other=0.0).to(tl.float32)
    right = tl.load(source + places + HALF, mask=held, other=0.0).to(tl.float32)
    if NORM and not TURNED:
        left, right = norm_pairs(left, right, weight, eps, DIM, HALF_TILE)
    c = tl.load(cos + pairs, mask=pairs < HALF, other=0.0)[None, :]
    s = tl.load(sin + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    first = left * c - right * s
    second = right * c + left * s
    if NORM and TURNED:
        first, second = norm_pairs(first, second, weight, eps, DIM, HALF_TILE)
    if SCALED:
        scale = tl.load(query_scale)
        first *= scale
        second *= scale
    tl.store(target + places, as_stored(first, scales, head, there, TYPE), mask=held)
    tl.store(target + places + HALF, as_stored(second, scales, head, there, TYPE), mask=held)


@triton.jit(do_not_specialize_on_alignment=("slot_mapping",))
def rotate_kernel(
    q, k, v, out, k_pages, v_pages, slot_mapping, cos, sin, query_scale, query_weight, key_weight, kv_scales,
    q_stride, k_stride, v_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_TILE: tl.constexpr, HEADS_TILE: tl.constexpr,
    NORMS: tl.constexpr, TURNED: tl.constexpr, VALUES: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token, a few heads of its queries, keys or values: the grid's second axis counts them in this order."""
    if PDL:  # in this order: when attention begins, everything but what this kernel writes is complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    QUERY_TILES: tl.constexpr = (HEADS + HEADS_TILE - 1) // HEADS_TILE
    KEY_TILES: tl.constexpr = (KV_HEADS + HEADS_TILE - 1) // HEADS_TILE
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lanes = tl.arange(0, HEADS_TILE)
    slot = tl.load(slot_mapping + token) * (KV_HEADS * DIM)
    cos += token * DIM
    sin += token * DIM
    if tile < QUERY_TILES:
        head = tile * HEADS_TILE + lanes
        turn_heads(
            q + token * q_stride, out + token * (HEADS * DIM), kv_scales, query_weight, cos, sin, eps,
            query_scale + token, head, head < HEADS, DIM, HALF_TILE, NORMS, TURNED, SCALED,
        )  # fmt: skip
    elif tile < QUERY_TILES + KEY_TILES:
        head = (tile - QUERY_TILES) * HEADS_TILE + lanes
        turn_heads(
            k + token * k_stride, k_pages + slot, kv_scales, key_weight, cos, sin, eps, query_scale, head,
            head < KV_HEADS, DIM, HALF_TILE, NORMS, TURNED, False,
        )  # fmt: skip
    else:
        head = (tile - QUERY_TILES - KEY_TILES) * HEADS_TILE + lanes
        dims = tl.arange(0, 2 * HALF_TILE)
        held = (head < KV_HEADS)[:, None] & (dims < DIM)[None, :]
        places = head[:, None] * DIM + dims[None, :]
        values = tl.load(v + token * v_stride + places, mask=held, other=0.0)
        if VALUES:
            values = values.to(tl.float32)
            values *= tl.rsqrt(tl.sum(values * values, axis=1) / DIM + eps)[:, None]
        values = as_stored(values, kv_scales + KV_HEADS, head, head < KV_HEADS, v_pages.dtype.element_ty)
        tl.store(v_pages + slot + places, values, mask=held)
