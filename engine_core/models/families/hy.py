"""Hy 3 (Tencent, 2026)."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    """Experts as in DeepSeek-V3, under names of their own. The first layers are dense. Layers behind the last one
    predict further tokens, and are left unread."""
    attention, mlp = file.attention(bias="attention_bias", qk_norm="head"), file.mlp(bias=file.flag("mlp_bias"))
    experts = file.experts(
        "num_experts", "moe_intermediate_size", silent=(192, 8), scores="sigmoid", normalised=True, bias="expert_bias",
        scale=file.number("router_scaling_factor", 2.826),
    )  # fmt: skip
    experts = file.with_shared(experts, file.integer("num_shared_experts", 1), "shared_mlp", bias=mlp.bias)
    mlps = [experts if sparse else mlp for sparse in file.dense_first()]
    return file.body(attention, mlps, unread=file.next_layers())


FAMILIES = (
    Family(
        name="hy_v3",
        architecture="HYV3ForCausalLM",
        read=read,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "moe_intermediate_size": 1536,
        },
        names=(("mlp.gate.", "mlp.router.gate."),),
        ignored=("enable_moe_fp32_combine",),
        same=("qk_norm", "use_qk_norm", "route_norm", "moe_router_enable_expert_bias", "moe_router_use_sigmoid"),
    ),
)
