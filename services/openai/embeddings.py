"""Texts to vectors: what requests for vectors have in common, over HTTP and in the Python API."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from penstock.protocol import limits
from penstock.protocol.errors import Unsupported, invalid, unsupported
from penstock.protocol.messages import Pooling, Sampling, SubmitText, TraceContext
from penstock.services.client.model_info import ModelInfo
from penstock.services.client.output_collector import OutputCollector
from penstock.services.http.request_context import RequestContext
from penstock.services.openai.app_state import AppState
from penstock.services.openai.completions import texts
from penstock.services.openai.generation import attended, model_name, whole
from penstock.services.openai.schema import Side, Timeout, TokenId
from penstock.services.openai.validation import FIELDS, decode

Vector = NDArray[np.float32]
Text = str | list[int]
Texts = str | Annotated[list[TokenId | str | list[TokenId]], Meta(min_length=1)]

SLICE = 512  # texts of one request that are open at once: half of what a link takes
TRUNCATE = "keep so many of the first tokens of each text; -1: as many as the model's context holds"
TRUNCATION_SIDE = "where truncate_prompt_tokens cuts: right, the default, keeps a text's first tokens, left its last"

# What clients of other servers may send, and why it is refused unless it is null.
REFUSED: Mapping[str, str] = {
    "messages": "vectors are made of texts and token ids",
    "chat_template": "vectors are made of texts and token ids",
    "images": "only text and token ids are read",
    "inputs": "only text and token ids are read: give texts, or input",
    "input_type": "put the model's instruction before the text; /v1/rerank does so by itself",
    "task": "put the model's instruction before the text; /v1/rerank does so by itself",
    "prompt_name": "put the model's instruction before the text; /v1/rerank does so by itself",
    "late_chunking": "each text has a vector of its own",
    "embedding_types": "give encoding_format: float or base64",
    "embed_dtype": "vectors are float32",
    "endianness": "vectors are little-endian",
    "rank_fields": "documents are texts, or objects with text",
    "max_chunks_per_doc": "a document is one text; give truncate_prompt_tokens",
    "max_tokens_per_doc": "give truncate_prompt_tokens",
    "mm_processor_kwargs": "only text and token ids are read",
}


class VectorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What every request for vectors or scores may say."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKEN_ID, description=TRUNCATE)] | None = None
    truncation_side: Annotated[Side, Meta(description=TRUNCATION_SIDE)] | None = None
    priority: Annotated[int, Meta(ge=limits.PRIORITY_MIN, le=limits.PRIORITY_MAX)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=limits.MAX_CACHE_SALT)] | None = None
    timeout: Timeout | None = None

    @property
    def keep_first(self) -> bool:
        """Which of a text's tokens stay where it is truncated: encoders are trained on beginnings."""
        return self.truncation_side != "left"


R = TypeVar("R", bound=VectorRequest)


class VectorUsage(msgspec.Struct, frozen=True):
    """`usage`: nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class Pooled(msgspec.Struct, frozen=True):
    """The vectors of a request's texts, in their order, as the engine gave them."""

    vectors: list[Vector]
    prompt_tokens: int

    @property
    def usage(self) -> VectorUsage:
        return VectorUsage(self.prompt_tokens, self.prompt_tokens)


async def read_vector_request(
    app: AppState, context: RequestContext, decoder: msgspec.json.Decoder[R], served: Collection[str] = ()
) -> R:
    """The body as the decoder's type. Raises InvalidRequest, NotFound for another model, and Unsupported for a field
    that is refused, unless it is one of `served`, and asks for something."""
    body = await context.read_json()
    request = decode(body, decoder)
    context.adapter = app.model.adapter(request.model)
    for name, raw in decode(body, FIELDS).items():
        if name in REFUSED and name not in served and bytes(raw).strip() != b"null":
            raise unsupported(name, f"is not supported: {REFUSED[name]}")
    return request


def texts_of(
    given: str | Sequence[int | str | list[int]], param: str, model: ModelInfo, request: VectorRequest
) -> list[Text]:
    """The texts of a field, yet to be truncated as `request` says. Raises InvalidRequest naming the one that is
    wrong."""
    cut = bool(request.truncate_prompt_tokens)
    found = texts(given, param, model, any_length=cut, keep_first=request.keep_first)
    check_count(len(found), param)
    return found


def check_count(count: int, param: str) -> None:
    if count > limits.MAX_INPUTS:
        raise invalid(param, f"holds {count} texts; at most {limits.MAX_INPUTS} are taken at once")


def vector_submission(
    request: VectorRequest, text: Text, pooling: Pooling, trace: TraceContext, *, special: bool = True
) -> SubmitText:
    """One text as a message. `special`: with what the tokenizer puts around texts."""
    return SubmitText(
        prompt=text if isinstance(text, str) else None,
        prompt_ids=None if isinstance(text, str) else struct.pack(f"<{len(text)}i", *text),
        add_special_tokens=special,
        sampling=Sampling(max_tokens=1),
        pooling=pooling,
        speculate=False,
        detokenize=False,
        priority=request.priority or 0,
        truncate=request.truncate_prompt_tokens or 0,
        keep_first=request.keep_first,
        cache_salt=request.cache_salt or "",
        trace=trace,
        arrival=time.time(),
    )


async def pooled(
    app: AppState, context: RequestContext, request: VectorRequest, submits: Sequence[SubmitText]
) -> Pooled:
    """Send a request's messages and wait for their vectors, so many at a time that others have room beside them.

    Raises the first error of any of them, which ends the others, and ClientDisconnect.
    """
    engine_client = app.engine_client
    context.set_timeout(request.timeout, "timeout")
    most = min(SLICE, app.config.api.max_queued_requests)
    _, client = context.sender(request.user)
    versioned = bool(app.config.api.admin_address)
    vectors: list[Vector] = []
    tokens = 0
    for low in range(0, len(submits), most):
        part = [
            msgspec.structs.replace(submit, client=client, adapter=context.adapter)
            for submit in submits[low : low + most]
        ]
        now = time.monotonic()
        collector = OutputCollector(
            len(part), 1, stream=False, timings=app.traffic.timings, now=now, versioned=versioned
        )
        engine_client.submit(part, collector, now)
        async with attended(collector, engine_client, context):
            await whole(collector, context)
        vectors += vectors_of(collector)
        tokens += collector.usage.prompt_tokens
    context.outcome.prompt_tokens = tokens
    return Pooled(vectors, tokens)


def vectors_of(collector: OutputCollector) -> list[Vector]:
    """Of a reply that has ended without an error."""
    found = []
    for choice in collector.choices:
        assert choice.vector is not None, "a request that pools ends with its vector"
        found.append(np.frombuffer(choice.vector, "<f4"))
    return found


def shaped(vector: Vector, dimensions: int | None, *, normalize: bool) -> Vector:
    """Its first `dimensions` numbers (Matryoshka representations, Kusupati et al., 2022), scaled to length 1."""
    cut = vector if dimensions is None else vector[:dimensions]
    length = math.sqrt(float(np.square(cut, dtype=np.float64).sum()))
    return (cut / length).astype(np.float32) if normalize and length > 0.0 else cut


def check_dimensions(dimensions: int | None, model: ModelInfo, param: str = "dimensions") -> None:
    """Raise InvalidRequest unless a vector of the model can be cut to so many numbers."""
    if dimensions is not None and dimensions > model.hidden:
        raise invalid(param, f"is {dimensions}; the model's vectors have {model.hidden}")


def cosines(pairs: Iterable[tuple[Vector, Vector]]) -> list[float]:
    """Of each pair, in fp64; 0 where one has no length."""
    found = []
    for one, other in pairs:
        first, second = one.astype(np.float64), other.astype(np.float64)
        lengths = math.sqrt(float(first @ first) * float(second @ second))
        found.append(max(-1.0, min(1.0, float(first @ second) / lengths)) if lengths > 0.0 else 0.0)
    return found


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


async def create_embeddings(app: AppState, context: RequestContext) -> None:
    """Each text is an internal request of its own."""
    request = await read_vector_request(app, context, REQUEST)
    submits = submissions(request, app.model, context.trace)
    found = await pooled(app, context, request, submits)
    await context.send_json(await encoded(request, found, app.model, model_name(app, context)))


def submissions(request: EmbeddingRequest, model: ModelInfo, trace: TraceContext) -> list[SubmitText]:
    """A message for each text. Raises InvalidRequest naming the field."""
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
    request: VectorRequest, model: ModelInfo, text: Text, param: str, trace: TraceContext, *, special: bool = True
) -> SubmitText:
    """One text for its vector as the model makes it."""
    return vector_submission(request, text, Pooling(kind=model.pooler.kind, param=param), trace, special=special)


def check_pooler(model: ModelInfo) -> None:
    """Raise Unsupported if no vectors can be made with this model."""
    if model.pooler.unpooled:
        raise Unsupported(f"this model makes no vectors here: {model.pooler.unpooled}", param="model")


def vectors(request: EmbeddingRequest, found: Sequence[Vector], model: ModelInfo) -> list[Vector]:
    """Cut and scaled as the request, or else the model, wants them."""
    normalize = model.pooler.normalize if request.normalize is None else request.normalize
    return [shaped(vector, request.dimensions, normalize=normalize) for vector in found]


async def encoded(request: EmbeddingRequest, found: Pooled, model: ModelInfo, name: str) -> bytes:
    """An `EmbeddingAnswer` as JSON, with pauses: writing two million numbers takes as long as many tokens."""
    data = []
    for number, vector in enumerate(vectors(request, found.vectors, model)):
        values: list[float] | str = vector.tolist()
        if request.encoding_format == "base64":
            values = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append(msgspec.Raw(msgspec.json.encode(Embedding(index=number, embedding=values))))
        if number % PAUSE == PAUSE - 1:
            await asyncio.sleep(0)
    return msgspec.json.encode({"object": "list", "data": data, "model": name, "usage": found.usage})
