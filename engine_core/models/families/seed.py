"""Seed-OSS (ByteDance, 2025)."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import alike, read_attention, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    attention = read_attention(
        file, qkv_bias=file.flag("attention_bias", True), output_bias=file.flag("attention_out_bias")
    )
    return Body(layers=alike(file, attention, read_mlp(file, bias=file.flag("mlp_bias")), read_norm(file)))


FAMILIES = (
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        base="SeedOssModel",
        read=read,
        defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    ),
)
