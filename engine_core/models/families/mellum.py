"""Mellum 2 (JetBrains, 2026): Qwen 3's layers with experts, some with windows and positions of their own."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.qwen import normed
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import FULL, SLIDING, ModelFile


def read(file: ModelFile) -> Body:
    """A layer that predicts further tokens is left unread."""
    full, sliding = file.ropes()
    attention = normed(file, full)
    slid = file.kinds(SLIDING, lambda _: False)
    windowed = structs.replace(attention, rope=sliding, window=file.integer("sliding_window") if any(slid) else 0)
    experts = file.experts("num_local_experts", "moe_intermediate_size", normalised=file.flag("norm_topk_prob", True))
    mlps = [experts if sparse else file.mlp() for sparse in file.dense_first()]
    return file.body([windowed if own else attention for own in slid], mlps, unread=("mtp.",))


FAMILIES = (
    Family(
        name="mellum",
        architecture="MellumForCausalLM",
        read=read,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "first_k_dense_replace": 0,
            "rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}},
        },
        keys={"num_experts": "num_local_experts"},
        ignored=("sliding_window",),
    ),
)
