"""Falcon-H1 (TII, 2025): attention and Mamba-2 side by side in each layer, with multipliers in many places."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.bamba import SIZES, read_mamba
from penstock.engine_core.models.layer_spec import Body, LayerSpec, NormNames
from penstock.engine_core.models.reading import ModelFile

LEAST = 1e-9  # of a multiplier
BIASES = ("attention_bias", "mlp_bias", "projectors_bias")


def read_multipliers(file: ModelFile, key: str, count: int) -> tuple[float, ...]:
    """A list of numbers above 0; ones where the file is silent."""
    found = file.get(key)
    if found is None:
        return (1.0,) * count
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(type(one) in (int, float) and LEAST <= one < float("inf") for one in found)
    ):
        raise file.error(key, f"a list of {count} numbers above 0 is expected")
    return tuple(map(float, found))


def read_falcon_h1(file: ModelFile) -> Body:
    """Products have no biases, so what attention reads may be multiplied behind it: keys and queries in the scores'
    scale, values in the result's. Likewise silu(m x) is m times a silu of slope m."""
    for name in BIASES:
        if file.flag(name):
            raise file.error(name, "Penstock serves this family without biases of these products")
    key, before, behind, ssm_before, ssm_behind, embedding, head = (
        file.number(f"{name}_multiplier", 1.0, low=LEAST)
        for name in ("key", "attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head")
    )
    gate, down = read_multipliers(file, "mlp_multipliers", 2)
    attention, norm = file.attention(), file.norm(default=1e-5)
    inner = file.get("mamba_d_ssm")
    mamba = structs.replace(
        read_mamba(file, 0 if inner is None else file.integer("mamba_d_ssm")),
        norm=("plain" if file.flag("mamba_norm_before_gate", True) else "gated") if file.flag("mamba_rms_norm") else "",
        scales=tuple(ssm_before * scale for scale in read_multipliers(file, "ssm_multipliers", 5)),
    )
    layer = LayerSpec(
        attention=structs.replace(attention, scale=attention.head_dim**-0.5 * before * before * key),
        recurrence=mamba,
        mixer_scales=(before * behind, ssm_behind),
        mlp=file.mlp(slope=gate),
        norm=norm,
        norms=NormNames(mlp_input="pre_ff_layernorm"),
    )
    return Body(
        layers=(layer,) * file.num_layers, residual_scale=gate * down, embedding_scale=embedding, logit_scale=head
    )


FAMILIES = (
    Family(
        name="falcon_h1",
        architecture="FalconH1ForCausalLM",
        read=read_falcon_h1,
        defaults={**SIZES, "max_position_embeddings": 8192, "num_key_value_heads": 8, "mamba_d_ssm": 1024},
        names=(("model.norm.", "model.final_layernorm."), ("mlp.", "feed_forward.")),
        ignored=("mamba_chunk_size", "mamba_expand", "mamba_norm_before_gate", "mamba_use_mlp"),
    ),
)
