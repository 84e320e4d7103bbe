"""LFM2 (Liquid AI, 2025), dense and with experts: most layers are short convolutions between two gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, ExpertSpec, MlpSpec, NormNames
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.recurrence_spec import ShortConvolutionSpec

CONV = "conv"
NORMS = NormNames(attention_input="operator_norm", mlp_input="ffn_norm")


def attending(file: ModelFile) -> list[bool]:
    """Whether each layer attends: `layer_types`, or the numbers of those that do, or all."""
    layers, found = file.num_layers, file.get("full_attn_idxs")
    numbers = list(range(layers)) if found is None or file.get("layer_types") is not None else found
    if not isinstance(numbers, list) or not all(type(one) is int and 0 <= one < layers for one in numbers):
        raise file.error("full_attn_idxs", f"a list of layers, 0 to {layers - 1}, is expected")
    return file.attending(CONV, lambda layer: layer not in numbers)


def read_hybrid(file: ModelFile, mlps: MlpSpec | list[MlpSpec | ExpertSpec]) -> Body:
    """Attention and convolutions with these MLPs."""
    attention, norm = file.attention(qk_norm="head"), file.norm("norm_eps", 1e-5)
    width, bias = file.integer("conv_L_cache", low=2, high=4), file.flag("conv_bias")
    convolution = ShortConvolutionSpec(channels=file.integer("hidden_size"), width=width, bias=bias)
    if (tied := file.get("tie_embedding")) is not None and tied != file.flag("tie_word_embeddings"):
        raise file.error("tie_embedding", "tie_word_embeddings says otherwise, and Penstock follows no one of both")
    return file.body([attention if own else convolution for own in attending(file)], mlps, norm, NORMS)


def read_lfm2(file: ModelFile) -> Body:
    """Where `block_auto_adjust_ff_dim` is true the MLP's width is two thirds of what the file has, rounded up."""
    width = file.integer("intermediate_size" if file.get("block_ff_dim") is None else "block_ff_dim")
    step, factor = file.integer("block_multiple_of"), file.get("block_ffn_dim_multiplier")
    if file.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(file.number("block_ffn_dim_multiplier") * width) // step) * step
    return read_hybrid(file, MlpSpec(width=width))


def read_lfm2_moe(file: ModelFile) -> Body:
    """The first layers have one MLP."""
    experts = file.experts(
        "num_experts", "moe_intermediate_size", scores="sigmoid", normalised=file.flag("norm_topk_prob"),
        bias="expert_bias" if file.flag("use_expert_bias") else "", scale=file.number("routed_scaling_factor"),
    )  # fmt: skip
    return read_hybrid(file, file.dense_until(file.integer("num_dense_layers", low=0), experts))


COMMON: Mapping[str, Any] = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
NAMES = (
    ("model.norm.", "model.embedding_norm."),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("mlp.", "feed_forward."),
    ("gate_proj", "w1"),
    ("up_proj", "w3"),
    ("down_proj", "w2"),
)
IGNORED = ("block_norm_eps", "conv_dim", "conv_dim_out", "conv_use_xavier_init")
SAME = ("block_use_swiglu",)
FAMILIES = (
    Family(
        name="lfm2",
        architecture="Lfm2ForCausalLM",
        read=read_lfm2,
        defaults={**COMMON, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
                  "block_auto_adjust_ff_dim": True},
        names=NAMES,
        ignored=IGNORED,
        same=SAME,
    ),
    Family(
        name="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        read=read_lfm2_moe,
        defaults={**COMMON, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
                  "moe_intermediate_size": 1792, "use_expert_bias": True, "norm_topk_prob": True,
                  "routed_scaling_factor": 1.0},
        names=NAMES,
        ignored=IGNORED,
        same=SAME,
    ),
)  # fmt: skip
