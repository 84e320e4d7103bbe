"""Sequences back to back, as views of one product, and what attention both ways gives for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (5, 1, 33, 16, 2)


@dataclass(frozen=True)
class Sequences:
    """Queries, keys and values of texts of these lengths."""

    tensors: tuple[Tensor, Tensor, Tensor]
    query_start: Tensor
    lengths: tuple[int, ...]

    @property
    def scale(self) -> float:
        return float(self.tensors[0].shape[2] ** -0.5)

    def on(self, device: str) -> Sequences:
        q, k, v = (part.to(device) for part in self.tensors)
        return Sequences((q, k, v), self.query_start.to(device), self.lengths)


def sequences(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Sequences:
    generator = torch.Generator().manual_seed(sum(lengths) + heads)
    product = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    q, k, v = product.split((heads, kv_heads, kv_heads), dim=1)
    return Sequences((q, k, v), torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32), lengths)


def exact(scene: Sequences, scale: float, window: int) -> Tensor:
    """In double precision, query by query."""
    q, k, v = (part.double().cpu() for part in scene.tensors)
    group, out = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for first, length in zip(scene.query_start.tolist(), scene.lengths, strict=False):
        for own in range(length):
            low, high = (max(0, own - window + 1), min(length, own + window)) if window else (0, length)
            keys, values = (part[first + low : first + high].repeat_interleave(group, 1) for part in (k, v))
            weights = (torch.einsum("hd,khd->hk", q[first + own], keys) * scale).softmax(-1)
            out[first + own] = torch.einsum("hk,khd->hd", weights, values)
    return out
