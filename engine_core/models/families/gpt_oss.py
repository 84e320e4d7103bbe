"""gpt-oss (OpenAI, 2025)."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import ExpertSpec, GateSpec, RoutingSpec
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    read_activation,
    read_attention,
    read_kinds,
    read_layers,
    read_norm,
    read_rope,
)


def read(file: ConfigFile) -> Body:
    """Every second layer sees all keys. Each head has a sink."""
    read_activation(file)
    bias = file.flag("attention_bias", True)
    full = read_attention(file, read_rope(file), qkv_bias=bias, output_bias=bias, sinks=True)
    kinds = read_kinds(file, (FULL if layer % 2 else SLIDING for layer in range(read_layers(file))))
    layers = by_kind(kinds, full, structs.replace(full, window=file.integer("sliding_window")))
    return Body(layers=alike(file, layers, [read_experts(file)] * len(layers), read_norm(file)))


def read_experts(file: ConfigFile) -> ExpertSpec:
    """Shares are the softmax of the chosen experts' logits."""
    count = file.integer("num_local_experts", high=4096)
    chosen = file.integer("num_experts_per_tok", high=count)
    if file.integer("experts_per_token", chosen) != chosen:
        raise file.error("experts_per_token", f"num_experts_per_tok is {chosen}")
    return ExpertSpec(
        count=count,
        width=file.integer("intermediate_size"),
        routing=RoutingSpec(chosen=chosen, normalised=True),
        gate=GateSpec(slope=file.number("swiglu_alpha", 1.702), limit=file.number("swiglu_limit", 7.0), shift=1.0),
        bias=True,
        router_bias=True,
        stacked=True,
        transposed=True,
        interleaved=True,
    )


FAMILIES = (
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        base="GptOssModel",
        read=read,
        defaults={
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        names=(("mlp.gate.", "mlp.router."),),
        ignored=("initial_context_length",),
    ),
)
