"""What latent attention launches."""

from __future__ import annotations

import torch

from benchmarks.meta_tensors import SLOTS, memory, numbers
from penstock.kernels.attention_device import attend_long_rows
from penstock.kernels.latent_attention import latent_attention, multiply_heads, store_latents
from penstock.kernels.latent_expansion import BLOCK
from penstock.kernels.latent_expansion import LONG as LONG_ROW
from penstock.kernels.records import AttentionBatch, AttentionOptions
from penstock.kernels.rope import gather_rotation

BLOCK_SIZE = 16
LONG = 131072


def latents() -> None:
    """Latent attention in GLM-4.7-Flash's sizes, whole and as one of two ranks has it: single tokens, few and many, and
    a chunk. Chunks over expanded latents, short and long, of DeepSeek's heads too."""
    rank, dim, nope, value = 512, 64, 192, 256
    pages = memory(1 << 13, BLOCK_SIZE, rank + dim)
    few, many, chunk = (1, 1, LONG), (256, 1, 4096), (1, 8192, 8192)
    for heads, (rows, queries, longest), invariant in (
        (10, few, False), (20, few, False), (20, many, False), (20, chunk, False), (20, few, True), (20, chunk, True),
    ):  # fmt: skip
        tokens = rows * queries
        batch = AttentionBatch(
            numbers(rows + 1), numbers(rows), numbers(rows), numbers(SLOTS, LONG // BLOCK_SIZE),
            memory(tokens, kind=torch.int64), queries, longest, invariant=invariant, arrivals=numbers(4096),
        )  # fmt: skip
        latent_attention(memory(tokens, heads, rank + dim), pages, batch, rank, 1.0)
    q, absorbed = memory(8, 20, nope + dim), memory(8, 20, rank + dim)
    rotation = gather_rotation(memory(LONG, dim, kind=torch.float32), memory(8, kind=torch.int64))
    latent, key = torch.split(memory(8, 768 + rank + dim)[:, 768:], [rank, dim], dim=1)
    slots = memory(8, kind=torch.int64)
    store_latents(latent, key, memory(rank), 1e-6, q[..., nope:], absorbed[..., rank:], rotation, pages, slots)
    weights = torch.split(memory(20, nope + value, rank), [nope, value], dim=1)
    multiply_heads(q[..., :nope], weights[0], absorbed[..., :rank], True)
    multiply_heads(absorbed[..., :rank].contiguous(), weights[1].transpose(1, 2), memory(8, 20, value), True)
    for width in (192, 256):
        for queries in (LONG_ROW, 8192):
            batch = AttentionBatch(
                numbers(21), numbers(20), numbers(20), numbers(20, 8192 // BLOCK), memory(queries, kind=torch.int64),
                queries, 8192, arrivals=numbers(4096),
            )  # fmt: skip
            expanded = memory(20 * 8192 // BLOCK, BLOCK, 1, width)
            attend_long_rows(memory(20 * queries, 1, width), expanded, expanded, batch, AttentionOptions(1.0))
