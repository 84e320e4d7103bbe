"""ModernBERT (Warner et al., 2024): an encoder with rotary positions, windows in most layers and gated MLPs."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.families.bert import behind_embedding, classifier
from penstock.engine_core.models.layer_spec import Body, EmbeddingSpec, RopeSpec
from penstock.engine_core.models.pooler import ClassifierSpec, DenseSpec
from penstock.engine_core.models.reading import ModelFile

SERVED = ("gelu", "gelu_tanh", "silu")


def read_modernbert(file: ModelFile) -> Body:
    """A window counts both sides."""
    turn = file.integer("global_attn_every_n_layers", 3)
    ropes = RopeSpec(theta=file.number("global_rope_theta")), RopeSpec(theta=file.number("local_rope_theta"))
    if file.get("rope_parameters") is not None:
        ropes = file.ropes()
    full, sliding = (file.attention(rope, bias="attention_bias", bidirectional=True, fused=True) for rope in ropes)
    sliding = structs.replace(sliding, window=file.integer("local_attention") // 2 + 1)
    attentions = file.windowed(full, sliding, slides=lambda layer: layer % turn)
    norm = file.norm("norm_eps", 1e-5, centered=True, bias=file.flag("norm_bias"))
    activation = file.activation("hidden_activation", SERVED)
    mlp = file.mlp(activation=activation, fused=True, bias=file.flag("mlp_bias"))
    return behind_embedding(file.body(
        attentions, mlp, norm, embedding=EmbeddingSpec(norm=norm), classifier=read_classifier(file),
        unread=("head.", "decoder."),
    ))  # fmt: skip


def read_classifier(file: ModelFile) -> ClassifierSpec:
    """A state goes through the head that predicts masked tokens in training, too."""
    kind, hidden = file.get("classifier_pooling"), file.integer("hidden_size")
    if kind not in ("cls", "mean"):
        raise file.error("classifier_pooling", "cls or mean is expected")
    dense = DenseSpec(
        name="head.dense",
        inputs=hidden,
        outputs=hidden,
        bias=file.flag("classifier_bias"),
        activation=file.activation("classifier_activation", SERVED),
        norm="head.norm",
        norm_bias=file.flag("norm_bias"),
        norm_eps=file.number("norm_eps", 1e-5),
    )
    return classifier(file, dense, kind=kind)


FAMILIES = (
    Family(
        name="modernbert",
        architecture="ModernBertForMaskedLM",
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
