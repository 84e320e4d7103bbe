"""gpt-oss (OpenAI, 2025)."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, GateSpec
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    """Every second layer sees all keys. Each head has a sink. Shares of experts are the softmax of the chosen ones'
    logits."""
    file.activation()
    bias = file.flag("attention_bias", True)
    full = file.attention(qkv_bias=bias, output_bias=bias, sinks=True)
    experts = file.experts("num_local_experts", "intermediate_size", normalised=True)
    if file.integer("experts_per_token", chosen := experts.routing.chosen) != chosen:
        raise file.error("experts_per_token", f"num_experts_per_tok is {chosen}")
    gate = GateSpec(slope=file.number("swiglu_alpha", 1.702), limit=file.number("swiglu_limit", 7.0), shift=1.0)
    experts = structs.replace(
        experts, gate=gate, bias=True, router_bias=True, stacked=True, transposed=True, interleaved=True
    )
    return file.body(file.windowed(full, slides=lambda layer: layer % 2 == 0), experts)


FAMILIES = (
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        read=read,
        defaults={
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        names=(("mlp.gate.", "mlp.router."),),
        ignored=("initial_context_length",),
    ),
)
