"""Phi 3 (Abdin et al., 2024), Phi 4, which has the same class, and the text half of Phi 4 multimodal (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    window = 0 if file.get("sliding_window") is None else file.integer("sliding_window")
    attention = file.attention(file.rope(partial=1.0), window=window, fused=True)
    return file.body(attention, file.mlp(fused=True))


def read_multimodal(file: ModelFile) -> Body:
    """Adapters beside the matrices are for images and audio alone."""
    found = read(file)
    adapters = tuple(
        f"layers.{layer}.{module}.lora_"
        for layer in range(len(found.layers))
        for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    )
    return structs.replace(found, unread=("embed_tokens_extend.", *adapters))


SILENT: Mapping[str, Any] = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
IGNORED = ("attention_bias", "mlp_bias", "use_sliding_window")
FAMILIES = (
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ignored=IGNORED,
    ),
    Family(
        name="phi4_multimodal",
        architecture="Phi4MultimodalForCausalLM",
        read=read_multimodal,
        defaults=SILENT,
        ignored=IGNORED,
    ),
    Family(
        name="phi4mm",
        architecture="Phi4MMForCausalLM",
        read=read_multimodal,
        defaults=SILENT,
        names=(("_proj.weight", "_proj.base_layer.weight"),),
        ignored=IGNORED,
        published_code=True,
    ),
)
