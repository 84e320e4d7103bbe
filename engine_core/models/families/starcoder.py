"""StarCoder 2 (Lozhkov et al., 2024): LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import alike, read_activation, read_attention, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    bias = file.flag("use_bias", True)
    window = 0 if file.get("sliding_window") is None else file.integer("sliding_window")
    attention = read_attention(file, window=window, qkv_bias=bias, output_bias=bias)
    activation = read_activation(file, served=("gelu_tanh",))
    mlp = read_mlp(file, bias=bias, gated=False, activation=activation)
    return Body(layers=alike(file, attention, mlp, read_norm(file, "norm_epsilon", 1e-5, centered=True)))


FAMILIES = (
    Family(
        name="starcoder2",
        architecture="Starcoder2ForCausalLM",
        base="Starcoder2Model",
        read=read,
        defaults={"max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True},
        names=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
        ignored=("mlp_type", "norm_type"),
    ),
)
