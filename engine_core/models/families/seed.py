"""Seed-OSS (ByteDance, 2025)."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    attention = file.attention(qkv_bias=file.flag("attention_bias", True), output_bias=file.flag("attention_out_bias"))
    return file.body(attention, file.mlp(bias=file.flag("mlp_bias")))


FAMILIES = (
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    ),
)
