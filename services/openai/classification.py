"""POST /classify: labels of texts. Source: vLLM documentation, "Classification API"."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from penstock.engine_core.models.pooler import ClassifierSpec
from penstock.protocol.errors import Unsupported
from penstock.protocol.messages import Pooling, SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.embeddings import (
    Texts,
    Vector,
    VectorRequest,
    VectorUsage,
    pooled,
    read_vector_request,
    texts_of,
    vector_submission,
)
from penstock.services.openai.generation import model_name

USE_ACTIVATION = "false: the head's logits in place of probabilities"


class ClassifyRequest(VectorRequest, frozen=True, kw_only=True):
    """Body of POST /classify."""

    input: Texts
    add_special_tokens: bool | None = None
    use_activation: Annotated[bool, Meta(description=USE_ACTIVATION)] | None = None


class Classified(msgspec.Struct, frozen=True, kw_only=True):
    """Of one text: its likeliest label, and the chance of each, in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: VectorUsage


REQUEST = msgspec.json.Decoder(ClassifyRequest)


async def classify(app: AppState, context: RequestContext) -> None:
    """Each text is an internal request of its own."""
    request = await read_vector_request(app, context, REQUEST)
    classifier = classifier_of(app.model)
    found = await pooled(app, context, request, submissions(request, app.model, context.trace))
    answer = ClassifyAnswer(
        id="classify-" + secrets.token_hex(16),
        created=int(time.time()),
        model=model_name(app, context),
        data=[
            classified(index, vector, classifier, activation=request.use_activation is not False)
            for index, vector in enumerate(found.vectors)
        ],
        usage=found.usage,
    )
    await context.send_json(msgspec.json.encode(answer))


def submissions(request: ClassifyRequest, model: ModelInfo, trace: TraceContext) -> list[SubmitText]:
    """A message for each text. Raises InvalidRequest naming the field."""
    kind, special = classifier_of(model).kind, request.add_special_tokens is not False
    single = isinstance(request.input, str) or isinstance(request.input[0], int)
    found = []
    for number, text in enumerate(texts_of(request.input, "input", model, request)):
        pooling = Pooling(kind=kind, classify=True, param="input" if single else f"input[{number}]")
        found.append(vector_submission(request, text, pooling, trace, special=special))
    return found


def classifier_of(model: ModelInfo) -> ClassifierSpec:
    """Raises Unsupported for a model without one."""
    if model.classifier is None:
        raise Unsupported("this model has no head for classification", param="model")
    return model.classifier


def classified(index: int, logits: Vector, classifier: ClassifierSpec, *, activation: bool = True) -> Classified:
    values = activated(logits, classifier) if activation else logits.tolist()
    label = classifier.labels[int(np.argmax(logits))]
    return Classified(index=index, label=label, probs=values, num_classes=len(values))


def activated(logits: Vector, classifier: ClassifierSpec) -> list[float]:
    """The head's logits as chances, where the model has them so."""
    wide = logits.astype(np.float64)
    match classifier.activation:
        case "softmax":
            shares = np.exp(wide - wide.max())
            wide = shares / shares.sum()
        case "sigmoid":
            wide = 1.0 / (1.0 + np.exp(-np.clip(wide, -700.0, 700.0)))
    found: list[float] = wide.tolist()
    return found
