"""Small models' specs, by sizes that are told apart into the spec's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.layer_spec import (
    AttentionSpec,
    Body,
    ExpertSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)
from penstock.engine_core.models.spec import ModelSpec, with_quantization
from penstock.engine_core.models.tensors import wanted_tensors


def resized(spec: ModelSpec, **sizes: Any) -> ModelSpec:
    """The same with these sizes, by their names in the spec, in the attention of every layer, or in the MLP of every
    dense layer (`intermediate`, `mlp_bias`). `layers` is their number, `windows` has one for each, `experts` are those
    of every layer, or of those for which `sparse` is true."""
    blocks = list(spec.blocks)
    count = sizes.pop("layers", len(sizes.get("windows", blocks)))
    blocks = [blocks[min(at, len(blocks) - 1)] for at in range(count)]
    attention = {name: sizes.pop(name) for name in AttentionSpec.__struct_fields__ if name in sizes}
    windows = sizes.pop("windows", [layer.attention.window for layer in blocks])
    mlp = {name: sizes.pop(key) for name, key in (("width", "intermediate"), ("bias", "mlp_bias")) if key in sizes}
    experts = sizes.pop("experts", None)
    sparse = sizes.pop("sparse", (experts is not None,) * count)
    made = []
    for layer, window, has in zip(blocks, windows, sparse, strict=True):
        own = structs.replace(layer.attention, **attention, window=window)
        dense = structs.replace(layer.mlp, **mlp) if isinstance(layer.mlp, MlpSpec) else layer.mlp
        made.append(structs.replace(layer, attention=own, mlp=experts if has else dense))
    return structs.replace(spec.with_layers(tuple(made)), **sizes)


def small_spec(**sizes: Any) -> ModelSpec:
    """A Llama of one layer whose ids and lengths are small, without biases; `sizes` as of `resized`."""
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=8, rope=RopeSpec())
    layer = LayerSpec(attention=attention, mlp=MlpSpec(width=64), norm=NormSpec(eps=1e-6))
    spec = ModelSpec(
        family="llama", hidden=32, body=Body(layers=(layer,)), vocab_size=9, tied=False, max_position=16, longest=16,
        dtype="float32",
    )  # fmt: skip
    return resized(spec, **sizes)


def online_spec(spec: ModelSpec, quantization: str) -> ModelSpec:
    """The same with its weights rounded while they load."""
    return with_quantization(spec, ConfigFile(Path("config.json"), {}), None, quantization)


def small_experts(count: int, chosen: int, width: int, **more: Any) -> ExpertSpec:
    """Experts whose shares add up to one."""
    return ExpertSpec(count=count, width=width, routing=RoutingSpec(chosen=chosen, normalised=True), **more)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Of the model's checkpoint, by names."""
    return {name: wanted.shape for name, wanted in wanted_tensors(spec).items()}


def windows_of(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(layer.attention.window for layer in spec.blocks)
