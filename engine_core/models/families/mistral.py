"""Mistral (Jiang et al., 2023), Mixtral, which has experts (Jiang et al., 2024), Ministral (2024) and 3 (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ROPE_KEYS, ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, RoutingSpec
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
)


def read(file: ConfigFile) -> Body:
    return Body(layers=alike(file, windowed(file), read_mlp(file), read_norm(file)))


def read_ministral(file: ConfigFile) -> Body:
    """Windows follow `layer_types`."""
    full = read_attention(file)
    slides = file.get("sliding_window") is not None
    kinds = read_kinds(file, [SLIDING if slides else FULL] * read_layers(file))
    sliding = structs.replace(full, window=file.integer("sliding_window")) if slides else full
    return Body(layers=alike(file, by_kind(kinds, full, sliding), read_mlp(file), read_norm(file)))


def read_ministral3(file: ConfigFile) -> Body:
    """Queries are scaled by their position."""
    if not any(isinstance(file.get(key), dict) for key in ROPE_KEYS):
        raise file.error("rope_parameters", "the positions of Ministral 3 are stretched; an object is expected")
    return read(file)


def windowed(file: ConfigFile) -> AttentionSpec:
    """The window is every layer's."""
    found = read_attention(file)
    if file.get("sliding_window") is None:
        return found
    return structs.replace(found, window=file.integer("sliding_window"))


def read_mixtral(file: ConfigFile) -> Body:
    read_activation(file)
    count = file.integer("num_local_experts", high=4096)
    routing = RoutingSpec(chosen=file.integer("num_experts_per_tok", high=count), normalised=True)
    experts = ExpertSpec(count=count, width=file.integer("intermediate_size"), routing=routing)
    return Body(layers=alike(file, windowed(file), [experts] * read_layers(file), read_norm(file)))


IGNORED = ("attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers", "layer_types")
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
FAMILIES = (
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        base="MistralModel",
        read=read,
        defaults={**DEFAULTS, "sliding_window": 4096},
        wrappers=("Mistral3ForConditionalGeneration",),
        ignored=IGNORED,
    ),
    Family(
        name="ministral",
        architecture="MinistralForCausalLM",
        base="MinistralModel",
        read=read_ministral,
        defaults={**DEFAULTS, "sliding_window": 4096},
        ignored=IGNORED,
    ),
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        base="Ministral3Model",
        read=read_ministral3,
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        wrappers=("Mistral3ForConditionalGeneration",),
        ignored=IGNORED,
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        base="MixtralModel",
        read=read_mixtral,
        defaults={
            **DEFAULTS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        names=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
        ignored=IGNORED,
    ),
)
