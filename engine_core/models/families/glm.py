"""GLM 4 (0414) and GLM 4.5 to 4.7 (Zhipu AI, 2025), which have experts."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import ExpertSpec, NormNames, RoutingSpec
from penstock.engine_core.models.reading import (
    alike,
    read_attention,
    read_groups,
    read_layers,
    read_mlp,
    read_norm,
    read_rope,
)

SANDWICH = NormNames(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")


def read_glm4(file: ConfigFile) -> Body:
    rope = read_rope(file, partial=0.5, interleaved=True)
    attention = read_attention(file, rope, qkv_bias=file.flag("attention_bias", True))
    return Body(layers=alike(file, attention, read_mlp(file, fused=True), read_norm(file), SANDWICH))


def read_glm4_moe(file: ConfigFile) -> Body:
    """The first layers are dense. Layers behind the last one predict further tokens, and are left unread."""
    attention = read_attention(
        file,
        read_rope(file, partial=0.5),
        qkv_bias=file.flag("attention_bias"),
        qk_norm="head" if file.flag("use_qk_norm") else "",
    )
    layers, dense = read_layers(file), file.integer("first_k_dense_replace", 1, low=0)
    experts = read_experts(file)
    mlps = [read_mlp(file) if layer < dense else experts for layer in range(layers)]
    more = file.integer("num_nextn_predict_layers", 0, low=0, high=64)
    return Body(
        layers=alike(file, attention, mlps, read_norm(file)),
        unread=tuple(f"layers.{layer}." for layer in range(layers, layers + more)),
    )


def read_experts(file: ConfigFile) -> ExpertSpec:
    """As in DeepSeek-V3."""
    count = file.integer("n_routed_experts", 128, high=4096)
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", 8, high=count),
        scores="sigmoid",
        normalised=file.flag("norm_topk_prob", True),
        bias="gate.e_score_correction_bias",
        scale=file.number("routed_scaling_factor", 1.0),
        **read_groups(file, count),
    )
    one, number = read_mlp(file, "moe_intermediate_size"), file.integer("n_shared_experts", 1)
    return ExpertSpec(
        count=count,
        width=one.width,
        routing=routing,
        shared=structs.replace(one, width=number * one.width),
        shared_name="shared_experts",
    )


FAMILIES = (
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        base="Glm4Model",
        read=read_glm4,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
        },
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
    ),
)
