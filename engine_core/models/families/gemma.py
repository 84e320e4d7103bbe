"""Gemma (2024), Gemma 2 (2024) and the text half of Gemma 3 (2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, NormNames, RopeSpec
from penstock.engine_core.models.reading import ModelFile

SANDWICH = NormNames(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)


def body(file: ModelFile, slides: Callable[[int], object], ropes: tuple[RopeSpec, RopeSpec], **options: Any) -> Body:
    """What both versions share. slides, ropes: as of `ModelFile.windowed` and `ropes`. options: of the attention of
    every layer."""
    cap, scale = file.number("attn_logit_softcapping", 0.0), file.number("query_pre_attn_scalar", low=1.0) ** -0.5
    full, sliding = (file.attention(rope, bias="attention_bias", scale=scale, softcap=cap, **options) for rope in ropes)
    window = file.integer("sliding_window")
    if options.get("bidirectional"):
        window = window // 2 + 1  # it counts both sides
    named = "hidden_act" if file.get("hidden_activation") is None else "hidden_activation"
    return file.body(
        file.windowed(full, structs.replace(sliding, window=window), slides=slides),
        file.mlp(activation=file.activation(named, ("gelu_tanh",))),
        file.norm(offset=1.0),
        SANDWICH,
        embedding_scale=file.integer("hidden_size") ** 0.5,
        logit_softcap=file.number("final_logit_softcapping", 0.0),
        max_position=file.integer("max_position_embeddings"),  # stretched already
    )


def read_gemma(file: ModelFile) -> Body:
    """Files of its first days name an activation that the models do not have: all are GeGLU by tanh."""
    attention = file.attention(bias="attention_bias")
    for key in ("hidden_act", "hidden_activation"):
        file.activation(key, ("gelu_tanh", "gelu"))
    mlp, scale = file.mlp(activation="gelu_tanh"), file.integer("hidden_size") ** 0.5
    return file.body(attention, mlp, file.norm(offset=1.0), embedding_scale=scale)


def read_gemma2(file: ModelFile) -> Body:
    """Every second layer sees all keys."""
    return body(file, lambda layer: layer % 2 == 0, (file.rope(), file.rope()))


def read_gemma3(file: ModelFile) -> Body:
    """Every sixth layer sees all keys, by positions of a larger base. EmbeddingGemma sees later
    keys, too."""
    turn, both = file.integer("sliding_window_pattern", 6), file.flag("use_bidirectional_attention")
    ropes = file.ropes("rope_local_base_freq")
    return body(file, lambda layer: (layer + 1) % turn, ropes, qk_norm="head", bidirectional=both)


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
