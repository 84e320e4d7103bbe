"""Encoders like BERT with rotary positions: Nomic Embed, GTE, Snowflake's Arctic Embed 2 and Jina's v3 (2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.bert import DEFAULTS, ROBERTA, dense, post_normed
from penstock.engine_core.models.layer_spec import Body, RopeSpec
from penstock.engine_core.models.reading import ModelFile

# What published files of Nomic's own code say, and the one value that is served.
NOMIC: Mapping[str, Any] = {
    **dict.fromkeys(("prenorm", "parallel_block", "rotary_emb_interleaved", "use_rms_norm", "causal"), False),
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "num_experts": 0,
}


def read_nomic(file: ModelFile) -> Body:
    """Beyond the length of training positions would have to be stretched, which nobody asks for by config.json."""
    for key, served in NOMIC.items():
        if file.get(key) not in (None, served):
            raise file.error(key, f"Penstock serves {served!r} in this family")
    length = file.integer("max_position_embeddings")
    attention = file.attention(bidirectional=True, fused=True)
    found = post_normed(file, attention, file.mlp(), dense(file, "model.pooler.dense"), "classifier")
    return structs.replace(found, max_position=min(length, file.integer("max_trained_positions", length)))


def read_gte(file: ModelFile) -> Body:
    if file.get("layer_norm_type") not in (None, "layer_norm"):
        raise file.error("layer_norm_type", "Penstock serves layer_norm in this family")
    attention = file.attention(read_ntk(file), bidirectional=True, fused=True, qkv_bias=True, output_bias=True)
    activation = file.activation(served=("gelu", "gelu_tanh", "silu"))
    mlp = file.mlp(activation=activation, fused=True, up_first=True, down_bias=True)
    return post_normed(file, attention, mlp, dense(file, "model.pooler.dense"), "classifier")


def read_ntk(file: ModelFile) -> RopeSpec:
    """`ntk` raises the base and divides the frequencies (Su, 2023, "NTK-aware scaled RoPE", mixed by dimension)."""
    stretch = file.get("rope_scaling")
    if not isinstance(stretch, dict) or stretch.get("type") != "ntk":
        return file.rope()
    if stretch.get("mixed_b") is not None:
        raise file.error("rope_scaling", "Penstock serves ntk without mixed_b")
    factor = ConfigFile(file.path, stretch).number("factor", low=1.0)
    dim = file.integer("hidden_size") // file.integer("num_attention_heads")
    theta = file.number("rope_theta", 10000.0, low=2.0) * factor
    return RopeSpec(kind="linear", theta=theta, factor=factor ** (2 / dim))


def read_jina(file: ModelFile) -> Body:
    attention = file.attention(bidirectional=True, fused=True, qkv_bias=True, output_bias=True)
    activation = file.activation(served=("gelu", "gelu_tanh"))
    mlp = file.mlp(activation=activation, gated=False, bias=True)
    return post_normed(file, attention, mlp, dense(file, "classifier.dense"), "classifier.out_proj")


EMBEDDINGS = (
    ("embed_tokens", "embeddings.word_embeddings"),
    ("embed_types", "embeddings.token_type_embeddings"),
    ("embed_norm", "emb_ln"),
    ("model.layers.", "model.encoder.layers."),
    ("post_attention_layernorm", "norm1"),
    ("output_layernorm", "norm2"),
)
GTE_NAMES = (
    *EMBEDDINGS[:2],
    ("embed_norm", "embeddings.LayerNorm"),
    ("model.layers.", "model.encoder.layer."),
    ("self_attn.", "attention."),
    ("gate_up_proj", "up_gate_proj"),
    ("post_attention_layernorm", "attn_ln"),
    ("output_layernorm", "mlp_ln"),
)
GTE: Mapping[str, Any] = {
    **DEFAULTS,
    "vocab_size": 250048,
    "type_vocab_size": 1,
    "max_position_embeddings": 8192,
    "rope_theta": 160000.0,
}
FAMILIES = (
    Family(
        name="nomic_bert",
        architecture="NomicBertForMaskedLM",
        read=read_nomic,
        defaults={**DEFAULTS, "hidden_act": "silu", "max_position_embeddings": 2048, "rope_theta": 1000.0},
        keys={
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
            "rotary_emb_base": "rope_theta",
        },
        names=(
            *EMBEDDINGS,
            ("self_attn.qkv_proj", "attn.Wqkv"),
            ("self_attn.o_proj", "attn.out_proj"),
            ("mlp.up_proj", "mlp.fc11"),
            ("mlp.gate_proj", "mlp.fc12"),
            ("mlp.down_proj", "mlp.fc2"),
        ),
        ignored=(
            *("rotary_scaling_factor", "summary_activation", "scale_attn_weights", "fused_bias_fc"),
            *("fused_dropout_add_ln", "position_embedding_type"),
        ),
        published_code=True,
    ),
    Family(
        name="gte",
        architecture="GteForMaskedLM",
        read=read_gte,
        defaults=GTE,
        names=GTE_NAMES,
        ignored=("position_embedding_type",),
        published_code=True,
    ),
    Family(
        name="new",
        architecture="NewForMaskedLM",
        read=read_gte,
        defaults={**GTE, "rope_theta": 10000.0},
        names=GTE_NAMES,
        ignored=("position_embedding_type",),
        published_code=True,
    ),
    Family(
        name="jina_embeddings_v3",
        architecture="JinaEmbeddingsV3ForMaskedLM",
        read=read_jina,
        defaults={**ROBERTA, "vocab_size": 250002, "max_position_embeddings": 8194, "rope_theta": 20000.0,
                  "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        names=(
            *EMBEDDINGS,
            ("self_attn.qkv_proj", "mixer.Wqkv"),
            ("self_attn.o_proj", "mixer.out_proj"),
            ("mlp.up_proj", "mlp.fc1"),
            ("mlp.down_proj", "mlp.fc2"),
        ),
    ),
)  # fmt: skip
