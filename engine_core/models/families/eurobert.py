"""EuroBERT (2025): a Llama that attends both ways."""

from __future__ import annotations

from msgspec import structs

from penstock.engine_core.models.families import Family, llama
from penstock.engine_core.models.families.bert import classifier, dense
from penstock.engine_core.models.layer_spec import Body
from penstock.engine_core.models.pooler import ClassifierSpec
from penstock.engine_core.models.reading import ModelFile

CLASSIFIER = "EuroBertForSequenceClassification"


def read(file: ModelFile) -> Body:
    body = llama.read(file)
    layers = tuple(layer.with_attention(bidirectional=True) for layer in body.layers)
    return structs.replace(body, layers=layers, classifier=read_classifier(file), unread=("lm_head.",))


def read_classifier(file: ModelFile) -> ClassifierSpec | None:
    """It reads a text's state. A `late` one reads every token's, which is refused where it is asked for."""
    kind = file.get("classifier_pooling")
    if kind not in ("bos", "mean"):
        if CLASSIFIER in (file.get("architectures") or ()):
            raise file.error("classifier_pooling", "Penstock serves bos and mean")
        return None
    return classifier(file, dense(file, "dense", "gelu"), kind="cls" if kind == "bos" else "mean")


FAMILIES = (
    Family(
        name="eurobert",
        architecture="EuroBertForMaskedLM",
        read=read,
        defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "classifier_pooling": "late"},
        published_code=True,
    ),
)
