"""Llama (Touvron et al., 2023; Llama 3 herd, 2024)."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import FULL, alike, read_attention, read_mlp, read_norm


def read(file: ConfigFile) -> Body:
    refuse_windows(file)
    bias = file.flag("attention_bias")
    attention = read_attention(file, qkv_bias=bias, output_bias=bias)
    return Body(layers=alike(file, attention, read_mlp(file, bias=file.flag("mlp_bias")), read_norm(file)))


def refuse_windows(file: ConfigFile) -> None:
    """Raise ModelError for a window that engines disagree about: Llama's code in transformers reads none."""
    window, unused = file.get("sliding_window"), file.get("use_sliding_window") is False
    if window is not None and not unused and file.integer("sliding_window") < file.integer("max_position_embeddings"):
        raise file.error("sliding_window", "Llama models attend to all keys; null is expected")
    kinds = file.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        raise file.error("layer_types", "layers of Llama models are full_attention")


FAMILIES = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        base="LlamaModel",
        read=read,
        defaults={"max_position_embeddings": 2048},
    ),
)
