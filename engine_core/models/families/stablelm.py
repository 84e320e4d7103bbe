"""StableLM 3B, 2 and Zephyr (Stability AI, 2023 and 2024): LayerNorms, and heads of which a part is turned."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, NormNames
from penstock.engine_core.models.reading import ModelFile


def read(file: ModelFile) -> Body:
    """Of the larger ones each head has a norm of its own, and attention and MLP stand beside each other."""
    rope, norms = file.rope(partial=0.25), file.flag("qk_layernorm")
    attention = file.attention(
        rope, qkv_bias=file.flag("use_qkv_bias"), qk_norm="heads" if norms else "", qk_norm_tensors=norms
    )
    parallel = file.flag("use_parallel_residual")
    names = NormNames(mlp_input="") if parallel else None
    norm = file.norm("layer_norm_eps", 1e-5, centered=True)
    return file.body(attention, file.mlp(), norm, names, parallel=parallel)


FAMILIES = (
    Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        read=read,
        defaults={"max_position_embeddings": 4096},
        names=(("q_norm.", "q_layernorm.norms."), ("k_norm.", "k_layernorm.norms.")),
    ),
)
