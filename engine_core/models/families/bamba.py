"""Bamba (IBM, Princeton, CMU and UIUC, 2024): layers of Mamba-2, and attention in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, NormNames
from penstock.engine_core.models.reading import ModelFile
from penstock.engine_core.models.recurrence_spec import MambaSpec


def read_mamba(file: ModelFile, inner: int = 0) -> MambaSpec:
    """Time steps have no limits, and the products no biases. inner: numbers in all inputs; 0: `mamba_expand` says."""
    file.activation()
    heads, groups = file.integer("mamba_n_heads"), file.integer("mamba_n_groups")
    inner = inner or file.integer("mamba_expand") * file.integer("hidden_size")
    if heads % groups:
        raise file.error("mamba_n_groups", f"it must divide mamba_n_heads ({heads})")
    if inner % heads or file.get("mamba_d_head") not in ("auto", inner // heads):
        raise file.error("mamba_d_head", f"heads must come to {inner} together, as mamba_d_ssm or mamba_expand says")
    if file.get("time_step_limit") not in (None, [0.0, {"__float__": "Infinity"}]):  # as transformers writes it
        raise file.error("time_step_limit", "Penstock serves this family without limits")
    if file.flag("mamba_proj_bias"):
        raise file.error("mamba_proj_bias", "Penstock serves this family without biases of these products")
    return MambaSpec(
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_dim=file.integer("mamba_d_state"),
        width=file.integer("mamba_d_conv", low=2, high=4),
        conv_bias=file.flag("mamba_conv_bias"),
    )


def read_bamba(file: ModelFile) -> Body:
    """Half of each head of attention is turned where the file is silent."""
    layers, found = file.num_layers, file.get("attn_layer_indices")
    if not isinstance(found, list) or not found or not all(type(one) is int and 0 <= one < layers for one in found):
        raise file.error("attn_layer_indices", f"a list of layers, 0 to {layers - 1}, is expected, at least one")
    attention = file.attention(file.rope(partial=0.5), bias="attention_bias")
    mamba, mlp = read_mamba(file), file.mlp(bias=file.flag("mlp_bias"))
    mixers = [attention if layer in found else mamba for layer in range(layers)]
    return file.body(mixers, mlp, norms=NormNames(mlp_input="pre_ff_layernorm"))


SIZES: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
FAMILIES = (
    Family(
        name="bamba",
        architecture="BambaForCausalLM",
        read=read_bamba,
        defaults={**SIZES, "max_position_embeddings": 262144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        names=(("model.norm.", "model.final_layernorm."), ("mlp.", "feed_forward.")),
        ignored=("mamba_chunk_size",),
    ),
)
