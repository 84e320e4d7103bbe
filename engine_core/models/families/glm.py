"""GLM 4 (Zhipu AI, 2024; 0414: 2025) and GLM 4.5 to 4.7 (2025), which have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import MtpNames, MtpSpec, NormNames
from penstock.engine_core.models.reading import (
    alike,
    read_attention,
    read_layers,
    read_mlp,
    read_norm,
    read_rope,
    read_routed_experts,
)

SANDWICH = NormNames(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")


def read_glm(file: ConfigFile, norms: NormNames | None = None) -> Body:
    rope = read_rope(file, partial=0.5, interleaved=True)
    attention = read_attention(file, rope, qkv_bias=file.flag("attention_bias", True))
    return Body(layers=alike(file, attention, read_mlp(file, fused=True), read_norm(file), norms))


def read_glm4(file: ConfigFile) -> Body:
    return read_glm(file, SANDWICH)


def read_glm4_moe(file: ConfigFile) -> Body:
    """The first layers are dense. Layers behind the last one predict further tokens; the first of them drafts."""
    attention = read_attention(
        file,
        read_rope(file, partial=0.5),
        qkv_bias=file.flag("attention_bias"),
        qk_norm="head" if file.flag("use_qk_norm") else "",
    )
    layers, dense = read_layers(file), file.integer("first_k_dense_replace", 1, low=0)
    experts = read_routed_experts(file, count=128, chosen=8)
    mlps = [read_mlp(file) if layer < dense else experts for layer in range(layers)]
    more = file.integer("num_nextn_predict_layers", 0, low=0, high=64)
    found = alike(file, attention, mlps, read_norm(file))
    return Body(
        layers=found,
        unread=tuple(f"layers.{layer}." for layer in range(layers, layers + more)),
        mtp=MtpSpec(layer=found[-1], names=MtpNames(place=f"model.layers.{layers}.")) if more else None,
    )


DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
}
FAMILIES = (
    Family(
        name="glm",
        architecture="GlmForCausalLM",
        base="GlmModel",
        read=read_glm,
        defaults=DEFAULTS,
    ),
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        base="Glm4Model",
        read=read_glm4,
        defaults=DEFAULTS,
        wrappers=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
        texts=("glm4v_text",),
    ),
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        base="Glm4MoeModel",
        read=read_glm4_moe,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
        },
        wrappers=("Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
        texts=("glm4v_moe_text",),
    ),
)
