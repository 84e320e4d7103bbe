"""Helium (Kyutai, 2025): a Llama whose rotary positions are interleaved."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    attention = file.attention(file.rope(interleaved=True), qkv_bias=file.flag("attention_bias"))
    return file.body(attention, file.mlp(bias=file.flag("mlp_bias")))


FAMILIES = (
    Family(
        name="helium",
        architecture="HeliumForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 1e5},
    ),
)
