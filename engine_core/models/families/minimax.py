"""MiniMax M2 (2025)."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import ExpertSpec, RoutingSpec
from penstock.engine_core.models.reading import (
    alike,
    read_activation,
    read_attention,
    read_layers,
    read_norm,
    read_rope,
)


def read(file: ConfigFile) -> Body:
    """Every layer has experts, and sees all keys."""
    read_activation(file)
    if file.get("scoring_func") not in (None, "sigmoid"):
        raise file.error("scoring_func", "Penstock serves sigmoid in this family")
    head_dim = file.integer("head_dim")
    turned = file.integer("rotary_dim", head_dim, low=2, high=head_dim)
    attention = read_attention(file, read_rope(file, partial=turned / head_dim), qk_norm="width")
    count = file.integer("num_local_experts", high=4096)
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", high=count),
        scores="sigmoid",
        normalised=True,
        bias="e_score_correction_bias",
    )
    experts = ExpertSpec(count=count, width=file.integer("intermediate_size"), routing=routing)
    return Body(layers=alike(file, attention, [experts] * read_layers(file), read_norm(file)))


FAMILIES = (
    Family(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        base="MiniMaxM2Model",
        read=read,
        defaults={
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        names=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
        ignored=("qk_norm_type", "layernorm_full_attention_beta"),
        same=("use_qk_norm", "use_routing_bias"),
    ),
)
