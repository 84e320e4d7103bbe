"""Hunyuan (Tencent, 2025), dense and with experts: queries and keys are normed behind their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.config_file import ROPE_KEYS, ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, RopeSpec, RoutingSpec
from penstock.engine_core.models.reading import (
    LARGE,
    alike,
    read_attention,
    read_layers,
    read_mlp,
    read_norm,
    read_rope,
)


def attention(file: ConfigFile) -> AttentionSpec:
    bias = file.flag("attention_bias")
    return read_attention(file, read_raised(file), qkv_bias=bias, output_bias=bias, qk_norm="head", qk_norm_turned=True)


def read_raised(file: ConfigFile) -> RopeSpec:
    """Positions called dynamic with an `alpha` have a base that it raises once and for all."""
    settings = next((found for key in ROPE_KEYS if (found := file.get(key))), None)
    if not isinstance(settings, dict) or not settings.get("alpha"):
        return read_rope(file)
    rope = ConfigFile(file.path, settings)
    dim = file.integer("head_dim", file.integer("hidden_size") // file.integer("num_attention_heads"), low=4)
    theta = rope.number("rope_theta", file.number("rope_theta", 10000.0, low=2.0), low=2.0)
    return RopeSpec(theta=theta * rope.number("alpha", low=1.0, high=LARGE) ** (dim / (dim - 2)))


def read_dense(file: ConfigFile) -> Body:
    return Body(layers=alike(file, attention(file), read_mlp(file), read_norm(file)))


def read_sparse(file: ConfigFile) -> Body:
    """Every layer has experts, and one MLP of their width beside them."""
    layers, shared = read_layers(file), read_mlp(file)
    counts, chosen = (by_layer(file, key, layers) for key in ("num_experts", "moe_topk"))
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
    return Body(layers=alike(file, attention(file), mlps, read_norm(file)))


def by_layer(file: ConfigFile, key: str, layers: int) -> list[int]:
    """An integer for all layers, or one for each."""
    found = file.get(key)
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
        base="HunYuanDenseV1Model",
        read=read_dense,
        defaults=DEFAULTS,
        names=NAMES,
        same=("use_qk_norm",),
    ),
    Family(
        name="hunyuan_v1_moe",
        architecture="HunYuanMoEV1ForCausalLM",
        base="HunYuanMoEV1Model",
        read=read_sparse,
        defaults=DEFAULTS,
        names=(*NAMES, ("mlp.gate.", "mlp.gate.wg.")),
        same=("use_qk_norm",),
    ),
)
