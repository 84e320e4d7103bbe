"""InternLM3 (Shanghai AI Laboratory, 2025)."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    """Published files name the biases otherwise than transformers does."""
    bias = file.flag("bias", file.flag("mlp_bias"))
    attention = file.attention(qkv_bias=file.flag("qkv_bias", file.flag("attention_bias")), output_bias=bias)
    return file.body(attention, file.mlp(bias=bias))


FAMILIES = (
    Family(
        name="internlm3",
        architecture="InternLM3ForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128},
        published_code=True,
    ),
)
