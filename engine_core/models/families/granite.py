"""Granite 3 (IBM, 2024), dense and with experts, Granite 4 (2025), most of whose layers may be Mamba-2, and HyperCLOVA
X SEED (NAVER, 2025), with norms behind its parts."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.bamba import SIZES, read_mamba
from penstock.engine_core.models.layer_spec import NO_ROPE, AttentionSpec, Body, ExpertSpec, MlpSpec, NormNames
from penstock.engine_core.models.reading import Mixer, ModelFile

ATTENDING, MAMBA = ("attention", "full_attention"), ("mamba", "linear_attention")  # as the maker and transformers say


def attention(file: ModelFile) -> AttentionSpec:
    return file.attention(bias="attention_bias", scale=file.number("attention_multiplier", 1.0, low=1e-9))


def body(file: ModelFile, mixers: Mixer | list[Mixer], mlp: MlpSpec | ExpertSpec) -> Body:
    return file.body(
        mixers,
        mlp,
        residual_scale=file.number("residual_multiplier", 1.0),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logit_scale=1 / file.number("logits_scaling", 1.0, low=1e-9),
    )


def read_granite(file: ModelFile) -> Body:
    return body(file, attention(file), file.mlp(bias=file.flag("mlp_bias")))


def read_experts(file: ModelFile, shared: MlpSpec | None = None) -> ExpertSpec:
    file.activation()
    found = file.experts("num_local_experts", "intermediate_size", silent=(8, 2), normalised=True)
    return structs.replace(found, stacked=True, shared=shared)


def read_hyperclovax(file: ModelFile) -> Body:
    """Scores and logits are multiplied, as heads and products are where the file is silent."""
    scale = 0.0
    if file.get("attention_multiplier") is not None:
        scale = file.number("attention_multiplier", low=1e-9)
    own = file.attention(bias="attention_bias", scale=scale)
    found = body(file, own, file.mlp(bias=file.flag("mlp_bias")))
    if file.flag("use_post_norm", True):
        behind = NormNames(attention_output="post_norm1", mlp_output="post_norm2")
        found = structs.replace(found, layers=tuple(structs.replace(one, norms=behind) for one in found.layers))
    return structs.replace(found, logit_scale=file.number("logits_scaling", 1.0, low=1e-9))


def read_granitemoe(file: ModelFile) -> Body:
    return body(file, attention(file), read_experts(file))


def read_granitemoeshared(file: ModelFile) -> Body:
    """Beside the experts an MLP for all tokens, unless its width is 0."""
    shared = None
    if file.integer("shared_intermediate_size", 0, low=0):
        shared = file.mlp("shared_intermediate_size", fused=True)
    return body(file, attention(file), read_experts(file, shared))


def read_granitemoehybrid(file: ModelFile) -> Body:
    """An MLP for all tokens in every layer, beside the experts where there are any. A rotation is asked for by name."""
    layers, kinds = file.num_layers, file.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ATTENDING + MAMBA for kind in kinds):
        raise file.error("layer_types", f"it must name attention or mamba for each of the {layers} layers")
    if not set(ATTENDING) & set(kinds):
        raise file.error("layer_types", "Penstock serves models of which at least one layer attends")
    if file.get("position_embedding_type") not in ("rope", "nope", None):
        raise file.error("position_embedding_type", "Penstock serves rope and nope in this family")
    own, mlp = attention(file), file.mlp("shared_intermediate_size", fused=True)
    if file.get("position_embedding_type") != "rope":
        own = structs.replace(own, rope=NO_ROPE)
    parts = read_experts(file, mlp) if file.integer("num_local_experts", 8, low=0) else mlp
    mamba = read_mamba(file)
    return body(file, [own if kind in ATTENDING else mamba for kind in kinds], parts)


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
        read=read_granite,
        defaults={"max_position_embeddings": 2048},
    ),
    Family(
        name="granitemoe",
        architecture="GraniteMoeForCausalLM",
        read=read_granitemoe,
        defaults={"max_position_embeddings": 2048},
        names=ROUTED,
    ),
    Family(
        name="granitemoeshared",
        architecture="GraniteMoeSharedForCausalLM",
        read=read_granitemoeshared,
        defaults={"max_position_embeddings": 2048},
        names=NAMES,
    ),
    Family(
        name="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        read=read_granitemoehybrid,
        defaults={**SIZES, "max_position_embeddings": 2048, "shared_intermediate_size": 1024},
        names=NAMES,
        ignored=("mamba_chunk_size", "num_experts_per_tok"),
    ),
    Family(
        name="hyperclovax",
        architecture="HyperCLOVAXForCausalLM",
        read=read_hyperclovax,
        defaults={"max_position_embeddings": 2048},
        published_code=True,
    ),
)
