"""Nemotron-4 and Minitron (NVIDIA, 2024), AFM (Arcee, 2025) and Jais 2 (Inception, 2025): an MLP whose one product is
squared above zero."""

from __future__ import annotations

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import Body, MlpSpec
from penstock.engine_core.models.reading import ModelFile


def squared(file: ModelFile, key: str = "hidden_act") -> MlpSpec:
    activation = file.activation(key, served=("relu2",))
    return file.mlp(bias=file.flag("mlp_bias"), gated=False, activation=activation)


def read_nemotron(file: ModelFile) -> Body:
    """LayerNorm with weights that one is added to."""
    norm = file.norm("norm_eps", 1e-5, centered=True, offset=1.0)
    return file.body(file.attention(file.rope(partial=0.5), bias="attention_bias"), squared(file), norm)


def read_arcee(file: ModelFile) -> Body:
    return file.body(file.attention(bias="attention_bias"), squared(file))


def read_jais2(file: ModelFile) -> Body:
    return file.body(
        file.attention(bias="attention_bias"), squared(file), file.norm("layer_norm_eps", 1e-5, centered=True)
    )


FAMILIES = (
    Family(
        name="nemotron",
        architecture="NemotronForCausalLM",
        read=read_nemotron,
        defaults={"max_position_embeddings": 4096},
    ),
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        read=read_arcee,
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    Family(
        name="jais2",
        architecture="Jais2ForCausalLM",
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
