"""Grouped-query attention with rotary positions, as Llama, Mistral, Qwen2 and Qwen3 have it."""

from __future__ import annotations

from torch import Tensor

from penstock.engine_core.models.decoder import Pages
from penstock.engine_core.models.layers import Destinations, FusedQKV, Norm, Placement, output_projection, prefixed
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.attention import AttentionBatch, paged_attention, prepare_attention
from penstock.kernels.qkv import HeadNorms, rotate_and_store
from penstock.kernels.rope import Rotation


class SelfAttention:
    """One layer's, of the residual stream or of `inputs` numbers. The spec says what a family adds: biases, a norm of
    each head's query and key, a sliding window."""

    def __init__(self, spec: ModelSpec, layer: int, placement: Placement, inputs: int = 0) -> None:
        self.qkv = FusedQKV(spec, placement, inputs)
        self.output = output_projection(spec, placement)
        self.query_norm, self.key_norm = (
            Norm(spec.head_dim, spec.norm_eps, placement) if spec.qk_norm else None for _ in range(2)
        )
        self.scale = spec.head_dim**-0.5
        self.window = spec.windows[layer]

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
        q, k, v = self.qkv.forward(x)
        prepare_attention(q, pages[0], batch, self.window)
        q = rotate_and_store(q, k, v, rotation, *pages, batch.slot_mapping, norms)
        attended = paged_attention(q, *pages, batch, self.scale, self.window)  # [tokens, heads, head_dim]
        return self.output.forward(attended.flatten(1))

    def destinations(self) -> Destinations:
        yield from self.qkv.destinations()
        for name, norm in (("q_norm.", self.query_norm), ("k_norm.", self.key_norm)):
            if norm is not None:
                yield from prefixed(name, norm.destinations())
        yield from self.output.destinations()
