"""Granite 3 (IBM, 2024), dense and with experts, and HyperCLOVA X SEED (NAVER, 2025), with norms behind its parts."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, ExpertSpec, LayerSpec, NormNames, RoutingSpec
from penstock.engine_core.models.reading import alike, read_activation, read_attention, read_layers, read_mlp, read_norm


def attention(file: ConfigFile) -> AttentionSpec:
    bias = file.flag("attention_bias")
    scale = file.number("attention_multiplier", 1.0, low=1e-9)
    return read_attention(file, qkv_bias=bias, output_bias=bias, scale=scale)


def body(file: ConfigFile, layers: tuple[LayerSpec, ...]) -> Body:
    return Body(
        layers=layers,
        residual_scale=file.number("residual_multiplier", 1.0),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logit_scale=1 / file.number("logits_scaling", 1.0, low=1e-9),
    )


def read_granite(file: ConfigFile) -> Body:
    return body(file, alike(file, attention(file), read_mlp(file, bias=file.flag("mlp_bias")), read_norm(file)))


def read_granitemoe(file: ConfigFile) -> Body:
    read_activation(file)
    count = file.integer("num_local_experts", 8, high=4096)
    routing = RoutingSpec(chosen=file.integer("num_experts_per_tok", 2, high=count), normalised=True)
    experts = ExpertSpec(count=count, width=file.integer("intermediate_size"), routing=routing, stacked=True)
    return body(file, alike(file, attention(file), [experts] * read_layers(file), read_norm(file)))


def read_hyperclovax(file: ConfigFile) -> Body:
    """Scores and logits are multiplied, as heads and products are where the file is silent."""
    bias, scale = file.flag("attention_bias"), file.get("attention_multiplier")
    attention = read_attention(file, qkv_bias=bias, output_bias=bias)
    if scale is not None:
        attention = structs.replace(attention, scale=file.number("attention_multiplier", low=1e-9))
    behind = NormNames(attention_output="post_norm1", mlp_output="post_norm2")
    norms = behind if file.flag("use_post_norm", True) else NormNames()
    found = body(file, alike(file, attention, read_mlp(file, bias=file.flag("mlp_bias")), read_norm(file), norms))
    return structs.replace(found, logit_scale=file.number("logits_scaling", 1.0, low=1e-9))


FAMILIES = (
    Family(
        name="granite",
        architecture="GraniteForCausalLM",
        base="GraniteModel",
        read=read_granite,
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="granitemoe",
        architecture="GraniteMoeForCausalLM",
        base="GraniteMoeModel",
        read=read_granitemoe,
        defaults={"max_position_embeddings": 2048},
        names=(
            ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
            ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
            ("mlp.gate.", "block_sparse_moe.router.layer."),
        ),
    ),
    Family(
        name="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        base="HyperCLOVAXModel",
        read=read_hyperclovax,
        defaults={"max_position_embeddings": 2048},
        published_code=True,
    ),
)
