"""Mellum 2 (JetBrains, 2026): Qwen 3's layers with experts, some with windows and positions of their own."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.families.qwen import normed
from penstock.engine_core.models.layer_spec import ExpertSpec, RoutingSpec
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    dense_first,
    read_attention,
    read_kinds,
    read_layers,
    read_mlp,
    read_norm,
    read_ropes,
)


def read(file: ConfigFile) -> Body:
    """A layer that predicts further tokens is left unread."""
    full, sliding = read_ropes(file)
    attention = read_attention(file, full, **normed(file))
    kinds = read_kinds(file, [FULL] * read_layers(file))
    window = file.integer("sliding_window") if SLIDING in kinds else 0
    attentions = by_kind(kinds, attention, structs.replace(attention, rope=sliding, window=window))
    count = file.integer("num_local_experts", high=4096)
    experts = ExpertSpec(
        count=count,
        width=file.integer("moe_intermediate_size"),
        routing=RoutingSpec(
            chosen=file.integer("num_experts_per_tok", high=count), normalised=file.flag("norm_topk_prob", True)
        ),
    )
    mlps = [experts if sparse else read_mlp(file) for sparse in dense_first(file)]
    return Body(layers=alike(file, attentions, mlps, read_norm(file)), unread=("mtp.",))


FAMILIES = (
    Family(
        name="mellum",
        architecture="MellumForCausalLM",
        base="MellumModel",
        read=read,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "first_k_dense_replace": 0,
            "rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}},
        },
        keys={"num_experts": "num_local_experts"},
        ignored=("sliding_window",),
    ),
)
