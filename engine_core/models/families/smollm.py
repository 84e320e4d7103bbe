"""SmolLM 3 (Hugging Face, 2025): every fourth layer has no positions."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import NO_ROPE, Body
from penstock.engine_core.models.reading import SLIDING, ModelFile


def read(file: ModelFile) -> Body:
    """Windows, where there are some, are those of layers without positions."""
    turned = file.turned()
    slides = file.flag("use_sliding_window") and file.get("sliding_window") is not None
    slid = file.kinds(SLIDING, lambda layer: slides and not turned[layer])
    attention = file.attention(bias="attention_bias")
    window = file.integer("sliding_window") if slides else 0
    attentions = [
        structs.replace(attention, rope=attention.rope if has else NO_ROPE, window=window if own else 0)
        for has, own in zip(turned, slid, strict=True)
    ]
    return file.body(attentions, file.mlp(bias=file.flag("mlp_bias")))


FAMILIES = (
    Family(
        name="smollm3",
        architecture="SmolLM3ForCausalLM",
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
