"""Mistral (Jiang et al., 2023), Mixtral, which has experts (Jiang et al., 2024), Ministral (2024) and 3 (2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ROPE_KEYS
from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import AttentionSpec, Body
from penstock.engine_core.models.reading import SLIDING, ModelFile


def read(file: ModelFile) -> Body:
    return file.body(windowed(file), file.mlp())


def read_ministral(file: ModelFile) -> Body:
    """Windows follow `layer_types`."""
    full, sliding, slides = file.attention(), windowed(file), file.get("sliding_window") is not None
    return file.body([sliding if own else full for own in file.kinds(SLIDING, lambda _: slides)], file.mlp())


def read_ministral3(file: ModelFile) -> Body:
    """Queries are scaled by their position."""
    if not any(isinstance(file.get(key), dict) for key in ROPE_KEYS):
        raise file.error("rope_parameters", "the positions of Ministral 3 are stretched; an object is expected")
    return read(file)


def windowed(file: ModelFile) -> AttentionSpec:
    """The window is every layer's."""
    found = file.attention()
    if file.get("sliding_window") is None:
        return found
    return structs.replace(found, window=file.integer("sliding_window"))


def read_mixtral(file: ModelFile) -> Body:
    file.activation()
    return file.body(windowed(file), file.experts("num_local_experts", "intermediate_size", normalised=True))


IGNORED = ("attention_bias", "mlp_bias", "use_sliding_window", "max_window_layers", "layer_types")
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
FAMILIES = (
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        read=read,
        defaults={**DEFAULTS, "sliding_window": 4096},
        wrappers=("Mistral3ForConditionalGeneration",),
        ignored=IGNORED,
    ),
    Family(
        name="ministral",
        architecture="MinistralForCausalLM",
        read=read_ministral,
        defaults={**DEFAULTS, "sliding_window": 4096},
        ignored=IGNORED,
    ),
    Family(
        name="ministral3",
        architecture="Ministral3ForCausalLM",
        read=read_ministral3,
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        wrappers=("Mistral3ForConditionalGeneration",),
        ignored=IGNORED,
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        read=read_mixtral,
        defaults={
            **DEFAULTS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        names=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")),
        ignored=IGNORED,
    ),
)
