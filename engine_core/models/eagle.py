"""Heads: a layer or few that draft from the target's hidden states. EAGLE: Li et al., 2024; EAGLE-3: Li et al., 2025;
multi-token prediction (MTP): DeepSeek-V3, 2024.

A head predicts the token after next from a token and the target's state at the position before it. It has the target's
embedding and, unless its vocabulary is its own, the target's output embedding. Its states take the place of the
target's as it goes on from its own drafts.

- EAGLE: `fc` joins embedding and state; layers as Llama's follow, the first of which has no norm in front of its
  attention; the last state goes straight to the output embedding. The target's state is what its last norm gives.
- EAGLE-3: `fc` joins the target's residual stream at three depths to a state; one layer attends over the norms of
  embedding and state, side by side. Logits are of a norm of its state, over a vocabulary of the head's own, which
  `d2t` maps to the target's: token i stands for target token i + d2t[i].
- MTP: a projection joins the norms of embedding and state; a layer as the target's follows, and a norm, whose result is
  the state. The target's state is what its last norm gives.

Every rank of a group has the whole head: it is small, and what it sums would have to be summed over ranks, too.

Tensor names are those of published heads. Their training pairs begin with the second token; here the first one is a
pair, too, with a state of zeros, so that keys stand where the token stands and a block holds what its tokens say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from penstock.engine_core.models.attention import Pages, SelfAttention
from penstock.engine_core.models.decoder import Block, Decoder
from penstock.engine_core.models.draft_spec import DEPTHS, FIRST, HeadSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Norm, held_bytes, named
from penstock.engine_core.models.mlp import layer_mlp
from penstock.engine_core.models.parts import whole
from penstock.engine_core.models.rope import rope_table
from penstock.engine_core.models.spec import stored_name
from penstock.kernels.chip import chip_of
from penstock.kernels.records import AttentionBatch, Rotation
from penstock.kernels.rope import gather_rotation

LEAST = -30000.0  # logit of a target token that the head does not know; in range of every type


class EagleHead(ABC):
    """A head over its target, ready for its weights. `length` is the longest sequence it will be asked for."""

    def __init__(self, spec: HeadSpec, target: Decoder, length: int) -> None:
        self.spec = spec
        self.target = target
        self._invariant = target.placement.invariant
        rotary = spec.layers.attention.rotary
        self._rope = rope_table(*rotary, length, target.placement.device)  # fp32 [length, rotary_dim]

    def over(self, target: Decoder) -> EagleHead:
        """The same head over the layers that `Decoder.shallow` keeps of the target, with the first for `aux_layers`."""
        short = copy(self)
        short.target = target
        short.spec = msgspec.structs.replace(self.spec, aux_layers=(0,) * len(self.spec.aux_layers))
        return short

    def combine(self, hidden: Tensor, aux_states: Sequence[Tensor]) -> Tensor:
        """The target's state as the head reads it, `[tokens, hidden]`: its hidden states, or what the head makes of its
        auxiliary ones. Both as `Decoder.forward_aux` returns them."""
        return hidden

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor, attention: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """One step: `input_ids, positions  # [tokens]`, and the state before each, `states  # [tokens, hidden]`: the
        target's or the head's own -> the head's `[tokens, hidden]`.

        Keys and values of the tokens are written to the pages of `cache`, one pair per layer, before they are read.
        """
        attention = replace(attention, invariant=attention.invariant or self._invariant)
        rotation = gather_rotation(self._rope, positions)
        assert self.target.embedding is not None, "a last stage with a head has it, too"
        embedded = self.target.embedding.forward(input_ids)
        return self._run(embedded, states, rotation, attention, cache)

    @abstractmethod
    def _run(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, batch: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        """The head's states, from embeddings of the tokens."""

    def logits(self, states: Tensor) -> Tensor:
        """`[rows, hidden]` of the head -> `[rows, vocabulary of the target]`, LEAST where the head knows no token."""
        return self.target.logits(states)

    def destinations(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint goes, by its name there."""
        return dict(self._places())

    @abstractmethod
    def _places(self) -> Destinations:
        """The same, one after the other."""

    @property
    def tokens(self) -> Tensor | None:
        """The target's tokens that the head knows, int64 [vocabulary of the head]; None: all."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights on this rank, without the target's."""
        return held_bytes(self.destinations().values())


class FirstHead(EagleHead):
    """EAGLE."""

    def __init__(self, spec: HeadSpec, target: Decoder, length: int) -> None:
        super().__init__(spec, target, length)
        placement, hidden = target.placement.alone, spec.layers.hidden
        self.fc = Linear((whole("fc", hidden),), 2 * hidden, placement, bias=spec.fc_bias)
        layers = enumerate(spec.layers.blocks)
        self.blocks = tuple(Block(layer, hidden, placement, normed=at > 0) for at, layer in layers)

    def _run(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, batch: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        delta, residual = self.fc.forward(torch.cat((embedded, states), dim=-1)), None
        for block, pages in zip(self.blocks, cache, strict=True):
            delta, residual = block.forward(delta, residual, rotation, batch, pages)
        assert residual is not None, "no layer of a head scales it"
        return delta + residual

    def _places(self) -> Destinations:
        return named(("", self.fc), *((f"layers.{layer}.", block) for layer, block in enumerate(self.blocks)))


class ThirdHead(EagleHead):
    """EAGLE-3. Its layer attends over the norms of embedding and state, side by side; the state is the residual."""

    def __init__(self, spec: HeadSpec, target: Decoder, length: int) -> None:
        super().__init__(spec, target, length)
        placement, hidden, layer = target.placement.alone, spec.layers.hidden, spec.layers.blocks[0]
        self.fc = Linear((whole("fc", hidden),), DEPTHS * hidden, placement, bias=spec.fc_bias)
        self.embedding_norm, self.state_norm, self.mlp_norm, self.norm = (
            Norm(hidden, spec.layers.norm, placement) for _ in range(4)
        )
        self.attention = SelfAttention(layer, hidden, placement, inputs=2 * hidden)
        assert layer.mlp is not None, "a Llama's layer"
        self.mlp = layer_mlp(layer.mlp, hidden, placement)
        self.output: Linear | None = None
        self.offsets: Tensor | None = None  # int64 [vocabulary], from its tokens to the target's
        if spec.vocabulary:
            self.output = Linear((whole("lm_head", spec.vocabulary),), hidden, placement, bias=False)
            if spec.vocabulary < spec.layers.vocab_size:
                self.places = torch.arange(spec.vocabulary, device=placement.device)
                self.offsets = torch.zeros_like(self.places)

    @property
    def tokens(self) -> Tensor | None:
        """As of `EagleHead`."""
        return None if self.offsets is None else self.places + self.offsets

    def combine(self, hidden: Tensor, aux_states: Sequence[Tensor]) -> Tensor:
        """The auxiliary ones, joined."""
        return self.fc.forward(torch.cat(tuple(aux_states), dim=-1))

    def _run(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, batch: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        joined = torch.cat((self.embedding_norm.forward(embedded), self.state_norm.forward(states)), dim=-1)
        attended = self.attention.forward(joined, rotation, batch, cache[0])
        normed, residual = self.mlp_norm.add(attended, states, partial=False)
        return self.mlp.forward(normed) + residual

    def logits(self, states: Tensor) -> Tensor:
        """As of `EagleHead`: its own spread over the target's."""
        normed = self.norm.forward(states)
        if self.output is None:
            return self.target.logits(normed)
        logits = self.output.forward(normed)
        logits = logits if chip_of(logits.device).runs_triton else logits.float()
        tokens = self.tokens
        if tokens is None:
            return logits
        spread = logits.new_full((len(logits), self.target.spec.vocab_size), LEAST)
        return spread.index_copy_(1, tokens, logits)

    def _places(self) -> Destinations:
        yield from named(
            ("", self.fc),
            ("midlayer.input_layernorm.", self.embedding_norm),
            ("midlayer.hidden_norm.", self.state_norm),
            ("midlayer.self_attn.", self.attention),
            ("midlayer.post_attention_layernorm.", self.mlp_norm),
            ("midlayer.mlp.", self.mlp),
            ("norm.", self.norm),
            ("", self.output),
        )
        if self.offsets is not None:
            yield "d2t", Destination(self.offsets, tuple(self.offsets.shape))


class MtpHead(EagleHead):
    """Multi-token prediction."""

    def __init__(self, spec: HeadSpec, target: Decoder, length: int) -> None:
        super().__init__(spec, target, length)
        assert spec.mtp is not None, "checked by the caller"
        placement, hidden = target.placement.alone, spec.layers.hidden
        self.names = spec.mtp
        self.embedding_norm, self.state_norm, self.norm = (Norm(hidden, spec.layers.norm, placement) for _ in range(3))
        formats = () if spec.form is None else ((self.names.projection, spec.form),)
        joined = (whole(self.names.projection, hidden),)
        self.projection = Linear(joined, 2 * hidden, placement, bias=False, formats=formats)
        self.block = Block(spec.layers.blocks[0], hidden, placement)

    def _run(
        self, embedded: Tensor, states: Tensor, rotation: Rotation, batch: AttentionBatch, cache: Sequence[Pages]
    ) -> Tensor:
        joined = torch.cat((self.embedding_norm.forward(embedded), self.state_norm.forward(states)), dim=-1)
        delta, residual = self.block.forward(self.projection.forward(joined), None, rotation, batch, cache[0])
        assert residual is not None, "a head's layer does not scale it"
        return self.norm.add(delta, residual, partial=False)[0]

    def _places(self) -> Destinations:
        names = self.names
        yield from named(
            (f"{names.place}{names.embedding_norm}.", self.embedding_norm),
            (f"{names.place}{names.state_norm}.", self.state_norm),
            (f"{names.place}{names.norm}.", self.norm),
            (names.place, self.projection),
        )
        for name, destination in named((f"{names.place}{names.block}", self.block)):
            yield stored_name(self.spec.layers, name), destination


def build_head(spec: HeadSpec, target: Decoder, length: int) -> EagleHead:
    """The head of a spec. `length` is the longest sequence it will be asked for."""
    if spec.mtp is not None:
        return MtpHead(spec, target, length)
    return (FirstHead if spec.version == FIRST else ThirdHead)(spec, target, length)
