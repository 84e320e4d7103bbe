"""StableLM 3B, 2 and Zephyr (Stability AI, 2023 and 2024): LayerNorms, and heads of which a part is turned."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import NormNames
from penstock.engine_core.models.reading import alike, read_attention, read_mlp, read_norm, read_rope


def read(file: ConfigFile) -> Body:
    """Of the larger ones each head has a norm of its own, and attention and MLP stand beside each other."""
    rope, norms = read_rope(file, partial=0.25), file.flag("qk_layernorm")
    attention = read_attention(
        file,
        rope,
        qkv_bias=file.flag("use_qkv_bias"),
        qk_norm="heads" if norms else "",
        qk_norm_tensors=norms,
    )
    norm = read_norm(file, "layer_norm_eps", 1e-5, centered=True)
    if not file.flag("use_parallel_residual"):
        return Body(layers=alike(file, attention, read_mlp(file), norm))
    layers = alike(file, attention, read_mlp(file), norm, NormNames(mlp_input=""))
    return Body(layers=tuple(structs.replace(layer, parallel=True) for layer in layers))


FAMILIES = (
    Family(
        name="stablelm",
        architecture="StableLmForCausalLM",
        base="StableLmModel",
        read=read,
        defaults={"max_position_embeddings": 4096},
        names=(("q_norm.", "q_layernorm.norms."), ("k_norm.", "k_layernorm.norms.")),
    ),
)
