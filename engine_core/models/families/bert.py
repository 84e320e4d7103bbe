"""BERT (2018) and encoders like it, whose positions are a learned table: RoBERTa, DistilBERT (2019), XLM-RoBERTa,
CamemBERT and ELECTRA (2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from penstock.engine_core.models.families import Family
from penstock.engine_core.models.layer_spec import NO_ROPE, AttentionSpec, Body, EmbeddingSpec, MlpSpec, NormNames
from penstock.engine_core.models.pooler import ClassifierSpec, DenseSpec
from penstock.engine_core.models.reading import ModelFile


def read_bert(file: ModelFile) -> Body:
    return body(file, 0, dense(file, "model.pooler.dense"), "classifier")


def read_roberta(file: ModelFile) -> Body:
    """The rows before the first position are those of padding."""
    first = file.integer("pad_token_id", low=0) + 1
    return body(file, first, dense(file, "classifier.dense"), "classifier.out_proj")


def read_distilbert(file: ModelFile) -> Body:
    return body(file, 0, dense(file, "pre_classifier", "relu"), "classifier")


def read_electra(file: ModelFile) -> Body:
    hidden = file.integer("hidden_size")
    if file.integer("embedding_size", 128) != hidden:
        raise file.error("embedding_size", f"Penstock serves embeddings as wide as hidden_size ({hidden})")
    return body(file, 0, dense(file, "classifier.dense", "gelu"), "classifier.out_proj")


def dense(file: ModelFile, name: str, activation: str = "tanh") -> DenseSpec:
    """The first product of a head for classification."""
    hidden = file.integer("hidden_size")
    return DenseSpec(name=name, inputs=hidden, outputs=hidden, activation=activation)


def classifier(file: ModelFile, first: DenseSpec, output: str = "classifier", kind: str = "cls") -> ClassifierSpec:
    """Such a head, whose last product has the name `output`. kind: of the state that it reads."""
    labels, scale = file.labels()
    last = DenseSpec(name=output, inputs=first.outputs, outputs=len(labels))
    return ClassifierSpec(kind=kind, layers=(first, last), labels=labels, activation=scale)


def body(file: ModelFile, first_position: int, first: DenseSpec, output: str) -> Body:
    """What all have in common. first, output: as of `classifier`."""
    if file.get("position_embedding_type") not in (None, "absolute"):
        raise file.error("position_embedding_type", "Penstock serves absolute positions in this family")
    rows = file.integer("max_position_embeddings", low=first_position + 1)
    attention = file.attention(NO_ROPE, bidirectional=True, qkv_bias=True, output_bias=True)
    activation = file.activation(served=("gelu", "gelu_tanh"))
    found = post_normed(file, attention, file.mlp(activation=activation, gated=False, bias=True), first, output)
    embedding = structs.replace(found.embedding, positions=rows, first_position=first_position)
    return structs.replace(found, embedding=embedding, max_position=rows - first_position)


def post_normed(file: ModelFile, attention: AttentionSpec, mlp: MlpSpec, first: DenseSpec, output: str) -> Body:
    """Layers with norms behind attention and MLP, and a norm of the embedding."""
    if file.flag("is_decoder") or file.flag("add_cross_attention"):
        raise file.error("is_decoder", "Penstock serves this family as encoders")
    norm = file.norm("layer_norm_eps", 1e-12, centered=True)
    found = file.body(
        attention,
        mlp,
        norm,
        post_norm=True,
        embedding=EmbeddingSpec(types=file.integer("type_vocab_size", low=0), norm=norm),
        max_position=file.integer("max_position_embeddings"),
        classifier=classifier(file, first, output),
        unread=(
            *("embeddings.position_ids", "embeddings.token_type_ids", "pooler.", "cls.", "lm_head.", "vocab_"),
            *("generator_", "discriminator_"),
        ),
    )
    return behind_embedding(found)


def behind_embedding(body: Body) -> Body:
    """The same without a norm before the first layer's attention: the embedding's is there."""
    first = structs.replace(body.layers[0], norms=NormNames(attention_input=""))
    return structs.replace(body, layers=(first, *body.layers[1:]))


NAMES = (
    ("embed_tokens", "embeddings.word_embeddings"),
    ("embed_positions", "embeddings.position_embeddings"),
    ("embed_types", "embeddings.token_type_embeddings"),
    ("embed_norm", "embeddings.LayerNorm"),
    ("model.layers.", "model.encoder.layer."),
    ("self_attn.q_proj", "attention.self.query"),
    ("self_attn.k_proj", "attention.self.key"),
    ("self_attn.v_proj", "attention.self.value"),
    ("self_attn.o_proj", "attention.output.dense"),
    ("post_attention_layernorm", "attention.output.LayerNorm"),
    ("mlp.up_proj", "intermediate.dense"),
    ("mlp.down_proj", "output.dense"),
    ("output_layernorm", "output.LayerNorm"),
)
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
ROBERTA: Mapping[str, Any] = {**DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}
FAMILIES = (
    Family(name="bert", architecture="BertForMaskedLM", read=read_bert, defaults=DEFAULTS, names=NAMES),
    Family(
        name="roberta",
        architecture="RobertaForMaskedLM",
        read=read_roberta,
        defaults=ROBERTA,
        names=NAMES,
    ),
    Family(
        name="xlm-roberta",
        architecture="XLMRobertaForMaskedLM",
        read=read_roberta,
        defaults={**ROBERTA, "vocab_size": 30522},
        names=NAMES,
    ),
    Family(
        name="camembert",
        architecture="CamembertForMaskedLM",
        read=read_roberta,
        defaults={**ROBERTA, "vocab_size": 30522},
        names=NAMES,
    ),
    Family(
        name="electra",
        architecture="ElectraForMaskedLM",
        read=read_electra,
        defaults={**DEFAULTS, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4},
        names=NAMES,
        ignored=("summary_activation",),
    ),
    Family(
        name="distilbert",
        architecture="DistilBertForMaskedLM",
        read=read_distilbert,
        defaults={**DEFAULTS, "num_hidden_layers": 6, "type_vocab_size": 0, "layer_norm_eps": 1e-12},
        keys={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "activation": "hidden_act",
        },
        names=(
            *NAMES[:4],
            ("model.layers.", "model.transformer.layer."),
            *((f"self_attn.{name}_proj", f"attention.{name}_lin") for name in "qkv"),
            ("self_attn.o_proj", "attention.out_lin"),
            ("post_attention_layernorm", "sa_layer_norm"),
            ("mlp.up_proj", "ffn.lin1"),
            ("mlp.down_proj", "ffn.lin2"),
            ("output_layernorm", "output_layer_norm"),
        ),
    ),
)
