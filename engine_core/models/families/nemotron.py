"""Nemotron-4 and Minitron (NVIDIA, 2024), AFM (Arcee, 2025) and Jais 2 (Inception, 2025): an MLP whose one product is
squared above zero."""

from __future__ import annotations

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, MlpSpec
from penstock.engine_core.models.reading import alike, read_activation, read_attention, read_mlp, read_norm, read_rope


def attention(file: ConfigFile, partial: float | None = None) -> AttentionSpec:
    bias = file.flag("attention_bias")
    return read_attention(file, read_rope(file, partial=partial), qkv_bias=bias, output_bias=bias)


def squared(file: ConfigFile, key: str = "hidden_act") -> MlpSpec:
    activation = read_activation(file, key, served=("relu2",))
    return read_mlp(file, bias=file.flag("mlp_bias"), gated=False, activation=activation)


def read_nemotron(file: ConfigFile) -> Body:
    """LayerNorm with weights that one is added to."""
    norm = read_norm(file, "norm_eps", 1e-5, centered=True, offset=1.0)
    return Body(layers=alike(file, attention(file, 0.5), squared(file), norm))


def read_arcee(file: ConfigFile) -> Body:
    return Body(layers=alike(file, attention(file), squared(file), read_norm(file)))


def read_jais2(file: ConfigFile) -> Body:
    norm = read_norm(file, "layer_norm_eps", 1e-5, centered=True)
    return Body(layers=alike(file, attention(file), squared(file), norm))


FAMILIES = (
    Family(
        name="nemotron",
        architecture="NemotronForCausalLM",
        base="NemotronModel",
        read=read_nemotron,
        defaults={"max_position_embeddings": 4096},
    ),
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        base="ArceeModel",
        read=read_arcee,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    Family(
        name="jais2",
        architecture="Jais2ForCausalLM",
        base="Jais2Model",
        read=read_jais2,
        defaults={
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_theta": 5e5,
            "hidden_act": "relu2",
        },
    ),
)
