"""Trinity (Arcee, 2025): attention with a gate behind it, and no positions where all keys are seen."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import NO_ROPE, ExpertSpec, NormNames, RoutingSpec
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
)

SANDWICH = NormNames(
    attention_output="post_attention_layernorm", mlp_input="pre_mlp_layernorm", mlp_output="post_mlp_layernorm"
)


def read(file: ConfigFile) -> Body:
    """The first layers are dense."""
    if file.flag("attention_bias"):
        raise file.error("attention_bias", "Penstock serves the family's models without biases (false)")
    turn, layers = file.integer("global_attn_every_n_layers", 4), read_layers(file)
    kinds = read_kinds(file, (SLIDING if (layer + 1) % turn else FULL for layer in range(layers)))
    attention = read_attention(file, qk_norm="head", gated=True)
    sliding = structs.replace(attention, window=file.integer("sliding_window"))
    dense, experts = file.integer("num_dense_layers", 1, low=0), read_experts(file)
    mlps = [read_mlp(file) if layer < dense else experts for layer in range(layers)]
    attentions = by_kind(kinds, structs.replace(attention, rope=NO_ROPE), sliding)
    return Body(
        layers=alike(file, attentions, mlps, read_norm(file), SANDWICH),
        embedding_scale=file.integer("hidden_size") ** 0.5 if file.flag("mup_enabled") else 1.0,
    )


def read_experts(file: ConfigFile) -> ExpertSpec:
    """As in DeepSeek-V3, under names of its own."""
    count = file.integer("num_experts", 64, high=4096)
    one, number = read_mlp(file, "moe_intermediate_size"), file.integer("num_shared_experts", 2)
    for key, served in (("score_func", "sigmoid"), ("route_norm", True)):
        if file.get(key) not in (None, served):
            raise file.error(key, f"Penstock serves {served} in this family")
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", 6, high=count),
        scores="sigmoid",
        normalised=True,
        bias="expert_bias",
        scale=file.number("route_scale", 1.0),
    )
    shared = structs.replace(one, width=number * one.width)
    return ExpertSpec(count=count, width=one.width, routing=routing, shared=shared, shared_name="shared_experts")


FAMILIES = (
    Family(
        name="afmoe",
        architecture="AfmoeForCausalLM",
        base="AfmoeModel",
        read=read,
        defaults={
            "max_position_embeddings": 16384,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "moe_intermediate_size": 1408,
        },
        names=(("mlp.gate.", "mlp.router.gate."),),
        ignored=("num_expert_groups", "num_limited_groups", "n_group", "topk_group", "load_balance_coeff"),
    ),
)
