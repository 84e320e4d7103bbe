"""OLMo 2 (2024), Olmo 3 (2025) and OLMoE (Muennighoff et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, NormNames, RopeSpec, RoutingSpec
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
    read_ropes,
)

BEHIND = NormNames(
    attention_input="",
    attention_output="post_attention_layernorm",
    mlp_input="",
    mlp_output="post_feedforward_layernorm",
)


def attention(file: ConfigFile, rope: RopeSpec | None = None) -> AttentionSpec:
    """Queries and keys are normed over their whole width."""
    bias = file.flag("attention_bias")
    return read_attention(file, rope, qkv_bias=bias, output_bias=bias, qk_norm="width")


def read_olmo2(file: ConfigFile) -> Body:
    return Body(layers=alike(file, attention(file), read_mlp(file), read_norm(file), BEHIND))


def read_olmo3(file: ConfigFile) -> Body:
    """Every fourth layer sees all keys, by positions that may be stretched."""
    kinds = read_kinds(file, (FULL if layer % 4 == 3 else SLIDING for layer in range(read_layers(file))))
    full, sliding = (attention(file, rope) for rope in read_ropes(file))
    window = file.integer("sliding_window")
    layers = by_kind(kinds, full, structs.replace(sliding, window=window))
    return Body(layers=alike(file, layers, read_mlp(file), read_norm(file), BEHIND))


def read_olmoe(file: ConfigFile) -> Body:
    read_activation(file)
    count = file.integer("num_experts", high=4096)
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", high=count), normalised=file.flag("norm_topk_prob")
    )
    experts = ExpertSpec(count=count, width=file.integer("intermediate_size"), routing=routing)
    return Body(layers=alike(file, attention(file), [experts] * read_layers(file), read_norm(file)))


DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = (
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        base="Olmo2Model",
        read=read_olmo2,
        defaults=DEFAULTS,
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        base="Olmo3Model",
        read=read_olmo3,
        defaults={**DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        base="OlmoeModel",
        read=read_olmoe,
        defaults={**DEFAULTS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    ),
)
