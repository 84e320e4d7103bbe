"""Mistral (Jiang et al., 2023) and Mixtral, which has experts (Jiang et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, RoutingSpec
from penstock.engine_core.models.reading import alike, read_activation, read_attention, read_layers, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    return Body(layers=alike(file, windowed(file), read_mlp(file), read_norm(file)))


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
