"""Hy 3 (Tencent, 2026)."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import ExpertSpec, RoutingSpec
from penstock.engine_core.models.reading import alike, dense_first, read_attention, read_layers, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    """The first layers are dense. Layers behind the last one predict further tokens, and are left unread."""
    bias, layers = file.flag("attention_bias"), read_layers(file)
    attention = read_attention(file, qkv_bias=bias, output_bias=bias, qk_norm="head")
    experts, mlp = read_experts(file), read_mlp(file, bias=file.flag("mlp_bias"))
    more = file.integer("num_nextn_predict_layers", 0, low=0, high=64)
    return Body(
        layers=alike(file, attention, [experts if sparse else mlp for sparse in dense_first(file)], read_norm(file)),
        unread=tuple(f"layers.{layer}." for layer in range(layers, layers + more)),
    )


def read_experts(file: ConfigFile) -> ExpertSpec:
    """As in DeepSeek-V3, under names of its own."""
    count = file.integer("num_experts", 192, high=4096)
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", 8, high=count),
        scores="sigmoid",
        normalised=True,
        bias="expert_bias",
        scale=file.number("router_scaling_factor", 2.826),
    )
    one, number = read_mlp(file, "moe_intermediate_size"), file.integer("num_shared_experts", 1)
    shared = structs.replace(one, width=number * one.width, bias=file.flag("mlp_bias"))
    return ExpertSpec(count=count, width=one.width, routing=routing, shared=shared, shared_name="shared_mlp")


FAMILIES = (
    Family(
        name="hy_v3",
        architecture="HYV3ForCausalLM",
        base="HYV3Model",
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
