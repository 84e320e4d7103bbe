"""EXAONE 4 (LG AI Research, 2025): norms behind each part, and no positions where all keys are seen."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.families.olmo import BEHIND
from penstock.engine_core.models.layer_spec import NO_ROPE
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    read_attention,
    read_kinds,
    read_layers,
    read_mlp,
    read_norm,
)


def read(file: ConfigFile) -> Body:
    attention, mlp, norm = read_attention(file, qk_norm="head"), read_mlp(file), read_norm(file)
    if file.get("sliding_window") is None:
        return Body(layers=alike(file, attention, mlp, norm, BEHIND))
    turn = 1 if file.get("layer_types") is not None else file.integer("sliding_window_pattern", 4)
    kinds = read_kinds(file, (SLIDING if (layer + 1) % turn else FULL for layer in range(read_layers(file))))
    sliding = structs.replace(attention, window=file.integer("sliding_window"))
    layers = by_kind(kinds, structs.replace(attention, rope=NO_ROPE), sliding)
    return Body(layers=alike(file, layers, mlp, norm, BEHIND))


FAMILIES = (
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        base="Exaone4Model",
        read=read,
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        ignored=("sliding_window_pattern", "layer_types"),
    ),
)
