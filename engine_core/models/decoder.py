"""The decoder that all families share: embedding, pre-norm blocks, norm, logits."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine_core.models.layers import (
    Destination,
    Destinations,
    Embedding,
    FusedQKV,
    Linear,
    Norm,
    Placement,
    held_bytes,
    layer_mlp,
    output_projection,
    prefixed,
    vocabulary,
)
from penstock.engine_core.models.rope import rope_table
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.attention import paged_attention, prepare_attention
from penstock.kernels.chip import chip_of
from penstock.kernels.linear import linear
from penstock.kernels.records import AttentionBatch, AttentionOptions, HeadNorms, Rotation
from penstock.kernels.rope import gather_rotation, rotate_and_store

Pages = tuple[Tensor, Tensor]  # keys and values of one layer: [blocks, block_size, kv_heads, head_dim] each


class Block:
    """One layer: attention, then the MLP, each on the norm of the residual stream. A first layer without `normed`
    attends over the stream as it is."""

    def __init__(self, spec: ModelSpec, layer: int, placement: Placement, *, normed: bool = True) -> None:
        self.attention_norm = Norm(spec.hidden, spec.norm_eps, placement) if normed else None
        self.attention = SelfAttention(spec, layer, placement)
        self.mlp_norm = Norm(spec.hidden, spec.norm_eps, placement)
        self.mlp = layer_mlp(spec, layer, placement)

    def forward(
        self, delta: Tensor, residual: Tensor | None, rotation: Rotation, batch: AttentionBatch, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is residual + delta (delta alone in the first layer): the sum is fused with the norm.

        The delta of a layer is a rank's partial sum; the next norm adds up those of all ranks.
        """
        norm = self.attention_norm
        if norm is None:
            assert residual is None, "a first layer"
            x, residual = delta, delta
        elif residual is None:
            x, residual = norm.forward(delta), delta
        else:
            x, residual = norm.add(delta, residual)
        x, residual = self.mlp_norm.add(self.attention.forward(x, rotation, batch, pages), residual)
        return self.mlp.forward(x), residual

    def destinations(self) -> Destinations:
        if self.attention_norm is not None:
            yield from prefixed("input_layernorm.", self.attention_norm.destinations())
        yield from prefixed("self_attn.", self.attention.destinations())
        yield from prefixed("post_attention_layernorm.", self.mlp_norm.destinations())
        yield from prefixed(f"{self.mlp.name}.", self.mlp.destinations())


class Decoder:
    """A model ready for its weights, or one pipeline stage of it. `length` is the longest sequence to be served; `spec`
    has only the stage's layers, the first of which is the model's layer `first`. The last stage of a model with an
    EAGLE `head` has the embedding, too."""

    def __init__(
        self, spec: ModelSpec, placement: Placement, length: int, first: int = 0, *, head: bool = False
    ) -> None:
        self.spec = spec
        self.placement = placement
        self.first = first
        group = placement.group
        looked_up = group.begins or (group.ends and (spec.tied or spec.headless or head))
        self.embedding = Embedding(spec, placement) if looked_up else None
        self.blocks = tuple(Block(spec, layer, placement) for layer in range(spec.layers))
        self.norm = Norm(spec.hidden, spec.norm_eps, placement) if group.ends else None
        output = (vocabulary("lm_head", spec.vocab_size, placement),)
        # A headless model takes its logits from the input embedding, for dummy runs alone: text is refused.
        own_head = group.ends and not (spec.tied or spec.headless)
        self.head = Linear(output, spec.hidden, placement, bias=False) if own_head else None
        self.rope = rope_table(spec, length, placement.device)  # fp32 [length, head_dim]

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """One step: `input_ids, positions  # [tokens]` in the order of the batch's rows -> hidden `[tokens, hidden]`.

        Keys and values of the tokens are written to the pages of `cache`, one pair per layer, before they are read.
        """
        return self.forward_aux(input_ids, positions, attention, cache, ())[0]

    def forward_aux(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBatch, cache: Sequence[Pages],
        aux_layers: Sequence[int], stream: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """The same, and the auxiliary hidden states: the residual stream `[tokens, hidden]` at the input of each of
        `aux_layers`, which are numbered within the whole model, the lowest first.

        A stage behind another gets its `stream  # [1 + auxiliary, tokens, hidden]`, the same on each rank: the residual
        stream, then the auxiliary hidden states so far. A stage before another returns the same in place of the hidden
        states.
        """
        attention = replace(attention, invariant=attention.invariant or self.placement.invariant)
        residual: Tensor | None = None
        aux_states: list[Tensor] = []
        if stream is None:
            assert self.embedding is not None, "the first stage"
            delta = self.embedding.forward(input_ids)
        else:
            delta, *aux_states = stream.unbind()
        rotation, group = gather_rotation(self.rope, positions), self.placement.group
        for layer, (block, pages) in enumerate(zip(self.blocks, cache, strict=True), self.first):
            if count := aux_layers.count(layer):
                aux_states += [delta if residual is None else group.all_reduce(delta.clone()) + residual] * count
            delta, residual = block.forward(delta, residual, rotation, attention, pages)
        assert residual is not None
        if self.norm is None:
            return torch.stack((group.all_reduce(delta) + residual, *aux_states)), aux_states
        return self.norm.add(delta, residual)[0], aux_states

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden] -> [rows, vocab]`, gathered from all ranks: in the model's dtype on a GPU, else in fp32."""
        table = self.embedding if self.head is None else self.head
        assert table is not None, "the last stage"
        logits = linear(hidden, table.operand, invariant=self.placement.invariant)
        if self.placement.group.ranks is not None:
            logits = self.placement.group.all_gather(logits, self.spec.vocab_size)
        return logits if chip_of(logits.device).runs_triton else logits.float()

    def shallow(self) -> Decoder:
        """The same model with one layer of each kind, for work that depends on kinds alone. The first layer is its own
        kind, since nothing is added before it."""
        spec = self.spec
        kinds = [(window, spec.experts_of(layer) is None) for layer, window in enumerate(spec.attention.windows)]
        kept = sorted({0, *(kinds.index(kind, 1) for kind in kinds[1:])})
        short = copy(self)
        short.spec = spec.part(kept)
        short.blocks = tuple(self.blocks[at] for at in kept)
        return short

    def destinations(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint goes, by its name there."""
        found: dict[str, Destination] = {}
        if self.embedding is not None:
            found.update(prefixed("model.embed_tokens.", self.embedding.destinations()))
        for layer, block in enumerate(self.blocks, self.first):
            found.update(prefixed(f"model.layers.{layer}.", block.destinations()))
        if self.norm is not None:
            found.update(prefixed("model.norm.", self.norm.destinations()))
        if self.head is not None:
            found.update(self.head.destinations())
        return found

    @property
    def weight_bytes(self) -> int:
        copied = 0 if self.embedding is None else self.embedding.copied_bytes
        return held_bytes(self.destinations().values()) + copied

    @property
    def dtype(self) -> torch.dtype:
        return self.placement.dtype


class SelfAttention:
    """One layer's, of the residual stream or of `inputs` numbers. The spec says what a family adds: biases, a norm of
    each head's query and key, a sliding window."""

    def __init__(self, spec: ModelSpec, layer: int, placement: Placement, inputs: int = 0) -> None:
        attention = spec.attention
        self.qkv = FusedQKV(spec, placement, inputs)
        self.output = output_projection(spec, placement)
        self.query_norm, self.key_norm = (
            Norm(attention.head_dim, spec.norm_eps, placement) if attention.qk_norm else None for _ in range(2)
        )
        self.options = AttentionOptions(attention.head_dim**-0.5, attention.windows[layer])

    def forward(self, x: Tensor, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = HeadNorms(self.query_norm.weight, self.key_norm.weight, self.query_norm.eps)
        q, k, v = self.qkv.forward(x)
        prepare_attention(q, pages[0], batch, self.options)
        q = rotate_and_store(q, k, v, rotation, *pages, batch.slot_mapping, norms)
        attended = paged_attention(q, *pages, batch, self.options)  # [tokens, heads, head_dim]
        return self.output.forward(attended.flatten(1))

    def destinations(self) -> Destinations:
        yield from self.qkv.destinations()
        for name, norm in (("q_norm.", self.query_norm), ("k_norm.", self.key_norm)):
            if norm is not None:
                yield from prefixed(name, norm.destinations())
        yield from self.output.destinations()
