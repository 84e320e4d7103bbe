"""Command R and R+ (Cohere, 2024), Command R7B and A (2025): attention and MLP beside each other, behind one norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import NO_ROPE, AttentionSpec, Body, NormNames
from penstock.engine_core.models.reading import ModelFile


def attention(file: ModelFile) -> AttentionSpec:
    return file.attention(file.rope(interleaved=True), bias="attention_bias")


def body(file: ModelFile, attentions: AttentionSpec | list[AttentionSpec]) -> Body:
    """What both versions share."""
    return file.body(
        attentions,
        file.mlp(),
        file.norm("layer_norm_eps", 1e-5, centered=True, bias=False),
        NormNames(mlp_input=""),
        parallel=True,
        logit_scale=file.number("logit_scale", 0.0625, low=1e-9),
        max_position=file.integer("max_position_embeddings"),
    )


def read_cohere(file: ModelFile) -> Body:
    return body(file, structs.replace(attention(file), qk_norm="heads" if file.flag("use_qk_norm") else ""))


def read_cohere2(file: ModelFile) -> Body:
    """Every fourth layer sees all keys, and has no positions."""
    if file.get("position_embedding_type") not in (None, "rope", "rope_gptj"):
        raise file.error("position_embedding_type", "rope_gptj is expected")
    turn, found = file.integer("sliding_window_pattern", 4), attention(file)
    full = structs.replace(found, rope=NO_ROPE)
    return body(file, file.windowed(full, found, slides=lambda layer: (layer + 1) % turn))


DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
SAME = ("use_gated_activation", "use_parallel_block", "use_embedding_sharing", "use_parallel_embedding")
FAMILIES = (
    Family(
        name="cohere",
        architecture="CohereForCausalLM",
        read=read_cohere,
        defaults=DEFAULTS,
        same=SAME,
    ),
    Family(
        name="cohere2",
        architecture="Cohere2ForCausalLM",
        read=read_cohere2,
        defaults={**DEFAULTS, "sliding_window": 4096},
        ignored=("layer_switch", "order_of_interleaved_layers"),
        same=SAME,
    ),
)
