"""A layer's attention, on one rank's share of its heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from penstock.engine_core.models.layer_spec import AttentionSpec, LayerSpec
from penstock.engine_core.models.layers import Destination, Destinations, Linear, Norm, named
from penstock.engine_core.models.parts import Part, Placement, spread, whole
from penstock.engine_core.models.quantization.weight_format import SCALE_TYPES
from penstock.engine_core.models.quantized_matrix import Owner
from penstock.engine_core.models.rope import head_order
from penstock.kernels.attention import paged_attention, prepare_attention
from penstock.kernels.quantized import Rows
from penstock.kernels.records import AttentionBatch, AttentionOptions, HeadNorms, Rotation
from penstock.kernels.rope import rotate_and_store
from penstock.kernels.varlen_attention import varlen_attention
from penstock.protocol.errors import ModelError

# Of one layer: keys and values, [blocks, block_size, kv_heads, head_dim] each; latents, [blocks, block_size, head_dim].
Pages: TypeAlias = tuple[Tensor, ...]


def head_parts(spec: AttentionSpec, placement: Placement) -> tuple[Part, Part, Part]:
    """This rank's share of queries, keys and values."""
    order, dim = head_order(spec.rope, spec.head_dim), spec.head_dim
    stride = 2 * dim * spec.gate_in_queries
    heads, kv_heads = placement.share(spec.heads), placement.kv_heads(spec.kv_heads)
    first = placement.rank * spec.kv_heads // placement.size * dim
    return (
        Part("q_proj", spec.heads * dim, heads * dim, placement.rank * heads * dim, order, dim, stride),
        Part("k_proj", spec.kv_heads * dim, kv_heads * dim, first, order, dim),
        Part("v_proj", spec.kv_heads * dim, kv_heads * dim, first),
    )


class KvScales(Owner):
    """What keys and values in e4m3 are multiplied with: 1, unless the checkpoint says otherwise."""

    def __init__(self, spec: AttentionSpec, placement: Placement) -> None:
        own = placement.kv_heads(spec.kv_heads)
        self._spec = spec
        self._first = placement.rank * spec.kv_heads // placement.size
        self.held = torch.ones(2, own, device=placement.device)  # fp32, of keys and of values
        self.read = torch.zeros((), dtype=torch.int64)  # tensors of the checkpoint

    def take(self, side: int, found: Tensor, name: str) -> None:
        """From the checkpoint: of keys (side 0) or values. Raises ModelError naming the tensor."""
        found = found.float().flatten()
        if not (found.isfinite() & (found > 0)).all():
            raise ModelError(f"tensor {name}: scales of keys and values must be positive, and it has {found.tolist()}")
        own = self.held[side]
        own.copy_(found[self._first : self._first + len(own)] if self._spec.kv_scales == "head" else found)
        self.read += 1

    def destinations(self) -> Destinations:
        """By the names of compressed-tensors, and those of modelopt."""
        if not self._spec.kv_scales:
            return
        shape = (self._spec.kv_heads,) if self._spec.kv_scales == "head" else ()
        for side, names in enumerate((("k_scale", "k_proj.k_scale"), ("v_scale", "v_proj.v_scale"))):
            for name in names:
                yield (
                    name,
                    Destination(
                        None, shape, owner=self, take=partial(self.take, side), dtypes=SCALE_TYPES, optional=True
                    ),
                )

    @property
    def made(self) -> tuple[object, ...]:
        return self.held, self.read


class HeadsNorm:
    """A LayerNorm without a bias for each head of a part, of which a rank has those of its share."""

    def __init__(self, part: Part, layer: LayerSpec, placement: Placement, *, tensors: bool) -> None:
        self.part = part
        self.eps = layer.norm.eps
        self.tensors = tensors  # the checkpoint has one for each head
        self.weight = placement.matrix(part.share // part.head_dim, part.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Of `[tokens, heads, dim]`, in fp32, rounded once."""
        return (layer_norm(x.float(), x.shape[2:], eps=self.eps) * self.weight.float()).to(x.dtype)

    def destinations(self) -> Destinations:
        """By names within the norm."""
        part, dim = self.part, self.part.head_dim
        first, heads = part.start // dim, part.outputs // dim
        if not self.tensors:
            yield "weight", Destination(self.weight, (heads, dim), axis=1, first=first, runs=part.order)
            return
        for head in range(heads):
            weight = self.weight[head - first] if first <= head < first + len(self.weight) else None
            yield f"{head}.weight", Destination(weight, (dim,), runs=part.order)


class SelfAttention:
    """Of the residual stream or of `inputs` numbers."""

    def __init__(self, layer: LayerSpec, hidden: int, placement: Placement, inputs: int = 0) -> None:
        spec = layer.attention
        assert spec is not None, "a layer with attention"
        self.spec = spec
        self.placement = placement
        parts: tuple[Part, ...] = head_parts(spec, placement)
        self.heads = placement.share(spec.heads)
        self.kv_heads = placement.kv_heads(spec.kv_heads)
        if spec.gate_in_queries:
            query = parts[0]
            parts = (query, replace(query, order=(), offset=spec.head_dim), *parts[1:])
        elif spec.gated:
            parts = (parts[0], spread("gate_proj", spec.heads * spec.head_dim, placement), *parts[1:])
        if spec.values_of_keys or spec.kv_shared:
            parts = parts[: -1 - spec.kv_shared]
        fused = "qkv_proj" if spec.fused else ""
        self.qkv = Linear(parts, inputs or hidden, placement, bias=spec.qkv_bias, fused=fused, formats=spec.formats)
        self.reader = self.qkv
        self.output = Linear(
            (whole("o_proj", hidden),), spec.heads * spec.head_dim, placement, bias=spec.output_bias, split_inputs=True,
            formats=spec.formats,
        )  # fmt: skip
        norms: tuple[Norm | HeadsNorm | None, ...] = (None, None)
        if spec.qk_norm in ("head", "unit"):
            part = Part("", spec.head_dim, spec.head_dim, 0, parts[0].order, spec.head_dim)
            norms = tuple(Norm(spec.head_dim, layer.norm, placement, part) for _ in range(2))
        elif spec.qk_norm == "heads":
            each = partial(HeadsNorm, layer=layer, placement=placement, tensors=spec.qk_norm_tensors)
            norms = each(parts[0]), each(parts[-2])
        elif spec.qk_norm:
            norms = tuple(Norm(part.outputs, layer.norm, placement, part) for part in head_parts(spec, placement)[:2])
        self.query_norm, self.key_norm = norms[0], None if spec.kv_shared else norms[1]
        if spec.qk_norm == "unit":
            for norm in norms:
                assert norm is not None, "of queries and keys"
                norm.weight.fill_(1.0)
        self.sinks = torch.empty(self.heads, device=placement.device) if spec.sinks else None
        scale = spec.scale or spec.head_dim**-0.5
        self.kv_scales = KvScales(spec, placement) if spec.kv_fp8 else None
        kv_scales = None if self.kv_scales is None else self.kv_scales.held
        self.options = AttentionOptions(scale, spec.window, spec.softcap, self.sinks, kv_scales)

    def forward(self, x: Rows, rotation: Rotation, batch: AttentionBatch, pages: Pages) -> Tensor:
        """`[tokens, inputs] -> [tokens, hidden]`, this rank's partial sum."""
        q, *gates, k, v = self.heads_of(self.qkv.forward(x))
        if self.spec.bidirectional:
            attended = self.attend_both_ways(q, k, v, rotation, batch)
        else:
            prepare_attention(q, pages[0], batch, self.options)
            q = self.rotate(q, k, v, rotation, pages, batch.slot_mapping)
            attended = paged_attention(q, pages[0], pages[1], batch, self.options)  # [tokens, heads, head_dim]
        for gate in gates:
            attended *= gate.sigmoid()
        return self.output.forward(attended.flatten(1))

    def attend_both_ways(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, batch: AttentionBatch) -> Tensor:
        """Over the step's own keys. Where they are turned, they and the values lie in pages of one token each, in the
        order of the tokens."""
        if self.spec.rope.kind != "none" or self.query_norm is not None:
            keys, values = (torch.empty(len(k), 1, *k.shape[1:], dtype=k.dtype, device=k.device) for _ in range(2))
            q = self.rotate(q, k, v, rotation, (keys, values), batch.slot_mapping)
            k, v = keys.flatten(0, 1), values.flatten(0, 1)
        return varlen_attention(q, k, v, batch.query_start, batch.max_query, self.options)

    def rotate(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, pages: Pages, slot_mapping: Tensor) -> Tensor:
        """Queries, behind their norm and turned. Keys likewise and values go into the pages."""
        norms = None
        query, key = self.query_norm, self.key_norm or self.query_norm
        if isinstance(query, HeadsNorm) and isinstance(key, HeadsNorm):
            q, k = query.forward(q), key.forward(k)
        elif isinstance(query, Norm) and isinstance(key, Norm):
            if self.spec.qk_norm == "width":
                q, k = self.norm_width(q, k, query, key)
            else:
                turned, values = self.spec.qk_norm_turned, self.spec.value_norm
                norms = HeadNorms(query.weight, key.weight, query.eps, turned, values)
        return rotate_and_store(q, k, v, rotation, pages[0], pages[1], slot_mapping, norms, self.options.kv_scales)

    def heads_of(self, fused: Tensor) -> tuple[Tensor, ...]:
        """q `[tokens, heads, dim]`, gates as q if there are some, k and v `[tokens, kv_heads, dim]`: views of one
        product, k and v perhaps of the same part, or of no heads where they are another layer's."""
        single = self.spec.values_of_keys
        if self.spec.kv_shared:
            q = fused.view(len(fused), -1, self.spec.head_dim)
            return q, q[:, :0], q[:, :0]
        counts = [*[self.heads] * (1 + self.spec.gated), *[self.kv_heads] * (2 - single)]
        found = torch.split(fused.view(len(fused), -1, self.spec.head_dim), counts, dim=1)
        return (*found, found[-1]) if single else found

    def norm_width(self, q: Tensor, k: Tensor, query: Norm, key: Norm) -> tuple[Tensor, Tensor]:
        """Norms over all heads of a token, those of the other ranks among them."""
        group, size = self.placement.group, self.placement.size
        if group.ranks is None:
            return query.forward(q.flatten(1)).view_as(q), key.forward(k.flatten(1)).view_as(k)
        sums = torch.stack([part.float().square().sum((1, 2)) for part in (q, k)], dim=1)
        sums = group.all_reduce(sums)  # each key-value head as often as there are ranks that have it
        copies = max(1, size // self.spec.kv_heads)
        found = []
        for at, (part, norm, count) in enumerate(((q, query, 1), (k, key, copies))):
            gain = (sums[:, at] / (count * norm.part.outputs) + norm.eps).rsqrt()[:, None, None]
            found.append((part.float() * gain * norm.weight.float().view(part.shape[1:])).to(part.dtype))
        return found[0], found[1]

    def destinations(self) -> Destinations:
        """By names within the attention."""
        norms = (None, None) if self.spec.qk_norm == "unit" else (self.query_norm, self.key_norm)
        yield from named(("", self.qkv), ("q_norm.", norms[0]), ("k_norm.", norms[1]), ("", self.output))
        if self.sinks is not None:
            yield "sinks", Destination(self.sinks, (self.spec.heads,), 0, self.placement.rank * self.heads)
        yield from named(("", self.kv_scales))
