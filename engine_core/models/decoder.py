"""The transformer that all families share: embedding, blocks, norm, and logits or what is made of a pooled state.

An encoder is one whose attention goes both ways. It takes the step's own keys, and has no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor

from penstock.engine_core.models.attention import Pages
from penstock.engine_core.models.embedding import Embedding, InputEmbedding, LayerEmbedding, LayerInput
from penstock.engine_core.models.gated_delta import GatedDeltaNet
from penstock.engine_core.models.kv_groups import page_parts
from penstock.engine_core.models.latent_attention import layer_attention
from penstock.engine_core.models.layer_spec import LayerSpec, RopeSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Norm, held_bytes, named
from penstock.engine_core.models.low_rank import Adapted
from penstock.engine_core.models.mamba import Mamba
from penstock.engine_core.models.mlp import Mlp, SeparateMlps, SparseMlp, block_mlp
from penstock.engine_core.models.parts import Placement, vocabulary
from penstock.engine_core.models.pooling_head import PoolingHead
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec, MambaSpec, ShortConvolutionSpec
from penstock.engine_core.models.rope import query_scales, rope_axes, rope_table
from penstock.engine_core.models.sharding import rank_spec
from penstock.engine_core.models.short_convolution import ShortConvolution
from penstock.engine_core.models.spec import ModelSpec, stored_name
from penstock.kernels.chip import chip_of
from penstock.kernels.linear import linear
from penstock.kernels.quantized import Rows
from penstock.kernels.records import AttentionBatch, ImageRows, Rotation
from penstock.kernels.rope import gather_rotation
from penstock.kernels.states import LayerState


class Block:
    """One layer: attention or a recurrence or both, then the MLP, each added to the residual stream, with norms where
    the spec has them. A first layer without `normed` attends over the stream as it is. With `post_norm` the stream goes
    on from the norms' results."""

    def __init__(
        self, layer: LayerSpec, hidden: int, placement: Placement, *, scale: float = 1.0, normed: bool = True,
        post_norm: bool = False,
    ) -> None:  # fmt: skip
        self.spec = layer
        self.scale = scale  # of what is added to the stream
        names = layer.norms if normed else structs.replace(layer.norms, attention_input="")
        self.names = names
        self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = (
            Norm(hidden, layer.norm, placement) if name else None
            for name in (names.attention_input, names.attention_output, names.mlp_input, names.mlp_output)
        )
        self.attention = None if layer.attention is None else layer_attention(layer, hidden, placement)
        self.recurrence = layer_recurrence(layer, hidden, placement)
        self.mlp = block_mlp(layer, hidden, placement)
        self.group = placement.group
        self.post_norm = post_norm
        self.input = LayerInput(layer, hidden, placement) if layer.layer_input else None
        self.scalar = placement.vector(1) if layer.scaled else None
        self.partial = self.mlp_output_norm is None  # the layer's delta is a rank's partial sum

    def forward(
        self, delta: Tensor, residual: Tensor | None, rotation: Rotation | None, batch: AttentionBatch, pages: Pages,
        state: LayerState | None = None, given: Tensor | None = None, *, partial: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """The residual stream is residual + scale * delta (delta alone in the first layer, and behind one that scales
        it): the sum is fused with the norm. The `partial` sums of all ranks are added up there. given: the layer's part
        of embeddings by layer, `[tokens, width]`."""
        scale = self.scale
        if mixers := [mixer for mixer in (self.attention, self.recurrence) if mixer is not None]:
            both = len(mixers) > 1
            reader = None if both or self.spec.parallel else mixers[0].reader
            x, residual = self.join(self.attention_norm, delta, residual, reader, partial=partial, scale=scale)
            delta = self.mix(x, rotation, batch, pages, state)
            if self.spec.parallel:
                assert isinstance(self.mlp, Mlp | SparseMlp), "beside attention"
                return delta.add_(self.mlp.forward(x, batch)), residual
            norm = self.attention_output_norm
            if norm is not None:
                delta = norm.forward(self.group.all_reduce(delta))
            partial = norm is None
            scale = 1.0 if both else scale
        if self.mlp is None:
            assert residual is not None, "a layer has a part"
            return delta, residual
        x, residual = self.join(self.mlp_norm, delta, residual, self.mlp.reader, partial=partial, scale=scale)
        norm = self.mlp_output_norm
        if isinstance(self.mlp, SeparateMlps):
            delta = self.mlp.forward(x, residual, batch)
        else:
            delta = self.mlp.forward(x, batch)
            delta = delta if norm is None else self.group.all_reduce(delta)
        delta = delta if norm is None else norm.forward(delta)
        if self.scalar is None:
            return delta, residual
        stream = residual.add_(delta)
        if self.input is not None:
            assert given is not None, "of every layer"
            stream = self.input.forward(stream, given)
        return stream.mul_(self.scalar), None

    def mix(
        self, x: Rows, rotation: Rotation | None, batch: AttentionBatch, pages: Pages, state: LayerState | None
    ) -> Tensor:
        """What attention and the recurrence make of the sequences."""
        attended: Tensor | None = None
        if self.attention is not None:
            assert rotation is not None, "of its table"
            attended = self.attention.forward(x, rotation, batch, pages)
        if self.recurrence is None:
            assert attended is not None, "one of both"
            return attended
        assert batch.states is not None, "of a model with recurrent layers"
        assert state is not None, "of this one"
        found = self.recurrence.forward(x, batch.states.batch, state)
        if attended is None:
            return found
        of_attention, of_recurrence = self.spec.mixer_scales
        return attended.mul_(of_attention).add_(found, alpha=of_recurrence)

    def join(
        self, norm: Norm | None, delta: Tensor, residual: Tensor | None, reader: Linear | None, *, partial: bool,
        scale: float,
    ) -> tuple[Rows, Tensor]:  # fmt: skip
        """What the next part reads, and the stream: they are the same without a norm. reader: the part's product, where
        it alone reads this; it may want it rounded."""
        if residual is None:
            return (delta if norm is None else norm.forward(delta)), delta
        shared = partial and self.group.ranks is not None
        if norm is not None:
            rows = None if reader is None or shared or self.post_norm else reader.rows
            if rows is not None:
                return norm.add_rounded(delta, residual, rows, scale)
            normed, total = norm.add(delta, residual, partial=partial, scale=scale)
            return normed, normed if self.post_norm else total
        if shared:
            delta = self.group.all_reduce(delta)
        total = torch.add(residual, delta, alpha=scale)
        return total, total

    def destinations(self) -> Destinations:
        """By names within the layer."""
        names = self.names
        yield from named(
            (f"{names.attention_input}.", self.attention_norm),
            ("self_attn.", self.attention),
            (f"{names.attention_output}.", self.attention_output_norm),
            (f"{names.mlp_input}.", self.mlp_norm),
            (f"{names.mlp_output}.", self.mlp_output_norm),
            ("" if self.spec.recurrence is None else f"{self.spec.recurrence.place}.", self.recurrence),
            ("mlp.", self.mlp),
            ("", self.input),
        )
        if self.scalar is not None:
            yield "layer_scalar", Destination(self.scalar, (1,))


def layer_recurrence(
    layer: LayerSpec, hidden: int, placement: Placement
) -> GatedDeltaNet | Mamba | ShortConvolution | None:
    """A layer's recurrence, of any kind."""
    spec = layer.recurrence
    if isinstance(spec, GatedDeltaSpec):
        return GatedDeltaNet(spec, layer.norm, hidden, placement)
    if isinstance(spec, MambaSpec):
        return Mamba(spec, layer.norm, hidden, placement)
    return ShortConvolution(spec, hidden, placement) if isinstance(spec, ShortConvolutionSpec) else None


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
        tokens, scale = vocabulary("embed_tokens", spec.vocab_size, placement), spec.body.embedding_scale
        read_off = group.ends and (spec.tied or spec.headless) and not spec.encoder
        self.embedding = Embedding(tokens, spec.hidden, placement, scale, read_off=read_off) if looked_up else None
        self.input = InputEmbedding(spec, placement) if spec.body.embedding.joined else None
        self.by_layer = LayerEmbedding(spec, placement) if spec.body.embedding.layer_inputs else None
        scale, post_norm = spec.body.residual_scale, spec.body.post_norm
        self.blocks = tuple(
            Block(layer, spec.hidden, placement, scale=scale, post_norm=post_norm) for layer in spec.blocks
        )
        self.norm = Norm(spec.hidden, spec.norm, placement) if group.ends else None
        output = (vocabulary("lm_head", spec.vocab_size, placement),)
        self.projection = PoolingHead(spec.projection, placement)
        self.classifier = None if spec.classifier is None else PoolingHead(spec.classifier.layers, placement)
        # A headless model takes its logits from the input embedding, for dummy runs alone: text is refused.
        own_head = group.ends and not (spec.tied or spec.headless)
        formats = () if spec.head_form is None else (("lm_head", spec.head_form),)
        self.head = Linear(output, spec.hidden, placement, bias=False, formats=formats) if own_head else None
        self.adapted: Adapted | None = None  # what adapters add to the logits
        self.parts = {group: parts for group, parts in page_parts(rank_spec(spec, placement.size)).items() if parts > 1}
        self.ropes: dict[tuple[RopeSpec, int], Tensor] = {  # by AttentionSpec.rotary, fp32 [length, dim] each
            (rope, dim): rope_table(rope, dim, length, placement.device)
            for rope, dim in {attention.rotary: None for attention in spec.attentions}
        }
        self.query_scales = {rope: query_scales(rope[0], length, placement.device) for rope in self.ropes}
        self.rope_axes = {rope: rope_axes(*rope, placement.device) for rope in self.ropes}

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
        if self.spec.encoder:
            places = torch.arange(len(input_ids), device=input_ids.device)
            attention = replace(attention, slot_mapping=places)  # of pages that the step alone has
        block_size = next((pages[0].shape[1] for pages in cache if pages), 1) if self.parts else 1
        batches = [attention]
        if self.parts or attention.others:
            groups = range(1 + len(attention.others))
            batches = [attention.of_group(group, self.parts.get(group, 1), block_size) for group in groups]
        residual: Tensor | None = None
        aux_states: list[Tensor] = []
        if stream is None:
            assert self.embedding is not None, "the first stage"
            delta = self.embedding.forward(input_ids)
            if attention.images is not None:
                delta = attention.images.instead(delta)
            if self.input is not None:
                delta = self.input.forward(delta, positions, attention.token_types)
        else:
            delta, *aux_states = stream.unbind()
        given = None if self.by_layer is None else self.by_layer.forward(input_ids, delta)
        turned = positions if attention.rope_positions is None else attention.rope_positions
        rotations = {
            rope: gather_rotation(table, turned, self.query_scales[rope], self.rope_axes[rope])
            for rope, table in self.ropes.items()
        }
        partial, states = True, iter(() if attention.states is None else attention.states.layers)
        for layer, (block, pages) in enumerate(zip(self.blocks, cache, strict=True), self.first):
            if count := aux_layers.count(layer):
                aux_states += [self.joined(delta, residual, partial=partial)] * count
            own = block.spec.attention
            rotation, batch = (None, attention) if own is None else (rotations[own.rotary], batches[own.kv_group])
            state = None if block.recurrence is None else next(states)
            delta, residual = block.forward(
                delta,
                residual,
                rotation,
                batch,
                pages,
                state,
                None if given is None else given[:, layer],
                partial=partial,
            )
            partial = block.partial
            if attention.images is not None and layer < self.deepstack:
                delta, residual = add_level(delta, residual, attention.images, 1 + layer)
        if self.norm is None:
            return torch.stack((self.joined(delta, residual, partial=partial), *aux_states)), aux_states
        if residual is None:
            return self.norm.forward(delta), aux_states
        return self.norm.add(delta, residual, partial=partial, scale=self.spec.body.residual_scale)[0], aux_states

    @property
    def deepstack(self) -> int:
        """Layers, the first ones, behind which something is added to tokens of images."""
        return 0 if self.spec.vision is None else len(self.spec.vision.levels)

    def joined(self, delta: Tensor, residual: Tensor | None, *, partial: bool) -> Tensor:
        """The residual stream."""
        if residual is None:
            return delta
        if partial:
            delta = self.placement.group.all_reduce(delta.clone())
        return torch.add(residual, delta, alpha=self.spec.body.residual_scale)

    def pooled(self, states: Tensor, *, classify: bool) -> Tensor:
        """Vectors of texts by their pooled states, or with `classify` the logits of their labels: fp32 `[rows, hidden]
        -> [rows, numbers]`."""
        if not classify:
            return self.projection.forward(states)
        assert self.classifier is not None, "a classifier"
        return self.classifier.forward(states)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden] -> [rows, vocab]`, gathered from all ranks: in the model's dtype on a GPU, else in fp32."""
        table = self.embedding if self.head is None else self.head
        assert table is not None, "the last stage"
        addition = None if self.adapted is None else self.adapted.of(hidden)
        logits = linear(hidden, table.operand, invariant=self.placement.invariant, addition=addition)
        if self.placement.group.ranks is not None:
            logits = self.placement.group.all_gather(logits, self.spec.vocab_size)
        logits = logits if chip_of(logits.device).runs_triton else logits.float()
        scale, cap = self.spec.body.logit_scale, self.spec.body.logit_softcap
        if scale != 1.0:
            logits = logits.mul_(scale)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def shallow(self) -> Decoder:
        """The same model with one layer of each kind, for work that depends on kinds alone. The first layer is its own
        kind, since nothing is added before it."""
        spec, kinds = self.spec, self.spec.blocks
        kept = sorted({0, *(kinds.index(kind, 1) for kind in kinds[1:])})
        short = copy(self)
        short.spec = spec.part(kept)
        short.blocks = tuple(self.blocks[at] for at in kept)
        return short

    def destinations(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint goes, by its name there."""
        found = named(
            ("model.embed_tokens.", self.embedding),
            ("model.", None if self.embedding is None else self.input),
            ("model.", self.by_layer),
            *((f"model.layers.{layer}.", block) for layer, block in enumerate(self.blocks, self.first)),
            ("model.norm.", self.norm),
            ("", self.head),
            ("", self.classifier),
        )
        return {stored_name(self.spec, name): destination for name, destination in found}

    @property
    def weight_bytes(self) -> int:
        copied = 0 if self.embedding is None else self.embedding.copied_bytes
        return held_bytes(self.destinations().values()) + copied

    @property
    def missing_kv_scales(self) -> int:
        """Scales of a cache in e4m3 that no checkpoint has given, two to a layer."""
        found = (block.attention.kv_scales for block in self.blocks if block.attention is not None)
        return sum(2 - int(scales.read) for scales in found if scales is not None)

    @property
    def dtype(self) -> torch.dtype:
        return self.placement.dtype


def add_level(delta: Tensor, residual: Tensor | None, images: ImageRows, level: int) -> tuple[Tensor, Tensor | None]:
    """A layer's result with what a DeepStack level adds to tokens of images. Of the two that are summed the stream
    takes it: it is the same on all ranks."""
    stream = images.added(delta if residual is None else residual, level)
    return (stream, None) if residual is None else (delta, stream)
