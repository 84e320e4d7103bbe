"""POST /v1/embeddings. Source: OpenAI API reference, "Create embeddings"."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from penstock.protocol import limits
from penstock.protocol.errors import NotBuilt
from penstock.protocol.messages import Pooling, SubmitText, TraceContext
from penstock.services.client.model_info import ServedModel
from penstock.services.openai.app_state import Service
from penstock.services.openai.errors import send_json
from penstock.services.openai.pooling import (
    Pooled,
    Text,
    Texts,
    Vector,
    VectorRequest,
    VectorUsage,
    check_dimensions,
    check_fields,
    pooled,
    shaped,
    texts_of,
    vector_submission,
)
from penstock.services.openai.validation import decode, read_json
from penstock.services.tracing.propagation import trace_context

NORMALIZE = "scale vectors to length 1; left out: as the model's makers do"
DIMENSIONS = "keep so many of each vector's first numbers; only models trained for it (Matryoshka) lose little by that"
PAUSE = 64  # vectors written between looks at other work


class EmbeddingRequest(VectorRequest, frozen=True, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=limits.MAX_TOKEN_ID, description=DIMENSIONS)] | None = None
    normalize: Annotated[bool, Meta(description=NORMALIZE)] | None = None
    add_special_tokens: bool | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One text's: numbers, or base64 of them as little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: VectorUsage


REQUEST = msgspec.json.Decoder(EmbeddingRequest)


class Embeddings:
    """The endpoint. Each text is an internal request of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        body = await read_json(scope, receive, service.config.api)
        request = decode(body, REQUEST)
        service.model.check_name(request.model)
        check_fields(body)
        submits = submissions(request, service.model, trace_context(scope))
        found = await pooled(service, scope, receive, request, submits)
        await send_json(send, await encoded(request, found, service.model))


def submissions(request: EmbeddingRequest, model: ServedModel, trace: TraceContext) -> list[SubmitText]:
    """A message for each text, without ids. Raises InvalidRequest naming the field."""
    check_pooler(model)
    check_dimensions(request.dimensions, model)
    texts = texts_of(request.input, "input", model, request)
    single = isinstance(request.input, str) or isinstance(request.input[0], int)
    special = request.add_special_tokens is not False
    return [
        text_submission(request, model, text, "input" if single else f"input[{number}]", trace, special=special)
        for number, text in enumerate(texts)
    ]


def text_submission(
    request: VectorRequest, model: ServedModel, text: Text, param: str, trace: TraceContext, *, special: bool = True
) -> SubmitText:
    """One text for its vector as the model makes it."""
    return vector_submission(request, text, Pooling(kind=model.pooler.kind, param=param), trace, special=special)


def check_pooler(model: ServedModel) -> None:
    """Raise NotBuilt if no vectors can be made with this model."""
    if model.pooler.unpooled:
        raise NotBuilt(f"this model makes no vectors here: {model.pooler.unpooled}", param="model")


def vectors(request: EmbeddingRequest, found: Sequence[Vector], model: ServedModel) -> list[Vector]:
    """Cut and scaled as the request, or else the model, wants them."""
    normalize = model.pooler.normalize if request.normalize is None else request.normalize
    return [shaped(vector, request.dimensions, normalize=normalize) for vector in found]


async def encoded(request: EmbeddingRequest, found: Pooled, model: ServedModel) -> bytes:
    """An `EmbeddingAnswer` as JSON, with pauses: writing two million numbers takes as long as many tokens."""
    data = []
    for number, vector in enumerate(vectors(request, found.vectors, model)):
        values: list[float] | str = vector.tolist()
        if request.encoding_format == "base64":
            values = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append(msgspec.Raw(msgspec.json.encode(Embedding(index=number, embedding=values))))
        if number % PAUSE == PAUSE - 1:
            await asyncio.sleep(0)
    return msgspec.json.encode({"object": "list", "data": data, "model": model.name, "usage": found.usage})
