"""Multi-head latent attention (MLA: DeepSeek-V2, 2024), on one rank's share of its heads.

Queries are absorbed: scores and sums are taken over the cached latents themselves. A query's unturned numbers go
through the keys' half of `kv_b_proj` before, and what was attended through the values' half behind. Each latent is read
once for all heads. For rows with many queries the latents are expanded to keys and values instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine_core.models.attention import Pages, SelfAttention
from penstock.engine_core.models.layer_spec import EXPANSION, AttentionSpec, LayerSpec, NormSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Norm, named, quantized
from penstock.engine_core.models.parts import Part, Placement, whole
from penstock.engine_core.models.quantization.weight_format import format_of
from penstock.engine_core.models.quantized_matrix import Owner, QuantizedMatrix
from penstock.engine_core.models.rope import head_order
from penstock.kernels.latent_attention import latent_attention, multiply_heads, store_latents
from penstock.kernels.latent_expansion import attend_expanded, others_of
from penstock.kernels.quantized import GroupedWeight, Rows
from penstock.kernels.records import AttentionBatch, Rotation

INNER_NORM = NormSpec(eps=1e-6)  # of latents, whatever config.json says of the others: as in transformers


class Expansion(Owner):
    """`kv_b_proj`, which makes keys and values of latents: dense, also where the checkpoint has it quantized, since its
    halves are multiplied with queries and with what was attended."""

    def __init__(self, spec: AttentionSpec, placement: Placement) -> None:
        latent = spec.latent
        assert latent is not None
        self.shape = spec.matrices(1)[EXPANSION][:2]
        wide = latent.nope_dim + latent.value_dim
        self.start, held = placement.rank * placement.share(self.shape[0]), placement.share(spec.heads)
        self.weight = placement.matrix(held * wide, latent.rank)
        parts = torch.split(self.weight.view(held, wide, latent.rank), [latent.nope_dim, latent.value_dim], dim=1)
        self.keys, self.values = parts[0], parts[1].transpose(1, 2)  # [heads, nope, rank], [heads, rank, value]
        self.form = format_of(spec.formats, EXPANSION)
        self.matrix: QuantizedMatrix | None = None
        if self.form is not None:
            run = slice(self.start, self.start + len(self.weight))
            self.matrix = QuantizedMatrix(self.form, self.shape, "outputs", (run,), placement.device, self)

    def gather(self) -> None:
        """Take what the matrix has found."""
        assert self.matrix is not None, "quantized"
        if (found := self.matrix.found) is not None:
            order = found.order if isinstance(found, GroupedWeight) else None
            self.weight[:, slice(None) if order is None else order] = found.dequantized(self.weight.dtype)
            self.matrix.found = None

    @property
    def quantized_bytes(self) -> int:
        return 0 if self.matrix is None else self.weight.nbytes

    @property
    def made(self) -> tuple[object, ...]:
        return () if self.matrix is None else (self.weight,)

    def destinations(self) -> Destinations:
        if self.matrix is not None:
            yield from quantized(EXPANSION, self.matrix)
        else:
            place = Destination(self.weight, self.shape, 0, self.start, self.shape[1], owner=self)
            yield f"{EXPANSION}.weight", place


class LatentAttention:
    """Of the residual stream."""

    def __init__(self, layer: LayerSpec, hidden: int, placement: Placement) -> None:
        spec = layer.attention
        assert spec is not None
        latent = spec.latent
        assert latent is not None
        self.spec = spec
        self.placement = placement
        self.heads = placement.share(spec.heads)
        turned = head_order(spec.rope, latent.rope_dim)
        order, shared = shifted(turned, latent.nope_dim), shifted(turned, latent.rank)
        share = self.heads * latent.query_dim
        queries = Part(
            "q_b_proj" if latent.q_rank else "q_proj", spec.heads * latent.query_dim, share, placement.rank * share,
            order, latent.query_dim,
        )  # fmt: skip
        key = Part("kv_a_proj_with_mqa", spec.head_dim, spec.head_dim, 0, shared, spec.head_dim)
        first = whole("q_a_proj", latent.q_rank) if latent.q_rank else queries
        self.inputs = Linear((first, key), hidden, placement, bias=spec.qkv_bias, formats=spec.formats)
        self.reader = self.inputs
        self.widths = [first.share, latent.rank, latent.rope_dim]
        self.query_norm: Norm | None = None
        self.queries: Linear | None = None
        if latent.q_rank:
            self.query_norm = Norm(latent.q_rank, INNER_NORM, placement)
            self.queries = Linear((queries,), latent.q_rank, placement, bias=False, formats=spec.formats)
        self.latent_norm = Norm(latent.rank, INNER_NORM, placement)
        self.expansion = Expansion(spec, placement)
        self.output = Linear(
            (whole("o_proj", hidden),), spec.attended, placement, bias=spec.output_bias, split_inputs=True,
            formats=spec.formats,
        )  # fmt: skip
        self.scale = spec.scale or latent.query_dim**-0.5
        self.kv_scales = None

    def forward(self, x: Rows, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        """`[tokens, hidden] -> [tokens, hidden]`, this rank's partial sum."""
        latent = self.spec.latent
        assert latent is not None
        q, own, key = self.inputs.split(x, self.widths)
        if self.queries is not None and self.query_norm is not None:
            q = self.queries.forward(self.query_norm.forward(q))
        q = q.view(len(q), self.heads, latent.query_dim)
        turned, norm = q[..., latent.nope_dim :], self.latent_norm
        expands = batch.long_rows is not None and not batch.invariant
        absorbed = None
        if not expands:
            absorbed = self.absorb(q)
            turned = absorbed[..., latent.rank :]
        store_latents(own, key, norm.weight, norm.eps, q[..., latent.nope_dim :], turned, rotation, pages[0],
                      batch.slot_mapping)  # fmt: skip
        if absorbed is None:
            attended = self.attend_mixed(q, batch, pages[0])
        else:
            attended = self.attend_absorbed(absorbed, batch, pages[0])
        return self.output.forward(attended.flatten(1))

    def absorb(self, q: Tensor) -> Tensor:
        """The unturned numbers of `q  # [tokens, heads, nope + rope]` behind the keys' half: `[tokens, heads, rank +
        rope]`, the last of which are the caller's to fill."""
        latent = self.spec.latent
        assert latent is not None
        absorbed = torch.empty(len(q), self.heads, self.spec.head_dim, dtype=q.dtype, device=q.device)
        unturned, invariant = q[..., : latent.nope_dim], self.placement.invariant
        multiply_heads(unturned, self.expansion.keys, absorbed[..., : latent.rank], invariant)
        return absorbed

    def attend_absorbed(self, q: Tensor, batch: AttentionBatch, pages: Tensor) -> Tensor:
        """By absorbed queries: `[tokens, heads, value]`."""
        latent = self.spec.latent
        assert latent is not None
        attended = latent_attention(q, pages, batch, latent.rank, self.scale)  # [tokens, heads, rank]
        values = torch.empty(len(q), self.heads, latent.value_dim, dtype=q.dtype, device=q.device)
        multiply_heads(attended, self.expansion.values, values, self.placement.invariant)
        return values

    def attend_mixed(self, q: Tensor, batch: AttentionBatch, pages: Tensor) -> Tensor:
        """Over expanded latents for long rows, by absorbed queries for the others: `[tokens, heads, value]`. q: turned,
        `[tokens, heads, nope + rope]`."""
        latent = self.spec.latent
        assert latent is not None and batch.long_rows is not None  # noqa: PT018
        values = torch.empty(len(q), self.heads, latent.value_dim, dtype=q.dtype, device=q.device)
        keys = self.expansion.keys.transpose(1, 2)
        attend_expanded(q, pages, batch, keys, self.expansion.values, self.scale, values)
        others = batch.long_rows.others
        if others is not None:
            own = q[others.tokens]
            absorbed = self.absorb(own)
            absorbed[..., latent.rank :] = own[..., latent.nope_dim :]
            values[others.tokens] = self.attend_absorbed(absorbed, others_of(batch), pages)
        return values

    def destinations(self) -> Destinations:
        """By names within the attention."""
        return named(
            ("", self.inputs),
            ("q_a_layernorm.", self.query_norm),
            ("", self.queries),
            ("kv_a_layernorm.", self.latent_norm),
            ("", self.expansion),
            ("", self.output),
        )


def layer_attention(layer: LayerSpec, hidden: int, placement: Placement) -> SelfAttention | LatentAttention:
    """A layer's attention, of either kind."""
    assert layer.attention is not None, "checked by the caller"
    kind = SelfAttention if layer.attention.latent is None else LatentAttention
    return kind(layer, hidden, placement)


def shifted(order: tuple[slice, ...], first: int) -> tuple[slice, ...]:
    """The same behind so many numbers that come first, in their order."""
    return slice(0, first), *(slice(first + run.start, first + run.stop, run.step) for run in order)
