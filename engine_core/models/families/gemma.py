"""Gemma (2024), Gemma 2 (2024) and the text half of Gemma 3 (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, NormNames, RopeSpec
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    read_activation,
    read_attention,
    read_kinds,
    read_layers,
    read_mlp,
    read_norm,
    read_rope,
    read_ropes,
)

SANDWICH = NormNames(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)


def body(file: ConfigFile, kinds: list[str], full: RopeSpec, sliding: RopeSpec, **options: Any) -> Body:
    """What both versions share. options: of the attention of every layer."""

    def attention(rope: RopeSpec) -> AttentionSpec:
        bias, cap = file.flag("attention_bias"), file.number("attn_logit_softcapping", 0.0)
        scale = file.number("query_pre_attn_scalar", low=1.0) ** -0.5
        return read_attention(file, rope, qkv_bias=bias, output_bias=bias, scale=scale, softcap=cap, **options)

    window = file.integer("sliding_window")
    if options.get("bidirectional"):
        window = window // 2 + 1  # it counts both sides
    windowed = structs.replace(attention(sliding), window=window)
    named = "hidden_act" if file.get("hidden_activation") is None else "hidden_activation"
    mlp = read_mlp(file, activation=read_activation(file, named, ("gelu_tanh",)))
    return Body(
        layers=alike(file, by_kind(kinds, attention(full), windowed), mlp, read_norm(file, offset=1.0), SANDWICH),
        embedding_scale=file.integer("hidden_size") ** 0.5,
        logit_softcap=file.number("final_logit_softcapping", 0.0),
        max_position=file.integer("max_position_embeddings"),  # stretched already
    )


def read_gemma(file: ConfigFile) -> Body:
    """Files of its first days name an activation that the models do not have: all are GeGLU by tanh."""
    bias = file.flag("attention_bias")
    attention = read_attention(file, qkv_bias=bias, output_bias=bias)
    for key in ("hidden_act", "hidden_activation"):
        read_activation(file, key, ("gelu_tanh", "gelu"))
    mlp = read_mlp(file, activation="gelu_tanh")
    return Body(
        layers=alike(file, attention, mlp, read_norm(file, offset=1.0)),
        embedding_scale=file.integer("hidden_size") ** 0.5,
    )


def read_gemma2(file: ConfigFile) -> Body:
    """Every second layer sees all keys."""
    kinds = read_kinds(file, (FULL if layer % 2 else SLIDING for layer in range(read_layers(file))))
    return body(file, kinds, read_rope(file), read_rope(file))


def read_gemma3(file: ConfigFile) -> Body:
    """Every sixth layer sees all keys, by positions of a larger base. EmbeddingGemma sees later
    keys, too."""
    turn = file.integer("sliding_window_pattern", 6)
    kinds = read_kinds(file, (SLIDING if (layer + 1) % turn else FULL for layer in range(read_layers(file))))
    both = file.flag("use_bidirectional_attention")
    return body(file, kinds, *read_ropes(file, "rope_local_base_freq"), qk_norm="head", bidirectional=both)


DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES = (
    Family(
        name="gemma",
        architecture="GemmaForCausalLM",
        base="GemmaModel",
        read=read_gemma,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 16,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        base="Gemma2Model",
        read=read_gemma2,
        defaults={
            **DEFAULTS,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        base="Gemma3TextModel",
        read=read_gemma3,
        defaults={
            **DEFAULTS,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "max_position_embeddings": 131072,
            "vocab_size": 262208,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        wrappers=("Gemma3ForConditionalGeneration",),
    ),
)
