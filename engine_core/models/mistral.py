"""Mistral (Jiang et al., 2023)."""

from __future__ import annotations

from torch import Tensor

from engine_core.models.decoder import Decoder, Pages
from engine_core.models.layers import Destinations, FusedQKV, Placement, output_projection
from engine_core.models.spec import ModelSpec
from kernels.attention import AttentionBatch, paged_attention
from kernels.qkv import rotate_and_store
from kernels.rope import Rotation


class MistralAttention:
    """Grouped-query attention in which every layer sees a sliding window."""

    def __init__(self, spec: ModelSpec, layer: int, placement: Placement) -> None:
        self.qkv = FusedQKV(spec, placement)
        self.output = output_projection(spec, placement)
        self.scale = spec.head_dim**-0.5
        self.window = spec.windows[layer]

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        q = rotate_and_store(*self.qkv.forward(x), rotation, *pages, batch.slot_mapping)
        attended = paged_attention(q, *pages, batch, self.scale, self.window)  # [tokens, heads, head_dim]
        return self.output.forward(attended.flatten(1))

    def destinations(self) -> Destinations:
        yield from self.qkv.destinations()
        yield from self.output.destinations()


def build(spec: ModelSpec, placement: Placement, length: int) -> Decoder:
    return Decoder(spec, [MistralAttention(spec, layer, placement) for layer in range(spec.layers)], placement, length)
