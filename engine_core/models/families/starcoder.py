"""StarCoder 2 (Lozhkov et al., 2024): LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    bias = file.flag("use_bias", True)
    window = 0 if file.get("sliding_window") is None else file.integer("sliding_window")
    attention = file.attention(window=window, qkv_bias=bias, output_bias=bias)
    mlp = file.mlp(bias=bias, gated=False, activation=file.activation(served=("gelu_tanh",)))
    return file.body(attention, mlp, file.norm("norm_epsilon", 1e-5, centered=True))


FAMILIES = (
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True},
        names=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
        ignored=("mlp_type", "norm_type"),
    ),
)
