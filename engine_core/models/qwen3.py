"""Qwen3, dense (Yang et al., 2025)."""

from __future__ import annotations

from torch import Tensor

from engine_core.models.decoder import Decoder, Pages
from engine_core.models.layers import Destinations, FusedQKV, Norm, Placement, output_projection, prefixed
from engine_core.models.spec import ModelSpec
from kernels.attention import AttentionBatch, paged_attention
from kernels.qkv import HeadNorms, rotate_and_store
from kernels.rope import Rotation


class Qwen3Attention:
    """Grouped-query attention with a norm on each head's query and key; some layers may see a sliding window."""

    def __init__(self, spec: ModelSpec, layer: int, placement: Placement) -> None:
        self.qkv = FusedQKV(spec, placement)
        self.query_norm = Norm(spec.head_dim, spec.norm_eps, placement)
        self.key_norm = Norm(spec.head_dim, spec.norm_eps, placement)
        self.output = output_projection(spec, placement)
        self.scale = spec.head_dim**-0.5
        self.window = spec.windows[layer]

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        norms = HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
        q = rotate_and_store(*self.qkv.forward(x), rotation, *pages, batch.slot_mapping, norms)
        attended = paged_attention(q, *pages, batch, self.scale, self.window)  # [tokens, heads, head_dim]
        return self.output.forward(attended.flatten(1))

    def destinations(self) -> Destinations:
        yield from self.qkv.destinations()
        yield from prefixed("q_norm.", self.query_norm.destinations())
        yield from prefixed("k_norm.", self.key_norm.destinations())
        yield from self.output.destinations()


def build(spec: ModelSpec, placement: Placement, length: int) -> Decoder:
    return Decoder(spec, [Qwen3Attention(spec, layer, placement) for layer in range(spec.layers)], placement, length)
