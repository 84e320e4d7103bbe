"""Llama 2 and 3.x (Touvron et al., 2023; Grattafiori et al., 2024)."""

from __future__ import annotations

from torch import Tensor

from engine_core.models.decoder import Decoder, Pages
from engine_core.models.layers import Destinations, FusedQKV, Placement, output_projection
from engine_core.models.spec import ModelSpec
from kernels.attention import AttentionBatch, paged_attention
from kernels.qkv import rotate_and_store
from kernels.rope import Rotation


class LlamaAttention:
    """Grouped-query attention with rotary positions; biases on all four projections if the configuration says so."""

    def __init__(self, spec: ModelSpec, placement: Placement) -> None:
        self.qkv = FusedQKV(spec, placement)
        self.output = output_projection(spec, placement)
        self.scale = spec.head_dim**-0.5

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        q = rotate_and_store(*self.qkv.forward(x), rotation, *pages, batch.slot_mapping)
        attended = paged_attention(q, *pages, batch, self.scale)  # [tokens, heads, head_dim]
        return self.output.forward(attended.flatten(1))

    def destinations(self) -> Destinations:
        yield from self.qkv.destinations()
        yield from self.output.destinations()


def build(spec: ModelSpec, placement: Placement, length: int) -> Decoder:
    return Decoder(spec, [LlamaAttention(spec, placement) for _ in range(spec.layers)], placement, length)
