"""Qwen3-Next (2025), Qwen 3.5 and 3.6 (2026): three layers of Gated DeltaNet to each of gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import ExpertSpec, LayerSpec, MlpSpec, MtpNames, MtpSpec, RoutingSpec
from penstock.engine_core.models.reading import (
    FULL,
    read_activation,
    read_attention,
    read_layers,
    read_mlp,
    read_norm,
    read_rope,
    sparse_layers,
)
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec

LINEAR = "linear_attention"
HEAD = MtpNames(
    place="mtp.", block="layers.0.", embedding_norm="pre_fc_norm_embedding", state_norm="pre_fc_norm_hidden",
    projection="fc", norm="norm", copies=(),
)  # fmt: skip


def read_linear(file: ConfigFile, *, fused: bool) -> GatedDeltaSpec:
    """Gated DeltaNet. fused: as of its spec."""
    keys, values = file.integer("linear_num_key_heads"), file.integer("linear_num_value_heads")
    if values % keys:
        raise file.error("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads ({keys})")
    read_activation(file)
    return GatedDeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=file.integer("linear_key_head_dim"),
        value_dim=file.integer("linear_value_head_dim"),
        width=file.integer("linear_conv_kernel_dim", low=2, high=4),
        fused=fused,
    )


def read_hybrid(file: ConfigFile, mlps: list[MlpSpec | ExpertSpec], *, fused: bool = False) -> Body:
    """Which layers attend follows `layer_types`, or is every so many-th. The head of multi-token prediction attends."""
    layers, found = read_layers(file), file.get("layer_types")
    turn = file.integer("full_attention_interval", 4)
    kinds = [LINEAR if (layer + 1) % turn else FULL for layer in range(layers)] if found is None else found
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, LINEAR) for kind in kinds):
        raise file.error("layer_types", f"it must name {FULL} or {LINEAR} for each of the {layers} layers")
    if FULL not in kinds:
        raise file.error("layer_types", "Penstock serves models of which at least one layer attends")
    bias = file.flag("attention_bias")
    attention = read_attention(
        file, read_rope(file, partial=0.25), qkv_bias=bias, output_bias=bias, qk_norm="head", gated=True,
        gate_in_queries=True,
    )  # fmt: skip
    linear, norm = read_linear(file, fused=fused), read_norm(file, offset=1.0)
    heads = file.integer("mtp_num_hidden_layers", 1, low=0, high=64)
    return Body(
        layers=tuple(
            LayerSpec(
                attention=attention if kind == FULL else None, recurrence=linear if kind == LINEAR else None,
                mlp=mlp, norm=norm,
            )
            for kind, mlp in zip(kinds, mlps, strict=True)
        ),
        unread=(HEAD.place,),
        mtp=MtpSpec(layer=LayerSpec(attention=attention, mlp=mlps[-1], norm=norm), names=HEAD) if heads else None,
    )  # fmt: skip


def read_experts(file: ConfigFile, *, normalised: bool) -> ExpertSpec:
    """Beside the experts there is one for all tokens, weighed by a gate of its own."""
    count = file.integer("num_experts", high=4096)
    routing = RoutingSpec(chosen=file.integer("num_experts_per_tok", high=count), normalised=normalised)
    shared = read_mlp(file, "shared_expert_intermediate_size")
    width = file.integer("moe_intermediate_size")
    return ExpertSpec(
        count=count, width=width, routing=routing, shared=shared, shared_gate=True
    )  # fmt: skip


def read_qwen3_next(file: ConfigFile) -> Body:
    """Experts in every layer, or in every so many-th."""
    layers = read_layers(file)
    dense, count = read_mlp(file), file.integer("num_experts", low=0, high=4096)
    if not count:
        return read_hybrid(file, [dense] * layers, fused=True)
    experts = read_experts(file, normalised=file.flag("norm_topk_prob", True))
    return read_hybrid(file, [experts if has else dense for has in sparse_layers(file, layers)], fused=True)


def read_qwen3_5(file: ConfigFile) -> Body:
    return read_hybrid(file, [read_mlp(file)] * read_layers(file))


def read_qwen3_5_moe(file: ConfigFile) -> Body:
    """Shares add up to one."""
    return read_hybrid(file, [read_experts(file, normalised=True)] * read_layers(file))


SIZES: Mapping[str, Any] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
IGNORED = ("mamba_ssm_dtype", "mlp_bias")
SAME = ("attn_output_gate",)
FAMILIES = (
    Family(
        name="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        base="Qwen3NextModel",
        read=read_qwen3_next,
        defaults={**SIZES, **EXPERTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
                  "decoder_sparse_step": 1},
        ignored=IGNORED,
        same=SAME,
    ),
    Family(
        name="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        base="Qwen3_5TextModel",
        read=read_qwen3_5,
        defaults={**SIZES, "num_key_value_heads": 4},
        wrappers=("Qwen3_5ForConditionalGeneration",),
        ignored=IGNORED,
        same=SAME,
    ),
    Family(
        name="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        base="Qwen3_5MoeTextModel",
        read=read_qwen3_5_moe,
        defaults={**SIZES, **EXPERTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
        wrappers=("Qwen3_5MoeForConditionalGeneration",),
        ignored=(*IGNORED, "intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"),
        same=SAME,
    ),
)  # fmt: skip
