"""EXAONE 4 (LG AI Research, 2025): norms behind each part, and no positions where all keys are seen; K-EXAONE (2025),
which has experts, and norms before each part."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.families.olmo import BEHIND
from penstock.engine_core.models.layer_spec import NO_ROPE, AttentionSpec, ExpertSpec, RoutingSpec
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    dense_first,
    read_attention,
    read_groups,
    read_kinds,
    read_layers,
    read_mlp,
    read_norm,
)


def read(file: ConfigFile) -> Body:
    return Body(layers=alike(file, attentions(file), read_mlp(file), read_norm(file), BEHIND))


def read_moe(file: ConfigFile) -> Body:
    """The first layers are dense. Layers behind the last one predict further tokens, and are left unread."""
    count = file.integer("num_experts", 64, high=4096)
    routing = RoutingSpec(
        chosen=file.integer("num_experts_per_tok", 8, high=count),
        scores="sigmoid",
        normalised=file.flag("norm_topk_prob", True),
        bias="e_score_correction_bias",
        scale=file.number("routed_scaling_factor", 2.5),
        **read_groups(file, count),
    )
    one, number = read_mlp(file, "moe_intermediate_size"), file.integer("num_shared_experts", 1)
    shared = structs.replace(one, width=number * one.width)
    experts = ExpertSpec(count=count, width=one.width, routing=routing, shared=shared, shared_name="shared_experts")
    mlps = [experts if sparse else read_mlp(file) for sparse in dense_first(file)]
    return Body(layers=alike(file, attentions(file), mlps, read_norm(file)), unread=("mtp.",))


def attentions(file: ConfigFile) -> list[AttentionSpec]:
    attention = read_attention(file, qk_norm="head")
    if file.get("sliding_window") is None:
        return [attention] * read_layers(file)
    turn = 1 if file.get("layer_types") is not None else file.integer("sliding_window_pattern", 4)
    kinds = read_kinds(file, (SLIDING if (layer + 1) % turn else FULL for layer in range(read_layers(file))))
    sliding = structs.replace(attention, window=file.integer("sliding_window"))
    return by_kind(kinds, structs.replace(attention, rope=NO_ROPE), sliding)


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
        wrappers=("Exaone4_5_ForConditionalGeneration",),
        texts=("exaone4_5_text",),
        ignored=("sliding_window_pattern", "layer_types"),
    ),
    Family(
        name="exaone_moe",
        architecture="ExaoneMoeForCausalLM",
        base="ExaoneMoeModel",
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
