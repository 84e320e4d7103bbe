"""SmolLM 3 (Hugging Face, 2025): every fourth layer has no positions."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import NO_ROPE
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    read_attention,
    read_kinds,
    read_mlp,
    read_norm,
    read_turned,
)


def read(file: ConfigFile) -> Body:
    """Windows, where there are some, are those of layers without positions."""
    turned = read_turned(file)
    slides = file.flag("use_sliding_window") and file.get("sliding_window") is not None
    kinds = read_kinds(file, (FULL if has or not slides else SLIDING for has in turned))
    bias = file.flag("attention_bias")
    attention = read_attention(file, qkv_bias=bias, output_bias=bias)
    window = file.integer("sliding_window") if slides else 0
    layers = [
        structs.replace(attention, rope=attention.rope if has else NO_ROPE, window=window if kind == SLIDING else 0)
        for has, kind in zip(turned, kinds, strict=True)
    ]
    return Body(layers=alike(file, layers, read_mlp(file, bias=file.flag("mlp_bias")), read_norm(file)))


FAMILIES = (
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
        base="SmolLM3Model",
        read=read,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        ignored=("max_window_layers", "sliding_window"),
    ),
)
