"""ERNIE 4.5 (Baidu, 2025), dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import AttentionSpec, Body, ExpertSpec, MlpSpec
from penstock.engine_core.models.reading import ModelFile


def attention(file: ModelFile) -> AttentionSpec:
    return file.attention(file.rope(interleaved=True), bias="use_bias")


def read_dense(file: ModelFile) -> Body:
    return file.body(attention(file), file.mlp(bias=file.flag("use_bias")))


def read_sparse(file: ModelFile) -> Body:
    """Experts lie in every so many-th of the layers from one to another."""
    if file.flag("use_bias"):
        raise file.error("use_bias", "Penstock serves the family's models without biases (false)")
    layers = file.num_layers
    first = file.integer("moe_layer_start_index", 1, low=0)
    last = file.integer("moe_layer_end_index", -1, low=-1)
    step = file.integer("moe_layer_interval", 1)
    dense, experts = file.mlp(), read_experts(file)
    end = layers if last < 0 else last + 1
    mlps = [experts if first <= layer < end and (layer + 1) % step == 0 else dense for layer in range(layers)]
    return file.body(attention(file), mlps)


def read_experts(file: ModelFile) -> ExpertSpec:
    """A bias decides which are chosen; shares are their probabilities."""
    file.number("moe_norm_min", 1e-12)  # below any sum of shares
    found = file.experts(
        "moe_num_experts", "moe_intermediate_size", "moe_k", silent=(64, 6), normalised=True,
        bias="moe_statics.e_score_correction_bias", bias_dims=2,
    )  # fmt: skip
    number = file.integer("moe_num_shared_experts", 2, low=0)
    shared = MlpSpec(width=number * found.width) if number else None
    return structs.replace(found, shared=shared, shared_name="shared_experts")


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
        read=read_dense,
        defaults={**DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    ),
    Family(
        name="ernie4_5_moe",
        architecture="Ernie4_5_MoeForCausalLM",
        read=read_sparse,
        defaults={**DEFAULTS, "num_key_value_heads": 4, "moe_intermediate_size": 1536},
        ignored=("moe_capacity", "moe_gate"),
        same=("moe_use_aux_free",),
    ),
)
