"""GLM 4 (Zhipu AI, 2024; 0414: 2025) and GLM 4.5 to 4.7 (2025), which have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, NormNames
from penstock.engine_core.models.reading import ModelFile

SANDWICH = NormNames(attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm")


def read_glm(file: ModelFile, norms: NormNames | None = None) -> Body:
    rope = file.rope(partial=0.5, interleaved=True)
    attention = file.attention(rope, qkv_bias=file.flag("attention_bias", True))
    return file.body(attention, file.mlp(fused=True), norms=norms)


def read_glm4(file: ModelFile) -> Body:
    return read_glm(file, SANDWICH)


def read_glm4_moe(file: ModelFile) -> Body:
    """The first layers are dense. Layers behind the last one predict further tokens; the first of them drafts."""
    attention = file.attention(
        file.rope(partial=0.5), qkv_bias=file.flag("attention_bias"),
        qk_norm="head" if file.flag("use_qk_norm") else "",
    )  # fmt: skip
    mlps = file.dense_until(file.integer("first_k_dense_replace", 1, low=0), file.routed_experts((128, 8)))
    return file.with_mtp(file.body(attention, mlps))


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
        read=read_glm,
        defaults=DEFAULTS,
    ),
    Family(
        name="glm4",
        architecture="Glm4ForCausalLM",
        read=read_glm4,
        defaults=DEFAULTS,
        wrappers=("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
        texts=("glm4v_text",),
    ),
    Family(
        name="glm4_moe",
        architecture="Glm4MoeForCausalLM",
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
