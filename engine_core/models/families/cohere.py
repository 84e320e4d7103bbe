"""Command R and R+ (Cohere, 2024), Command R7B and A (2025): attention and MLP beside each other, behind one norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import NO_ROPE, AttentionSpec, NormNames
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
    read_rope,
)


def attention(file: ConfigFile) -> AttentionSpec:
    bias = file.flag("attention_bias")
    return read_attention(file, read_rope(file, interleaved=True), qkv_bias=bias, output_bias=bias)


def body(file: ConfigFile, layers: list[AttentionSpec]) -> Body:
    norm = read_norm(file, "layer_norm_eps", 1e-5, centered=True, bias=False)
    made = alike(file, layers, read_mlp(file), norm, NormNames(mlp_input=""))
    return Body(
        layers=tuple(structs.replace(layer, parallel=True) for layer in made),
        logit_scale=file.number("logit_scale", 0.0625, low=1e-9),
        max_position=file.integer("max_position_embeddings"),
    )


def read_cohere(file: ConfigFile) -> Body:
    own = structs.replace(attention(file), qk_norm="heads" if file.flag("use_qk_norm") else "")
    return body(file, [own] * read_layers(file))


def read_cohere2(file: ConfigFile) -> Body:
    """Every fourth layer sees all keys, and has no positions."""
    if file.get("position_embedding_type") not in (None, "rope", "rope_gptj"):
        raise file.error("position_embedding_type", "rope_gptj is expected")
    turn = file.integer("sliding_window_pattern", 4)
    kinds = read_kinds(file, (SLIDING if (layer + 1) % turn else FULL for layer in range(read_layers(file))))
    found = attention(file)
    sliding = structs.replace(found, window=file.integer("sliding_window"))
    return body(file, by_kind(kinds, structs.replace(found, rope=NO_ROPE), sliding))


DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
SAME = ("use_gated_activation", "use_parallel_block", "use_embedding_sharing", "use_parallel_embedding")
FAMILIES = (
    Family(
        name="cohere",
        architecture="CohereForCausalLM",
        base="CohereModel",
        read=read_cohere,
        defaults=DEFAULTS,
        same=SAME,
    ),
    Family(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        base="Cohere2Model",
        read=read_cohere2,
        defaults={**DEFAULTS, "sliding_window": 4096},
        ignored=("layer_switch", "order_of_interleaved_layers"),
        same=SAME,
    ),
)
