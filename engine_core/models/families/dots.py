"""dots.llm1 (rednote, 2025) and Solar Open (Upstage, 2025): experts as in DeepSeek-V3 behind plain attention."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.reading import SLIDING, ModelFile


def read_dots(file: ModelFile) -> Body:
    """The first layers are dense. Windows follow `layer_types`, or start at `max_window_layers`."""
    full = file.attention(bias="attention_bias", qk_norm="head")
    slides, first = file.get("sliding_window") is not None, file.integer("max_window_layers", 62, low=0)
    slid = file.kinds(SLIDING, lambda layer: slides and layer >= first)
    sliding = structs.replace(full, window=file.integer("sliding_window")) if slides else full
    experts = file.routed_experts(normalised=False)
    mlps = file.dense_until(file.integer("first_k_dense_replace", 0, low=0), experts)
    return file.body([sliding if own else full for own in slid], mlps)


def read_solar(file: ModelFile) -> Body:
    """Every layer has experts."""
    attention = file.attention(file.rope(partial=1.0), qkv_bias=file.flag("attention_bias"))
    return file.body(attention, file.routed_experts((128, 8)))


FAMILIES = (
    Family(
        name="dots1",
        architecture="Dots1ForCausalLM",
        read=read_dots,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "sliding_window": 4096},
        same=("use_qk_norm",),
    ),
    Family(
        name="solar_open",
        architecture="SolarOpenForCausalLM",
        read=read_solar,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "moe_intermediate_size": 1280,
        },
        ignored=("intermediate_size", "first_k_dense_replace"),
    ),
)
