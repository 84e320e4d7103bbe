"""Qwen 2 and 2.5 (2024), and Qwen 3 (2025), each dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import AttentionSpec, Body, ExpertSpec, LayerSpec, MlpSpec, RopeSpec
from penstock.engine_core.models.reading import SLIDING, ModelFile


def read_qwen2(file: ModelFile) -> Body:
    return file.body(windowed(file, file.attention(qkv_bias=True)), file.mlp())


def read_qwen3(file: ModelFile) -> Body:
    return file.body(windowed(file, normed(file)), file.mlp())


def read_qwen3_moe(file: ModelFile) -> Body:
    """The window is every layer's."""
    attention = normed(file)
    if file.flag("use_sliding_window") and file.get("sliding_window") is not None:
        attention = structs.replace(attention, window=file.integer("sliding_window"))
    return file.body(attention, read_experts(file))


def read_qwen3_vl_moe(file: ModelFile) -> Body:
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


def read_qwen2_moe(file: ModelFile) -> Body:
    """Beside the experts there is one for all tokens, weighed by a gate of its own."""
    attention = file.attention(qkv_bias=file.flag("qkv_bias", True))
    first, slides = file.integer("max_window_layers", 28, low=0), file.flag("use_sliding_window")
    slid = file.kinds(SLIDING, lambda layer: slides and layer % 2 == 0 and layer < first)
    sliding = structs.replace(attention, window=file.integer("sliding_window") if slides else 0)
    mlps = read_experts(file, shared=file.mlp("shared_expert_intermediate_size"), shared_gate=True)
    return file.body([sliding if own else attention for own in slid], mlps)


def normed(file: ModelFile, rope: RopeSpec | None = None) -> AttentionSpec:
    """Qwen 3's attention."""
    return file.attention(rope, bias="attention_bias", qk_norm="head")


def windowed(file: ModelFile, attention: AttentionSpec) -> AttentionSpec | list[AttentionSpec]:
    """Windows follow `layer_types`, or start at `max_window_layers`."""
    if file.get("sliding_window") is None or not file.flag("use_sliding_window"):
        return attention
    first = 0 if file.get("layer_types") is not None else file.integer("max_window_layers", 28, low=0)
    return file.windowed(attention, slides=lambda layer: layer >= first)


def read_experts(file: ModelFile, **options: Any) -> list[MlpSpec | ExpertSpec]:
    """Experts or an MLP for each layer. options: of ExpertSpec."""
    # Up to version 4 of transformers the key of Qwen 3 had a name of its own.
    dense, key = file.mlp(), "num_experts" if "num_experts" in file.values else "num_local_experts"
    sparse = file.sparse_layers()
    if not file.integer(key, low=0, high=4096):
        return [dense] * len(sparse)
    experts = file.experts(key, "moe_intermediate_size", normalised=file.flag("norm_topk_prob"))
    experts = structs.replace(experts, **options)
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
        read=read_qwen3_moe,
        defaults={**WINDOW, **EXPERTS, "num_key_value_heads": 4, "num_local_experts": 128},
        ignored=(*IGNORED, "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
        same=NORMS,
    ),
    Family(
        name="qwen3_vl_moe_text",
        architecture="Qwen3VLMoeForConditionalGeneration",
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
