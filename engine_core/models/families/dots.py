"""dots.llm1 (rednote, 2025) and Solar Open (Upstage, 2025): experts as in DeepSeek-V3 behind plain attention."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    read_attention,
    read_kinds,
    read_layers,
    read_mlp,
    read_norm,
    read_rope,
    read_routed_experts,
)


def read_dots(file: ConfigFile) -> Body:
    """The first layers are dense. Windows follow `layer_types`, or start at `max_window_layers`."""
    bias, layers = file.flag("attention_bias"), read_layers(file)
    full = read_attention(file, qkv_bias=bias, output_bias=bias, qk_norm="head")
    slides = file.get("sliding_window") is not None
    first = file.integer("max_window_layers", 62, low=0)
    kinds = read_kinds(file, (SLIDING if slides and layer >= first else FULL for layer in range(layers)))
    sliding = structs.replace(full, window=file.integer("sliding_window")) if slides else full
    experts = read_routed_experts(file, normalised=False)
    dense = file.integer("first_k_dense_replace", 0, low=0)
    mlps = [read_mlp(file) if layer < dense else experts for layer in range(layers)]
    return Body(layers=alike(file, by_kind(kinds, full, sliding), mlps, read_norm(file)))


def read_solar(file: ConfigFile) -> Body:
    """Every layer has experts."""
    attention = read_attention(file, read_rope(file, partial=1.0), qkv_bias=file.flag("attention_bias"))
    experts = read_routed_experts(file, count=128, chosen=8)
    return Body(layers=alike(file, attention, [experts] * read_layers(file), read_norm(file)))


FAMILIES = (
    Family(
        name="dots1",
        architecture="Dots1ForCausalLM",
        base="Dots1Model",
        read=read_dots,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096},
        same=("use_qk_norm",),
    ),
    Family(
        name="solar_open",
        architecture="SolarOpenForCausalLM",
        base="SolarOpenModel",
        read=read_solar,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "moe_intermediate_size": 1280,
        },
        ignored=("intermediate_size", "first_k_dense_replace"),
    ),
)
