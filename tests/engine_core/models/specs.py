"""Small models' specs, by sizes that are told apart into the spec's records."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from penstock.engine_core.models.spec import AttentionSpec, MlpSpec, ModelSpec, RopeSpec


def resized(spec: ModelSpec, **sizes: Any) -> ModelSpec:
    """The same with these sizes, by their names in the spec, its attention, or its MLP (`intermediate`, `mlp_bias`)."""
    attention = {name: sizes.pop(name) for name in AttentionSpec.__struct_fields__ if name in sizes}
    mlp = MlpSpec(sizes.pop("intermediate", spec.mlp.intermediate), sizes.pop("mlp_bias", spec.mlp.bias))
    return structs.replace(spec, attention=structs.replace(spec.attention, **attention), mlp=mlp, **sizes)


def small_spec(**sizes: Any) -> ModelSpec:
    """A Llama of one layer whose ids and lengths are small, without biases; `sizes` as of `resized`."""
    layers = sizes.get("layers", 1)
    attention = AttentionSpec(
        heads=4, kv_heads=2, head_dim=8, rope=RopeSpec(), windows=(0,) * layers, qkv_bias=False, output_bias=False,
        qk_norm=False,
    )  # fmt: skip
    spec = ModelSpec(
        family="llama", layers=layers, hidden=32, attention=attention, mlp=MlpSpec(64, bias=False), vocab_size=9,
        norm_eps=1e-6, tied=False, max_position=16, longest=16, dtype="float32", bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip
    return resized(spec, **sizes)
