"""POST /v2/embed. Source: Cohere API reference, "Embed API (v2)"."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from penstock.protocol import limits
from penstock.protocol.errors import invalid, unsupported
from penstock.protocol.messages import SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.embeddings import (
    PAUSE,
    Vector,
    VectorRequest,
    check_count,
    check_dimensions,
    check_pooler,
    pooled,
    read_vector_request,
    shaped,
    text_submission,
)
from penstock.services.openai.schema import Count

BUILT = ("float", "base64", "binary", "ubinary")
EVERY = -1  # truncate_prompt_tokens: as many as the context holds


class EmbedRequest(VectorRequest, frozen=True, kw_only=True):
    """Body of POST /v2/embed. Queries and documents get the model's own instruction before them; of a text that is too
    long its end is cut, or its start, or it is refused with `truncate` NONE."""

    texts: Annotated[list[str], Meta(min_length=1)]
    input_type: Literal["search_document", "search_query", "classification", "clustering", "image"]
    embedding_types: (
        Annotated[list[Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]], Meta(min_length=1)] | None
    ) = None
    output_dimension: Annotated[int, Meta(ge=1, le=limits.MAX_TOKEN_ID)] | None = None
    max_tokens: Count | None = None
    truncate: Literal["NONE", "START", "END"] | None = None


class BilledUnits(msgspec.Struct, frozen=True):
    """Tokens of all texts."""

    input_tokens: int


class ApiVersion(msgspec.Struct, frozen=True):
    """Of Cohere's API."""

    version: Literal["2"] = "2"


class EmbedMeta(msgspec.Struct, frozen=True):
    """`meta`."""

    billed_units: BilledUnits
    api_version: ApiVersion = ApiVersion()


class EmbedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer: by type a vector for each text. base64 is of little-endian float32; binary and ubinary are
    the signs, eight to a byte."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: EmbedMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


REQUEST = msgspec.json.Decoder(EmbedRequest)


async def embed(app: AppState, context: RequestContext) -> None:
    """POST /v2/embed."""
    request = await read_vector_request(app, context, REQUEST, EmbedRequest.__struct_fields__)
    submits = submissions(request, app.model, context.trace)
    found = await pooled(app, context, request, submits)
    answer = EmbedAnswer(
        id=str(uuid.uuid4()),
        embeddings=await embeddings(request, found.vectors, app.model),
        texts=request.texts,
        meta=EmbedMeta(BilledUnits(found.prompt_tokens)),
    )
    await context.send_json(msgspec.json.encode(answer))


def submissions(request: EmbedRequest, model: ModelInfo, trace: TraceContext) -> list[SubmitText]:
    """A message for each text, without ids. Raises InvalidRequest and Unsupported naming the field."""
    check_pooler(model)
    check_dimensions(request.output_dimension, model, "output_dimension")
    check_count(len(request.texts), "texts")
    if request.input_type == "image":
        raise unsupported("input_type", ": 'image' is not supported; only text is read")
    for number, kind in enumerate(request.embedding_types or ()):
        if kind not in BUILT:
            raise unsupported(f"embedding_types[{number}]", f": {kind!r} is not supported; {', '.join(BUILT)} are")
    asked = truncated(request)
    before = {"search_query": model.pooler.query, "search_document": model.pooler.document}.get(request.input_type, "")
    return [
        text_submission(asked, model, before + text, f"texts[{number}]", trace)
        for number, text in enumerate(request.texts)
    ]


def truncated(request: EmbedRequest) -> EmbedRequest:
    """The request with its truncation in the words of the others."""
    if request.truncate == "NONE":
        if request.max_tokens is not None:
            raise invalid("max_tokens", "truncates, which truncate NONE rules out")
        return request
    if request.truncate_prompt_tokens is not None:
        return request
    side: Literal["left", "right"] = "left" if request.truncate == "START" else "right"
    return msgspec.structs.replace(
        request, truncate_prompt_tokens=request.max_tokens or EVERY, truncation_side=side
    )  # fmt: skip


async def embeddings(request: EmbedRequest, vectors: Sequence[Vector], model: ModelInfo) -> dict[str, list[Any]]:
    """The vectors in each form that was asked for, with pauses, as writing many takes long."""
    kinds = tuple(dict.fromkeys(request.embedding_types or ("float",)))
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for number, vector in enumerate(vectors):
        made = shaped(vector, request.output_dimension, normalize=model.pooler.normalize)
        for kind in kinds:
            found[kind].append(msgspec.Raw(msgspec.json.encode(written(made, kind))))
        if number % PAUSE == PAUSE - 1:
            await asyncio.sleep(0)
    return found


def written(vector: Vector, kind: str) -> list[float] | list[int] | str:
    match kind:
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        case "ubinary" | "binary":
            signs = np.packbits(vector > 0).astype(np.int16)
            packed: list[int] = (signs if kind == "ubinary" else signs - 128).tolist()
            return packed
        case _:
            numbers: list[float] = vector.tolist()
            return numbers
