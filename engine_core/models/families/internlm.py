"""InternLM3 (Shanghai AI Laboratory, 2025)."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import alike, read_attention, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    """Published files name the biases otherwise than transformers does."""
    bias = file.flag("bias", file.flag("mlp_bias"))
    attention = read_attention(file, qkv_bias=file.flag("qkv_bias", file.flag("attention_bias")), output_bias=bias)
    return Body(layers=alike(file, attention, read_mlp(file, bias=bias), read_norm(file)))


FAMILIES = (
    Family(
        name="internlm3",
        architecture="InternLM3ForCausalLM",
        base="InternLM3Model",
        read=read,
        defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128},
        published_code=True,
    ),
)
