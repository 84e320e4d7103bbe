"""DeepSeek-V2 and V3 (2024), R1 and V3.1 (2025), Moonlight and Kimi K2 (Moonshot AI, 2025), which are V3 by their
config.json, and GLM 4.7 Flash (Zhipu AI, 2026): experts behind latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import AttentionSpec, Body, ExpertSpec, LatentSpec
from penstock.engine_core.models.reading import LARGE, ModelFile


def read_latent_attention(file: ModelFile, *, interleaved: bool) -> AttentionSpec:
    """The inner norms are of 1e-6 whatever the file says of the others, as in transformers."""
    latent = LatentSpec(
        rank=file.integer("kv_lora_rank"),
        rope_dim=file.integer("qk_rope_head_dim"),
        nope_dim=file.integer("qk_nope_head_dim"),
        value_dim=file.integer("v_head_dim"),
        q_rank=0 if file.get("q_lora_rank") is None else file.integer("q_lora_rank"),
    )
    if latent.rope_dim % 2:
        raise file.error("qk_rope_head_dim", "numbers are turned in pairs")
    bias = file.flag("attention_bias")
    if bias and not latent.q_rank:
        raise file.error("attention_bias", "Penstock serves it false where q_lora_rank is null")
    rope = file.rope(interleaved=interleaved)
    if rope.kind == "longrope" or rope.temperature:
        raise file.error("rope_scaling", "Penstock serves latent attention without longrope and llama_4_scaling_beta")
    return AttentionSpec(
        heads=file.integer("num_attention_heads"),
        kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        rope=rope,
        scale=latent.query_dim**-0.5 * read_temperature(file, rope.kind) ** 2,
        qkv_bias=bias,
        output_bias=bias,
        latent=latent,
    )


def read_temperature(file: ModelFile, kind: str) -> float:
    """What queries and keys of stretched positions are multiplied with each: yarn's `mscale_all_dim`."""
    rope = ConfigFile(file.path, file.get("rope_scaling") or file.get("rope_parameters") or {})
    every = rope.number("mscale_all_dim", 0.0, high=LARGE)
    if kind == "default" or not every:
        return 1.0
    return 0.1 * every * math.log(rope.number("factor", low=1.0, high=LARGE)) + 1.0


def read_v2(file: ModelFile) -> Body:
    """Shares are probabilities that need not add up to one; groups count as much as their best expert."""
    experts = file.routed_experts(normalised=False)
    if experts.routing.normalised:
        raise file.error("norm_topk_prob", "Penstock serves it false in this family")
    method = file.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise file.error("topk_method", "greedy or group_limited_greedy is expected")
    routing = structs.replace(experts.routing, scores="softmax", bias="", group_best=1)
    if method == "greedy":
        routing = structs.replace(routing, groups=1, top_groups=1)
    return read_body(file, structs.replace(experts, routing=routing), scores="softmax", interleaved=True, dense=0)


def read_v3(file: ModelFile) -> Body:
    """Layers behind the last one predict further tokens; the first of them drafts."""
    if (method := file.get("topk_method")) not in (None, "noaux_tc"):
        raise file.error("topk_method", f"noaux_tc is expected, not {method}")
    interleaved = file.flag("rope_interleave", True)
    return read_body(file, file.routed_experts(), scores="sigmoid", interleaved=interleaved, dense=3)


def read_body(file: ModelFile, experts: ExpertSpec, *, scores: str, interleaved: bool, dense: int) -> Body:
    """dense: layers at the beginning without experts, where the file is silent."""
    if file.get("scoring_func") not in (None, scores):
        raise file.error("scoring_func", f"{scores} is expected in this family")
    mlps = [experts if one else file.mlp() for one in file.dense_first(dense)]
    return file.with_mtp(file.body(read_latent_attention(file, interleaved=interleaved), mlps))


V3: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
FAMILIES = (
    Family(
        name="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        read=read_v2,
        defaults={
            **V3,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
        },
        ignored=("head_dim", "qk_head_dim"),
        published_code=True,
    ),
    Family(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        read=read_v3,
        defaults=V3,
        ignored=("head_dim", "qk_head_dim"),
        published_code=True,
    ),
    Family(
        name="glm4_moe_lite",
        architecture="Glm4MoeLiteForCausalLM",
        read=read_v3,
        defaults={
            **V3,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 1536,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "first_k_dense_replace": 1,
        },
        ignored=("head_dim", "qk_head_dim"),
    ),
)
