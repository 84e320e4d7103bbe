"""Granite 3 (IBM, 2024), dense and with experts, Granite 4 (2025), most of whose layers may be Mamba-2, and HyperCLOVA
X SEED (NAVER, 2025), with norms behind its parts."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.families.bamba import SIZES, read_mamba
from penstock.engine_core.models.layer_spec import (
    NO_ROPE,
    AttentionSpec,
    ExpertSpec,
    LayerSpec,
    MlpSpec,
    NormNames,
    RoutingSpec,
)
from penstock.engine_core.models.reading import alike, read_activation, read_attention, read_layers, read_mlp, read_norm

ATTENDING, MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")  # as the maker and transformers say


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


def read_experts(file: ConfigFile, shared: MlpSpec | None = None) -> ExpertSpec:
    read_activation(file)
    count = file.integer("num_local_experts", 8, high=4096)
    routing = RoutingSpec(chosen=file.integer("num_experts_per_tok", 2, high=count), normalised=True)
    width = file.integer("intermediate_size")
    return ExpertSpec(count=count, width=width, routing=routing, stacked=True, shared=shared)


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


def read_granitemoe(file: ConfigFile) -> Body:
    return body(file, alike(file, attention(file), [read_experts(file)] * read_layers(file), read_norm(file)))


def read_granitemoeshared(file: ConfigFile) -> Body:
    """Beside the experts an MLP for all tokens, unless its width is 0."""
    shared = None
    if file.integer("shared_intermediate_size", 0, low=0):
        shared = read_mlp(file, "shared_intermediate_size", fused=True)
    return body(file, alike(file, attention(file), [read_experts(file, shared)] * read_layers(file), read_norm(file)))


def read_granitemoehybrid(file: ConfigFile) -> Body:
    """An MLP for all tokens in every layer, beside the experts where there are any. A rotation is asked for by name."""
    layers, kinds = read_layers(file), file.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ATTENDING + MAMBA for kind in kinds):
        raise file.error("layer_types", f"it must name attention or mamba for each of the {layers} layers")
    if not set(ATTENDING) & set(kinds):
        raise file.error("layer_types", "Penstock serves models of which at least one layer attends")
    if file.get("position_embedding_type") not in ("rope", "nope", None):
        raise file.error("position_embedding_type", "Penstock serves rope and nope in this family")
    own, mlp = attention(file), read_mlp(file, "shared_intermediate_size", fused=True)
    if file.get("position_embedding_type") != "rope":
        own = structs.replace(own, rope=NO_ROPE)
    parts = read_experts(file, mlp) if file.integer("num_local_experts", 8, low=0) else mlp
    mamba, norm = read_mamba(file), read_norm(file)
    return body(
        file,
        tuple(
            LayerSpec(attention=own, mlp=parts, norm=norm)
            if kind in ATTENDING
            else LayerSpec(recurrence=mamba, mlp=parts, norm=norm)
            for kind in kinds
        ),
    )


ROUTED = (
    ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ("mlp.gate.", "block_sparse_moe.router.layer."),
)
NAMES = (
    *ROUTED,
    ("mlp.shared_expert.", "mlp."),
    ("mlp.gate_up_proj.", "shared_mlp.input_linear."),
    ("mlp.down_proj.", "shared_mlp.output_linear."),
)
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
        names=ROUTED,
    ),
    Family(
        name="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        base="GraniteMoeSharedModel",
        read=read_granitemoeshared,
        defaults={"max_position_embeddings": 2048},
        names=NAMES,
    ),
    Family(
        name="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        base="GraniteMoeHybridModel",
        read=read_granitemoehybrid,
        defaults={**SIZES, "max_position_embeddings": 2048, "shared_intermediate_size": 1024},
        names=NAMES,
        ignored=("mamba_chunk_size", "num_experts_per_tok"),
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
