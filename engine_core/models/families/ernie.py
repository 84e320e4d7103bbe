"""ERNIE 4.5 (Baidu, 2025), dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, MlpSpec, RoutingSpec
from penstock.engine_core.models.reading import alike, read_attention, read_layers, read_mlp, read_norm, read_rope


def attention(file: ConfigFile) -> AttentionSpec:
    bias = file.flag("use_bias")
    return read_attention(file, read_rope(file, interleaved=True), qkv_bias=bias, output_bias=bias)


def read_dense(file: ConfigFile) -> Body:
    return Body(layers=alike(file, attention(file), read_mlp(file, bias=file.flag("use_bias")), read_norm(file)))


def read_sparse(file: ConfigFile) -> Body:
    """Experts lie in every so many-th of the layers from one to another."""
    if file.flag("use_bias"):
        raise file.error("use_bias", "Penstock serves the family's models without biases (false)")
    layers = read_layers(file)
    first = file.integer("moe_layer_start_index", 1, low=0)
    last = file.integer("moe_layer_end_index", -1, low=-1)
    step = file.integer("moe_layer_interval", 1)
    dense, experts = read_mlp(file), read_experts(file)
    end = layers if last < 0 else last + 1
    mlps = [experts if first <= layer < end and (layer + 1) % step == 0 else dense for layer in range(layers)]
    return Body(layers=alike(file, attention(file), mlps, read_norm(file)))


def read_experts(file: ConfigFile) -> ExpertSpec:
    """A bias decides which are chosen; shares are their probabilities."""
    count, width = file.integer("moe_num_experts", 64, high=4096), file.integer("moe_intermediate_size", 1536)
    number = file.integer("moe_num_shared_experts", 2, low=0)
    file.number("moe_norm_min", 1e-12)  # below any sum of shares
    routing = RoutingSpec(
        chosen=file.integer("moe_k", 6, high=count),
        normalised=True,
        bias="moe_statics.e_score_correction_bias",
        bias_dims=2,
    )
    shared = MlpSpec(width=number * width) if number else None
    return ExpertSpec(count=count, width=width, routing=routing, shared=shared, shared_name="shared_experts")


DEFAULTS: Mapping[str, Any] = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
FAMILIES = (
    Family(
        name="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        base="Ernie4_5Model",
        read=read_dense,
        defaults={**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    ),
    Family(
        name="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        base="Ernie4_5_MoeModel",
        read=read_sparse,
        defaults={**DEFAULTS, "num_key_value_heads": 4},
        ignored=("moe_capacity", "moe_gate"),
        same=("moe_use_aux_free",),
    ),
)
