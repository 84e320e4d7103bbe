"""Llama (Touvron et al., 2023; Llama 3 herd, 2024), Llama 4 (2025), and the Code World Model (Meta, 2025)."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import NO_ROPE, Body, ExpertSpec
from penstock.engine_core.models.reading import FULL, ModelFile


def read(file: ModelFile) -> Body:
    refuse_windows(file)
    return file.body(file.attention(bias="attention_bias"), file.mlp(bias=file.flag("mlp_bias")))


def read_cwm(file: ModelFile) -> Body:
    """Every fourth layer sees all keys."""
    attentions = file.windowed(file.attention(), slides=lambda layer: layer % 4)
    return file.body(attentions, file.mlp(bias=file.flag("mlp_bias")))


def read_llama4(file: ModelFile) -> Body:
    """Layers with positions see the keys of their own chunk. A chunk is as long as Penstock serves: up to there these
    are all keys."""
    turned = file.attention(
        file.rope(interleaved=True), bias="attention_bias", qk_norm="unit" if file.flag("use_qk_norm", True) else "",
        qk_norm_turned=True,
    )  # fmt: skip
    rope = NO_ROPE
    if file.flag("attn_temperature_tuning", True):
        rope = structs.replace(
            NO_ROPE,
            temperature=file.number("attn_scale", 0.1),
            temperature_length=file.integer("floor_scale", 8192),
            temperature_shift=1,
        )
    still = structs.replace(turned, rope=rope, qk_norm="")
    has, layers = file.turned(), file.num_layers
    step = file.integer("interleave_moe_layer_step", 1, low=0)
    sparse = file.get("moe_layers")
    sparse = list(range(step - 1, layers, step)) if sparse is None else sparse
    if not isinstance(sparse, list) or not all(type(layer) is int and 0 <= layer < layers for layer in sparse):
        raise file.error("moe_layers", f"a list of layers, 0 to {layers - 1}, is expected")
    dense, experts = file.mlp("intermediate_size_mlp"), read_scaled_experts(file)
    length = file.integer("max_position_embeddings")
    return file.body(
        [turned if positions else still for positions in has],
        [experts if layer in sparse else dense for layer in range(layers)],
        max_position=min(length, file.integer("attention_chunk_size")) if any(has) else length,
    )


def read_scaled_experts(file: ModelFile) -> ExpertSpec:
    """A token's one expert reads it times the expert's share."""
    found = file.experts("num_local_experts", "intermediate_size", silent=(16, 1), scores="sigmoid", scales_inputs=True)
    if found.routing.chosen != 1:
        raise file.error("num_experts_per_tok", "Penstock serves one expert of a token (1) in this family")
    return structs.replace(found, stacked=True, transposed=True, shared=file.mlp())


def refuse_windows(file: ModelFile) -> None:
    """Raise ModelError for a window that engines disagree about: Llama's code in transformers reads none."""
    window, unused = file.get("sliding_window"), file.get("use_sliding_window") is False
    if window is not None and not unused and file.integer("sliding_window") < file.integer("max_position_embeddings"):
        raise file.error("sliding_window", "Llama models attend to all keys; null is expected")
    kinds = file.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        raise file.error("layer_types", "layers of Llama models are full_attention")


FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="cwm",
        architecture="CwmForCausalLM",
        read=read_cwm,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": 8192,
        },
        ignored=("attention_bias",),
    ),
    Family(
        name="llama4_text",
        architecture="Llama4ForCausalLM",
        read=read_llama4,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "attention_chunk_size": 8192,
            "intermediate_size_mlp": 16384,
        },
        wrappers=("Llama4ForConditionalGeneration",),
        names=(("mlp.gate.", "mlp.router."), ("mlp.", "feed_forward.")),
        ignored=("layer_types", "for_llm_compressor", "attn_scale", "floor_scale"),
    ),
)
