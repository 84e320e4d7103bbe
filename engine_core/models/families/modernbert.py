"""ModernBERT (Warner et al., 2024): an encoder with rotary positions, windows in most layers and gated MLPs."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family
from penstock.engine_core.models.layer_spec import AttentionSpec, EmbeddingSpec, NormNames, RopeSpec
from penstock.engine_core.models.pooler import ClassifierSpec, DenseSpec
from penstock.engine_core.models.reading import (
    FULL,
    SLIDING,
    alike,
    by_kind,
    read_activation,
    read_attention,
    read_kinds,
    read_labels,
    read_layers,
    read_mlp,
    read_norm,
    read_ropes,
)

SERVED = ("gelu", "gelu_tanh", "silu")


def read_modernbert(file: ConfigFile) -> Body:
    """A window counts both sides."""
    turn = file.integer("global_attn_every_n_layers", 3)
    kinds = read_kinds(file, (SLIDING if layer % turn else FULL for layer in range(read_layers(file))))
    ropes = RopeSpec(theta=file.number("global_rope_theta")), RopeSpec(theta=file.number("local_rope_theta"))
    if file.get("rope_parameters") is not None:
        ropes = read_ropes(file)
    bias = file.flag("attention_bias")

    def attention(rope: RopeSpec) -> AttentionSpec:
        return read_attention(file, rope, bidirectional=True, fused=True, qkv_bias=bias, output_bias=bias)

    sliding = structs.replace(attention(ropes[1]), window=file.integer("local_attention") // 2 + 1)
    norm = read_norm(file, "norm_eps", 1e-5, centered=True, bias=file.flag("norm_bias"))
    mlp = read_mlp(
        file,
        activation=read_activation(file, "hidden_activation", SERVED),
        fused=True,
        bias=file.flag("mlp_bias"),
    )
    layers = list(alike(file, by_kind(kinds, attention(ropes[0]), sliding), mlp, norm))
    layers[0] = structs.replace(layers[0], norms=NormNames(attention_input=""))  # the embedding's is before it
    return Body(layers=tuple(layers), embedding=EmbeddingSpec(norm=norm), classifier=read_classifier(file),
                unread=("head.", "decoder."))  # fmt: skip


def read_classifier(file: ConfigFile) -> ClassifierSpec:
    """A state goes through the head that predicts masked tokens in training, too."""
    hidden, kind, (labels, scale) = file.integer("hidden_size"), file.get("classifier_pooling"), read_labels(file)
    if kind not in ("cls", "mean"):
        raise file.error("classifier_pooling", "cls or mean is expected")
    dense = DenseSpec(
        name="head.dense",
        inputs=hidden,
        outputs=hidden,
        bias=file.flag("classifier_bias"),
        activation=read_activation(file, "classifier_activation", SERVED),
        norm="head.norm",
        norm_bias=file.flag("norm_bias"),
        norm_eps=file.number("norm_eps", 1e-5),
    )
    final = DenseSpec(name="classifier", inputs=hidden, outputs=len(labels))
    return ClassifierSpec(kind=kind, layers=(dense, final), labels=labels, activation=scale)


FAMILIES = (
    Family(
        name="modernbert",
        architecture="ModernBertForMaskedLM",
        base="ModernBertModel",
        read=read_modernbert,
        defaults={
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "max_position_embeddings": 8192,
            "hidden_activation": "gelu",
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "local_attention": 128,
            "classifier_pooling": "cls",
            "classifier_activation": "gelu",
        },
        names=(
            ("embed_tokens", "embeddings.tok_embeddings"),
            ("embed_norm", "embeddings.norm"),
            ("self_attn.qkv_proj", "attn.Wqkv"),
            ("self_attn.o_proj", "attn.Wo"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "mlp_norm"),
            ("mlp.gate_up_proj", "mlp.Wi"),
            ("mlp.down_proj", "mlp.Wo"),
            ("model.norm", "model.final_norm"),
        ),
        ignored=(
            *("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "position_embedding_type"),
            *("layer_norm_eps", "sliding_window"),
        ),
    ),
)
