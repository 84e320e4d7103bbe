"""Helium (Kyutai, 2025): a Llama whose rotary positions are interleaved."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import alike, read_attention, read_mlp, read_norm, read_rope


def read(file: ConfigFile) -> Body:
    rope = read_rope(file, interleaved=True)
    attention = read_attention(file, rope, qkv_bias=file.flag("attention_bias"))
    return Body(layers=alike(file, attention, read_mlp(file, bias=file.flag("mlp_bias")), read_norm(file)))


FAMILIES = (
    Family(
        name="helium",
        architecture="HeliumForCausalLM",
        base="HeliumModel",
        read=read,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 1e5},
    ),
)
