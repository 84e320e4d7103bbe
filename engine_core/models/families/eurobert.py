"""EuroBERT (2025): a Llama that attends both ways."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.config_file import ConfigFile
from penstock.engine_core.models.families import Body, Family, llama
from penstock.engine_core.models.pooler import ClassifierSpec, DenseSpec
from penstock.engine_core.models.reading import read_labels

CLASSIFIER = "EuroBertForSequenceClassification"


def read(file: ConfigFile) -> Body:
    body = llama.read(file)
    layers = tuple(layer.with_attention(bidirectional=True) for layer in body.layers)
    return structs.replace(body, layers=layers, classifier=read_classifier(file), unread=("lm_head.",))


def read_classifier(file: ConfigFile) -> ClassifierSpec | None:
    """It reads a text's state. A `late` one reads every token's, which is refused where it is asked for."""
    hidden, kind, (labels, scale) = file.integer("hidden_size"), file.get("classifier_pooling"), read_labels(file)
    if kind not in ("bos", "mean"):
        if CLASSIFIER in (file.get("architectures") or ()):
            raise file.error("classifier_pooling", "Penstock serves bos and mean")
        return None
    dense = DenseSpec(name="dense", inputs=hidden, outputs=hidden, activation="gelu")
    final = DenseSpec(name="classifier", inputs=hidden, outputs=len(labels))
    pooled = "cls" if kind == "bos" else "mean"
    return ClassifierSpec(kind=pooled, layers=(dense, final), labels=labels, activation=scale)


FAMILIES = (
    Family(
        name="eurobert",
        architecture="EuroBertForMaskedLM",
        base="EuroBertModel",
        read=read,
        defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "classifier_pooling": "late"},
        published_code=True,
    ),
)
