"""MiniMax M2 (2025)."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    """Every layer has experts, and sees all keys."""
    file.activation()
    if file.get("scoring_func") not in (None, "sigmoid"):
        raise file.error("scoring_func", "Penstock serves sigmoid in this family")
    head_dim = file.integer("head_dim")
    turned = file.integer("rotary_dim", head_dim, low=2, high=head_dim)
    attention = file.attention(file.rope(partial=turned / head_dim), qk_norm="width")
    experts = file.experts(
        "num_local_experts", "intermediate_size", scores="sigmoid", normalised=True, bias="e_score_correction_bias"
    )
    return file.body(attention, experts)


FAMILIES = (
    Family(
        name="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
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
