"""OLMo 2 (2024), Olmo 3 (2025) and OLMoE (Muennighoff et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, NormNames
from penstock.engine_core.models.reading import ModelFile

BEHIND = NormNames(
    attention_input="",
    attention_output="post_attention_layernorm",
    mlp_input="",
    mlp_output="post_feedforward_layernorm",
)


def read_olmo2(file: ModelFile) -> Body:
    """Queries and keys are normed over their whole width."""
    return file.body(file.attention(bias="attention_bias", qk_norm="width"), file.mlp(), norms=BEHIND)


def read_olmo3(file: ModelFile) -> Body:
    """Every fourth layer sees all keys, by positions that may be stretched."""
    full, sliding = (file.attention(rope, bias="attention_bias", qk_norm="width") for rope in file.ropes())
    return file.body(file.windowed(full, sliding, slides=lambda layer: (layer + 1) % 4), file.mlp(), norms=BEHIND)


def read_olmoe(file: ModelFile) -> Body:
    file.activation()
    experts = file.experts("num_experts", "intermediate_size", normalised=file.flag("norm_topk_prob"))
    return file.body(file.attention(bias="attention_bias", qk_norm="width"), experts)


DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = (
    Family(
        name="olmo2",
        architecture="Olmo2ForCausalLM",
        read=read_olmo2,
        defaults=DEFAULTS,
    ),
    Family(
        name="olmo3",
        architecture="Olmo3ForCausalLM",
        read=read_olmo3,
        defaults={**DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    Family(
        name="olmoe",
        architecture="OlmoeForCausalLM",
        read=read_olmoe,
        defaults={**DEFAULTS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    ),
)
