"""Trinity (Arcee, 2025): attention with a gate behind it, and no positions where all keys are seen."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import NO_ROPE, Body, NormNames
from penstock.engine_core.models.reading import ModelFile

SANDWICH = NormNames(
    attention_output="post_attention_layernorm", mlp_input="pre_mlp_layernorm", mlp_output="post_mlp_layernorm"
)


def read(file: ModelFile) -> Body:
    """The first layers are dense. Experts are as in DeepSeek-V3, under names of their own."""
    if file.flag("attention_bias"):
        raise file.error("attention_bias", "Penstock serves the family's models without biases (false)")
    for key, served in (("score_func", "sigmoid"), ("route_norm", True)):
        if file.get(key) not in (None, served):
            raise file.error(key, f"Penstock serves {served} in this family")
    turn, attention = file.integer("global_attn_every_n_layers", 4), file.attention(qk_norm="head", gated=True)
    full = structs.replace(attention, rope=NO_ROPE)
    experts = file.experts(
        "num_experts", "moe_intermediate_size", silent=(64, 6), scores="sigmoid", normalised=True, bias="expert_bias",
        scale=file.number("route_scale", 1.0),
    )  # fmt: skip
    experts = file.with_shared(experts, file.integer("num_shared_experts", 2))
    return file.body(
        file.windowed(full, attention, slides=lambda layer: (layer + 1) % turn),
        file.dense_until(file.integer("num_dense_layers", 1, low=0), experts),
        norms=SANDWICH,
        embedding_scale=file.integer("hidden_size") ** 0.5 if file.flag("mup_enabled") else 1.0,
    )


FAMILIES = (
    Family(
        name="afmoe",
        architecture="AfmoeForCausalLM",
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
