"""Qwen 2 and 2.5 (2024), and Qwen 3 (2025), each dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, LayerSpec, MlpSpec, RoutingSpec
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
    sparse_layers,
)


def read_qwen2(file: ConfigFile) -> Body:
    return Body(layers=alike(file, windowed(file, qkv_bias=True), read_mlp(file), read_norm(file)))


def read_qwen3(file: ConfigFile) -> Body:
    return Body(layers=alike(file, windowed(file, **normed(file)), read_mlp(file), read_norm(file)))


def read_qwen3_moe(file: ConfigFile) -> Body:
    """The window is every layer's."""
    attention = read_attention(file, **normed(file))
    if file.flag("use_sliding_window") and file.get("sliding_window") is not None:
        attention = structs.replace(attention, window=file.integer("sliding_window"))
    return Body(layers=alike(file, attention, read_experts(file), read_norm(file)))


def read_qwen3_vl_moe(file: ConfigFile) -> Body:
    """Shares add up to one whatever the file says."""
    body = read_qwen3_moe(file)

    def stacked(layer: LayerSpec) -> LayerSpec:
        if layer.experts is None:
            return layer
        routing = structs.replace(layer.experts.routing, normalised=True)
        return structs.replace(
            layer, mlp=structs.replace(layer.experts, routing=routing, stacked=True, transposed=True)
        )

    return structs.replace(body, layers=tuple(map(stacked, body.layers)))


def read_qwen2_moe(file: ConfigFile) -> Body:
    """Beside the experts there is one for all tokens, weighed by a gate of its own."""
    attention = read_attention(file, qkv_bias=file.flag("qkv_bias", True))
    layers, first = read_layers(file), file.integer("max_window_layers", 28, low=0)
    slides = file.flag("use_sliding_window")
    kinds = read_kinds(
        file, (SLIDING if slides and layer % 2 == 0 and layer < first else FULL for layer in range(layers))
    )
    sliding = structs.replace(attention, window=file.integer("sliding_window") if slides else 0)
    shared = read_mlp(file, "shared_expert_intermediate_size")
    mlps = read_experts(file, shared=shared, shared_gate=True)
    return Body(layers=alike(file, by_kind(kinds, attention, sliding), mlps, read_norm(file)))


def normed(file: ConfigFile) -> dict[str, Any]:
    """Qwen 3's options of attention."""
    bias = file.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": "head"}


def windowed(file: ConfigFile, **options: Any) -> list[AttentionSpec]:
    """Windows follow `layer_types`, or start at `max_window_layers`."""
    attention, layers = read_attention(file, **options), read_layers(file)
    if file.get("sliding_window") is None or not file.flag("use_sliding_window"):
        return [attention] * layers
    first = layers if file.get("layer_types") is not None else file.integer("max_window_layers", 28, low=0)
    kinds = read_kinds(file, (SLIDING if layer >= first else FULL for layer in range(layers)))
    sliding = structs.replace(attention, window=file.integer("sliding_window"))
    return by_kind(kinds, attention, sliding)


def read_experts(file: ConfigFile, **options: Any) -> list[MlpSpec | ExpertSpec]:
    """Experts or an MLP for each layer. options: of ExpertSpec."""
    dense, layers = read_mlp(file), read_layers(file)
    # Up to version 4 of transformers the key of Qwen 3 had a name of its own.
    count = file.integer("num_experts" if "num_experts" in file.values else "num_local_experts", low=0, high=4096)
    sparse = sparse_layers(file, layers)
    if not count:
        return [dense] * layers
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", high=count), normalised=file.flag("norm_topk_prob")
    )
    experts = ExpertSpec(count=count, width=file.integer("moe_intermediate_size"), routing=routing, **options)
    return [experts if has else dense for has in sparse]


NORMS = ("qk_norm", "use_qk_norm", "qk_layernorm")
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")  # unread where there are none
IGNORED = ("mlp_bias", *WINDOWS)
WINDOW: Mapping[str, Any] = {"max_position_embeddings": 32768, "sliding_window": 4096}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1}
FAMILIES = (
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        base="Qwen2Model",
        read=read_qwen2,
        defaults={**WINDOW, "num_key_value_heads": 32},
        wrappers=("Qwen2_5_VLForConditionalGeneration",),
        texts=("qwen2_5_vl_text",),
        ignored=(*IGNORED, "attention_bias"),
        same=("qkv_bias",),
    ),
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        base="Qwen2MoeModel",
        read=read_qwen2_moe,
        defaults={
            **WINDOW,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
        },
        ignored=IGNORED,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        base="Qwen3Model",
        read=read_qwen3,
        defaults={**WINDOW, "num_key_value_heads": 32, "head_dim": 128},
        wrappers=("Qwen3VLForConditionalGeneration",),
        texts=("qwen3_vl_text",),
        ignored=IGNORED,
        same=NORMS,
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        base="Qwen3MoeModel",
        read=read_qwen3_moe,
        defaults={**WINDOW, **EXPERTS, "num_key_value_heads": 4, "num_local_experts": 128},
        ignored=(*IGNORED, "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
        same=NORMS,
    ),
    Family(
        name="qwen3_vl_moe_text",
        architecture="Qwen3VLMoeForConditionalGeneration",
        base="Qwen3VLMoeTextModel",
        read=read_qwen3_vl_moe,
        defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 16,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "decoder_sparse_step": 1,
        },
        wrappers=("Qwen3VLMoeForConditionalGeneration",),
        ignored=IGNORED,
        same=NORMS,
    ),
)
