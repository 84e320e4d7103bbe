"""Qwen3-Next (2025), Qwen 3.5 and 3.6 (2026): three layers of Gated DeltaNet to each of gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, ExpertSpec, LayerSpec, MlpSpec, MtpNames, MtpSpec
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.recurrence_spec import GatedDeltaSpec

LINEAR = "linear_attention"
HEAD = MtpNames(
    place="mtp.", block="layers.0.", embedding_norm="pre_fc_norm_embedding", state_norm="pre_fc_norm_hidden",
    projection="fc", norm="norm", copies=(),
)  # fmt: skip


def read_linear(file: ModelFile, *, fused: bool) -> GatedDeltaSpec:
    """Gated DeltaNet. fused: as of its spec."""
    keys, values = file.integer("linear_num_key_heads"), file.integer("linear_num_value_heads")
    if values % keys:
        raise file.error("linear_num_value_heads", f"it must be a multiple of linear_num_key_heads ({keys})")
    file.activation()
    return GatedDeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=file.integer("linear_key_head_dim"),
        value_dim=file.integer("linear_value_head_dim"),
        width=file.integer("linear_conv_kernel_dim", low=2, high=4),
        fused=fused,
    )


def read_hybrid(
    file: ModelFile, mlps: MlpSpec | ExpertSpec | list[MlpSpec | ExpertSpec], *, fused: bool = False
) -> Body:
    """Which layers attend follows `layer_types`, or is every so many-th. The head of multi-token prediction attends."""
    turn = file.integer("full_attention_interval", 4)
    attends = file.attending(LINEAR, lambda layer: (layer + 1) % turn)
    attention = file.attention(
        file.rope(partial=0.25), bias="attention_bias", qk_norm="head", gated=True, gate_in_queries=True
    )
    linear, norm = read_linear(file, fused=fused), file.norm(offset=1.0)
    body = file.body([attention if own else linear for own in attends], mlps, norm, unread=(HEAD.place,))
    if not file.integer("mtp_num_hidden_layers", 1, low=0, high=64):
        return body
    head = LayerSpec(attention=attention, mlp=body.layers[-1].mlp, norm=norm)
    return structs.replace(body, mtp=MtpSpec(layer=head, names=HEAD))


def read_experts(file: ModelFile, *, normalised: bool) -> ExpertSpec:
    """Beside the experts there is one for all tokens, weighed by a gate of its own."""
    found = file.experts("num_experts", "moe_intermediate_size", normalised=normalised)
    return structs.replace(found, shared=file.mlp("shared_expert_intermediate_size"), shared_gate=True)


def read_qwen3_next(file: ModelFile) -> Body:
    """Experts in every layer, or in every so many-th."""
    dense = file.mlp()
    if not file.integer("num_experts", low=0, high=4096):
        return read_hybrid(file, dense, fused=True)
    experts = read_experts(file, normalised=file.flag("norm_topk_prob", True))
    return read_hybrid(file, [experts if has else dense for has in file.sparse_layers()], fused=True)


def read_qwen3_5(file: ModelFile) -> Body:
    return read_hybrid(file, file.mlp())


def read_qwen3_5_moe(file: ModelFile) -> Body:
    """Shares add up to one."""
    return read_hybrid(file, read_experts(file, normalised=True))


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
        read=read_qwen3_next,
        defaults={**SIZES, **EXPERTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
                  "decoder_sparse_step": 1},
        ignored=IGNORED,
        same=SAME,
    ),
    Family(
        name="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        read=read_qwen3_5,
        defaults={**SIZES, "num_key_value_heads": 4},
        wrappers=("Qwen3_5ForConditionalGeneration",),
        ignored=IGNORED,
        same=SAME,
    ),
    Family(
        name="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        read=read_qwen3_5_moe,
        defaults={**SIZES, **EXPERTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
        wrappers=("Qwen3_5MoeForConditionalGeneration",),
        ignored=(*IGNORED, "intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"),
        same=SAME,
    ),
)  # fmt: skip
