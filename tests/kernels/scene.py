"""Rows of random keys and values in pages, and what attention over them is."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from penstock.kernels.attention import E4M3, paged_attention, write_kv
from penstock.kernels.records import AttentionBatch, AttentionOptions

Rows = list[tuple[int, int]]  # queries and context of each row
Images = list[tuple[int, int, int]]  # row, first position and the one behind the last of each

MIXED: Rows = [(1, 5), (7, 7), (1, 1), (1, 33), (5, 21), (1, 16), (1, 17), (20, 20)]


def rounded(x: Tensor, scales: Tensor) -> Tensor:
    """`x  # [tokens, heads, dim]` as pages in e4m3 hold it: four bits of each, from 2**-9 to 448 of the scale."""
    x = x.double() / scales.double()[:, None]
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()
    step = 2.0 ** (exponent - 3)
    return (x / step).round().mul(step).clamp(-448, 448) * scales.double()[:, None]


class Scene:
    """Random keys and values of some rows, put into shuffled pages whose every other slot is not a number.

    fp8: pages in e4m3, with scales of each head; a few keys and values are beyond what they reach. images: whose tokens
    see one another both ways; other tokens have a limit that says nothing.
    """

    def __init__(
        self, rows: Rows, heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype = torch.float32,
        *, softcap: float = 0.0, sinks: bool = False, fp8: bool = False, images: Images | None = None,
    ) -> None:  # fmt: skip
        random = torch.Generator().manual_seed(len(rows) * 1009 + block_size)
        self.rows = rows
        self.softcap = softcap
        self.sinks = torch.randn(heads, generator=random) * 3 if sinks else None
        self.q = torch.randn(sum(n for n, _ in rows), heads, dim, generator=random).to(dtype)
        self.k = [torch.randn(context, kv_heads, dim, generator=random).to(dtype) for _, context in rows]
        self.v = [torch.randn(context, kv_heads, dim, generator=random).to(dtype) for _, context in rows]
        wide = max(-(-context // block_size) for _, context in rows) + 2
        blocks = 1 + len(rows) * wide
        self.tables = (torch.randperm(blocks - 1, generator=random) + 1).int().view(len(rows), wide)
        shape = blocks, block_size, kv_heads, dim
        self.kv_scales = torch.rand(2, kv_heads, generator=random) / 64 + 1 / 128 if fp8 else None
        stored = E4M3 if fp8 else dtype
        self.k_pages, self.v_pages = (torch.full(shape, math.nan, dtype=dtype).to(stored) for _ in range(2))
        new = []
        for row, (queries, context) in enumerate(rows):
            positions = torch.arange(context)
            slots = self.tables[row][positions // block_size].long() * block_size + positions % block_size
            write_kv(self.k[row], self.v[row], self.k_pages, self.v_pages, slots, self.kv_scales)
            if self.kv_scales is not None:
                self.k[row], self.v[row] = (
                    rounded(side[row], scale) for side, scale in zip((self.k, self.v), self.kv_scales, strict=True)
                )
            new.append(slots[context - queries :])
        starts = [0, *torch.tensor([n for n, _ in rows]).cumsum(0).tolist()]
        self.limits = [torch.zeros(context, dtype=torch.int32) for _, context in rows]
        for row, first, end in images or []:
            assert end <= rows[row][1]
            self.limits[row][first:end] = end - 1
        limits = torch.cat([limit[context - n :] for limit, (n, context) in zip(self.limits, rows, strict=True)])
        self.batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context=torch.tensor([context for _, context in rows], dtype=torch.int32),
            slots=torch.arange(len(rows), dtype=torch.int32).flip(0),  # rows stand anywhere in the table
            block_tables=self.tables.flip(0),
            slot_mapping=torch.cat(new),
            max_query=max(n for n, _ in rows),
            max_context=max(context for _, context in rows),
            limits=limits if images else None,
        )

    def paged(self, window: int = 0) -> Tensor:
        return paged_attention(self.q, self.k_pages, self.v_pages, self.batch, self.options(window))

    def options(self, window: int = 0) -> AttentionOptions:
        return AttentionOptions(self.q.shape[2] ** -0.5, window, self.softcap, self.sinks, self.kv_scales)

    def expected(self, window: int = 0) -> Tensor:
        group = self.q.shape[1] // self.k[0].shape[1]
        out, token = [], 0
        for row, (queries, context) in enumerate(self.rows):
            k, v = (side[row].double().repeat_interleave(group, dim=1) for side in (self.k, self.v))
            for position in range(context - queries, context):
                low = max(0, position + 1 - window) if window else 0
                end = max(position, int(self.limits[row][position])) + 1
                scores = torch.einsum("hd,khd->hk", self.q[token].double(), k[low:end])
                scores = scores / math.sqrt(self.q.shape[2])
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                weights = scores.exp()
                total = weights.sum(-1) + (0 if self.sinks is None else self.sinks.double().exp())
                out.append(torch.einsum("hk,khd->hd", weights / total[:, None], v[low:end]))
                token += 1
        return torch.stack(out)

    def on(self, device: str) -> Scene:
        """The same scene on another device; what is expected is computed where it was made."""
        moved = copy.copy(self)
        moved.q, moved.k_pages, moved.v_pages = (x.to(device) for x in (self.q, self.k_pages, self.v_pages))
        moved.sinks = None if self.sinks is None else self.sinks.to(device)
        moved.kv_scales = None if self.kv_scales is None else self.kv_scales.to(device)
        moved.batch = AttentionBatch(
            query_start=self.batch.query_start.to(device),
            context=self.batch.context.to(device),
            slots=self.batch.slots.to(device),
            block_tables=self.batch.block_tables.to(device),
            slot_mapping=self.batch.slot_mapping.to(device),
            max_query=self.batch.max_query,
            max_context=self.batch.max_context,
            limits=None if self.batch.limits is None else self.batch.limits.to(device),
        )
        return moved
