"""Phi 3 (Abdin et al., 2024) and Phi 4, which has the same class."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.reading import alike, read_attention, read_mlp, read_norm, read_rope


def read(file: ConfigFile) -> Body:
    window = 0 if file.get("sliding_window") is None else file.integer("sliding_window")
    attention = read_attention(file, read_rope(file, partial=1.0), window=window, fused=True)
    return Body(layers=alike(file, attention, read_mlp(file, fused=True), read_norm(file)))


FAMILIES = (
    Family(
        name="phi3",
        architecture="Phi3ForCausalLM",
        base="Phi3Model",
        read=read,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ignored=("attention_bias", "mlp_bias", "use_sliding_window"),
    ),
)
