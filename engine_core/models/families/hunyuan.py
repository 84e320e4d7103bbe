"""Hunyuan (Tencent, 2025), dense and with experts: queries and keys are normed behind their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.config_file import ROPE_KEYS, ConfigFile
from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import AttentionSpec, Body, ExpertSpec, RopeSpec, RoutingSpec
from penstock.engine_core.models.reading import LARGE, ModelFile


def attention(file: ModelFile) -> AttentionSpec:
    return file.attention(read_raised(file), bias="attention_bias", qk_norm="head", qk_norm_turned=True)


def read_raised(file: ModelFile) -> RopeSpec:
    """Positions called dynamic with an `alpha` have a base that it raises once and for all."""
    settings = next((found for key in ROPE_KEYS if (found := file.get(key))), None)
    if not isinstance(settings, dict) or not settings.get("alpha"):
        return file.rope()
    rope = ConfigFile(file.path, settings)
    dim = file.integer("head_dim", file.integer("hidden_size") // file.integer("num_attention_heads"), low=4)
    theta = rope.number("rope_theta", file.number("rope_theta", 10000.0, low=2.0), low=2.0)
    return RopeSpec(theta=theta * rope.number("alpha", low=1.0, high=LARGE) ** (dim / (dim - 2)))


def read_dense(file: ModelFile) -> Body:
    return file.body(attention(file), file.mlp())


def read_sparse(file: ModelFile) -> Body:
    """Every layer has experts, and one MLP of their width beside them."""
    shared = file.mlp()
    counts, chosen = by_layer(file, "num_experts"), by_layer(file, "moe_topk")
    mlps = [
        ExpertSpec(
            count=count,
            width=shared.width,
            routing=RoutingSpec(chosen=number, normalised=True),
            shared=shared,
            shared_name="shared_mlp",
        )
        for count, number in zip(counts, chosen, strict=True)
    ]
    return file.body(attention(file), mlps)


def by_layer(file: ModelFile, key: str) -> list[int]:
    """An integer for all layers, or one for each."""
    found, layers = file.get(key), file.num_layers
    if not isinstance(found, list):
        return [file.integer(key, high=4096)] * layers
    if len(found) != layers or not all(type(one) is int and 1 <= one <= 4096 for one in found):
        raise file.error(key, f"an integer, or one for each of the {layers} layers is expected")
    return found


NAMES = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
DEFAULTS: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
FAMILIES = (
    Family(
        name="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        read=read_dense,
        defaults=DEFAULTS,
        names=NAMES,
        same=("use_qk_norm",),
    ),
    Family(
        name="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        read=read_sparse,
        defaults=DEFAULTS,
        names=(*NAMES, ("mlp.gate.", "mlp.gate.wg.")),
        same=("use_qk_norm",),
    ),
)
