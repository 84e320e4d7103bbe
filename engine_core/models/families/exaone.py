"""EXAONE 4 (LG AI Research, 2025): norms behind each part, and no positions where all keys are seen; K-EXAONE (2025),
which has experts, and norms before each part."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.olmo import BEHIND
from penstock.engine_core.models.layer_spec import NO_ROPE, AttentionSpec, Body
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    return file.body(attentions(file), file.mlp(), norms=BEHIND)


def read_moe(file: ModelFile) -> Body:
    """The first layers are dense. Layers behind the last one predict further tokens, and are left unread."""
    experts = file.experts(
        "num_experts", "moe_intermediate_size", silent=(64, 8), grouped=True, scores="sigmoid",
        normalised=file.flag("norm_topk_prob", True), bias="e_score_correction_bias",
        scale=file.number("routed_scaling_factor", 2.5),
    )  # fmt: skip
    experts = file.with_shared(experts, file.integer("num_shared_experts", 1))
    mlps = [experts if sparse else file.mlp() for sparse in file.dense_first()]
    return file.body(attentions(file), mlps, unread=("mtp.",))


def attentions(file: ModelFile) -> AttentionSpec | list[AttentionSpec]:
    attention = file.attention(qk_norm="head")
    if file.get("sliding_window") is None:
        return attention
    turn = 1 if file.get("layer_types") is not None else file.integer("sliding_window_pattern", 4)
    full = structs.replace(attention, rope=NO_ROPE)
    return file.windowed(full, attention, slides=lambda layer: (layer + 1) % turn)


FAMILIES = (
    Family(
        name="exaone4",
        architecture="Exaone4ForCausalLM",
        read=read,
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
        },
        wrappers=("Exaone4_5_ForConditionalGeneration",),
        texts=("exaone4_5_text",),
        ignored=("sliding_window_pattern", "layer_types"),
    ),
    Family(
        name="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        read=read_moe,
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "moe_intermediate_size": 1024,
        },
        ignored=("sliding_window_pattern", "layer_types", "scoring_func", "topk_method"),
    ),
)
