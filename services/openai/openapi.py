"""GET /openapi.json: OpenAPI 3.1 made from the types that decode the requests and encode the answers.

Source: OpenAPI Specification 3.1.0; schemas are JSON Schema 2020-12 as msgspec writes them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig
from penstock.protocol.version import VERSION
from penstock.services.http import query
from penstock.services.openai.answers import ChatAnswer, CompletionAnswer
from penstock.services.openai.app_state import Service
from penstock.services.openai.cohere import EmbedAnswer, EmbedRequest
from penstock.services.openai.embeddings import EmbeddingAnswer, EmbeddingRequest
from penstock.services.openai.errors import ErrorResponse, send_json
from penstock.services.openai.health import Health, StatusAnswer, VersionAnswer
from penstock.services.openai.messages.errors import MessageError, concerns
from penstock.services.openai.messages.output import MessageAnswer, TokenCount
from penstock.services.openai.messages.request import REFUSALS as MESSAGE_REFUSALS
from penstock.services.openai.messages.request import WITHOUT_EFFECT as MESSAGE_WITHOUT_EFFECT
from penstock.services.openai.messages.request import CountRequest, MessageRequest
from penstock.services.openai.models import ModelAnswer, ModelList
from penstock.services.openai.parameters import UNSUPPORTED, WITHOUT_EFFECT, limit_of
from penstock.services.openai.responses.endpoint import MAX_PAGE, PAGE
from penstock.services.openai.responses.output import Deleted, ItemList, ResponseAnswer
from penstock.services.openai.responses.request import REFUSALS as RESPONSE_REFUSALS
from penstock.services.openai.responses.request import RESPONSE_WITHOUT_EFFECT, ResponseRequest
from penstock.services.openai.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from penstock.services.openai.scoring import RerankAnswer, RerankRequest, ScoreAnswer, ScoreRequest
from penstock.services.openai.structured_output import ResponseFormat, StructuredOutputs
from penstock.services.openai.tokenization import DetokenizeAnswer, TokenizeAnswer, TokenizerInfoAnswer
from penstock.services.openai.tools import Tool, ToolChoice
from penstock.services.openai.validation import LIMIT_OPTIONS

JSON = "application/json"
STREAM = "text/event-stream"


PLACE = re.compile(r"\{(\w+)\}")
MOST: Mapping[str, str] = {"integer": "maximum", "array": "maxItems", "object": "maxProperties"}
STREAM_QUERY: Mapping[str, Any] = {
    "name": "stream", "in": "query", "description": "as the field of the body, where that is silent",
    "schema": {"enum": [*query.YES, *query.NO]},
}  # fmt: skip
PAGE_QUERY: tuple[Mapping[str, Any], ...] = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "description": "id of an item", "schema": {"type": "string"}},
)  # fmt: skip
EVENT: Mapping[str, Any] = {
    "description": "one event of the stream: `data` is a chunk or an error as JSON, and `[DONE]` at the end",
    "type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"],
}  # fmt: skip
REQUEST_ID: Mapping[str, Any] = {
    "description": "the client's own X-Request-Id if it is printable and short, else one of the server's",
    "schema": {"type": "string"},
}


class Operation(msgspec.Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type | None  # None: text of the kind `media`
    body: type | None = None
    streams: bool = False
    open: bool = False  # needs no key
    statuses: tuple[int, ...] = ()
    media: str = "text/plain"
    query: tuple[Mapping[str, Any], ...] = ()


GENERATION_STATUSES = (400, 404, 408, 413, 415, 429, 500, 503, 504)
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a chat", ChatAnswer, ChatRequest, True, False,
              GENERATION_STATUSES),
    Operation("post", "/v1/completions", "Continue prompts", CompletionAnswer, CompletionRequest, True, False,
              GENERATION_STATUSES),
    Operation("post", "/v1/responses", "Make a response", ResponseAnswer, ResponseRequest, True, False,
              GENERATION_STATUSES),
    Operation("get", "/v1/responses/{id}", "A response that is kept", ResponseAnswer, statuses=(400, 404),
              query=(STREAM_QUERY,)),
    Operation("delete", "/v1/responses/{id}", "Forget a response", Deleted, statuses=(404,)),
    Operation("get", "/v1/responses/{id}/input_items", "List the input of a response", ItemList, statuses=(400, 404),
              query=PAGE_QUERY),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a response", ResponseAnswer, statuses=(400, 404)),
    Operation("post", "/v1/messages", "Make a message", MessageAnswer, MessageRequest, True, False,
              GENERATION_STATUSES),
    Operation("post", "/v1/messages/count_tokens", "Count the tokens of a message", TokenCount, CountRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/v1/embeddings", "Vectors of texts", EmbeddingAnswer, EmbeddingRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/v1/score", "Score pairs of texts", ScoreAnswer, ScoreRequest, statuses=GENERATION_STATUSES),
    Operation("post", "/v1/rerank", "Rank documents", RerankAnswer, RerankRequest, statuses=GENERATION_STATUSES),
    Operation("post", "/rerank", "Rank documents, by Jina's path", RerankAnswer, RerankRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/v2/rerank", "Rank documents, by Cohere's path", RerankAnswer, RerankRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/score", "Score pairs of texts, by vLLM's path", ScoreAnswer, ScoreRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/v2/embed", "Vectors of texts, as Cohere's clients ask", EmbedAnswer, EmbedRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/invocations", "Answer what the body is for, as SageMaker asks", ChatAnswer, ChatRequest, True,
              False, GENERATION_STATUSES),
    Operation("get", "/v1/models", "List the served names", ModelList),
    Operation("get", "/v1/models/{name}", "One served name", ModelAnswer, statuses=(404,)),
    Operation("post", "/tokenize", "Token ids of a text or a chat", TokenizeAnswer, TokenizeRequest,
              statuses=GENERATION_STATUSES),
    Operation("post", "/detokenize", "Text of token ids", DetokenizeAnswer, DetokenizeRequest,
              statuses=GENERATION_STATUSES),
    Operation("get", "/tokenizer_info", "The tokenizer's configuration", TokenizerInfoAnswer),
    Operation("get", "/ping", "Requests are taken, by SageMaker's path", StatusAnswer, open=True, statuses=(503,)),
    Operation("post", "/ping", "Requests are taken, asked with POST", StatusAnswer, open=True, statuses=(503,)),
    Operation("get", "/health", "State of every part", Health, statuses=(503,)),
    Operation("get", "/health/live", "The process runs", StatusAnswer, open=True),
    Operation("get", "/health/ready", "Requests are taken", StatusAnswer, open=True, statuses=(503,)),
    Operation("get", "/version", "Penstock's version", VersionAnswer),
    Operation("get", "/metrics", "Prometheus text", None),
    Operation("get", "/", "A page to talk to the model", None, open=True, media="text/html"),
)  # fmt: skip

# Request → what it may hold without effect, and what it is refused for.
DESCRIBED = (
    (ChatRequest, WITHOUT_EFFECT, tuple(UNSUPPORTED)),
    (CompletionRequest, WITHOUT_EFFECT, tuple(UNSUPPORTED)),
    (ResponseRequest, RESPONSE_WITHOUT_EFFECT, tuple(RESPONSE_REFUSALS)),
    (MessageRequest, MESSAGE_WITHOUT_EFFECT, tuple(MESSAGE_REFUSALS)),
)
STATUS_TEXTS: Mapping[int, str] = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    404: "Nothing has this name",
    408: "The body came too slowly; see --body-timeout",
    413: "The body is larger than --max-body-bytes",
    415: "The body is not JSON",
    429: "Too many requests are unfinished; see Retry-After",
    500: "The engine failed on this request",
    503: "The server is loading, draining or missing a part",
    504: "The request took longer than it may: `timeout`, X-Request-Timeout or --request-timeout",
}


class Description:
    """The endpoint; the document is made once."""

    def __init__(self, service: Service) -> None:
        self._body = msgspec.json.encode(document(service.config.api, locked=service.keys.locked))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._body)


def document(options: ApiConfig, *, locked: bool) -> dict[str, Any]:
    """The whole description, with the limits of `options`. `locked`: every route but the open ones needs the key."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = described(operation, locked)
    components: dict[str, Any] = {"schemas": schemas(options), "headers": {"request": REQUEST_ID}}
    if locked:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": components,
    }


def described(operation: Operation, locked: bool) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {"schema": {"type": "string"}}}
    if operation.answer is not None:
        content = {JSON: {"schema": reference(operation.answer)}}
    if operation.streams:
        content[STREAM] = {"schema": EVENT}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    closed = locked and not operation.open
    for status in sorted({*operation.statuses, *((401,) if closed else ())}):
        failure = failure_of(operation)
        responses[str(status)] = {
            "description": STATUS_TEXTS[status], "content": {JSON: {"schema": reference(failure)}}
        }  # fmt: skip
    for response in responses.values():
        response["headers"] = {"X-Request-Id": {"$ref": "#/components/headers/request"}}
    found: dict[str, Any] = {
        "operationId": operation.summary.lower().replace(" ", "_").replace("'", ""),
        "summary": operation.summary,
        "responses": responses,
    }
    if closed:
        found["security"] = [{"key": []}]
    placed = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PLACE.findall(operation.path)
    ]
    if parameters := [*placed, *operation.query, *((STREAM_QUERY,) if operation.streams else ())]:
        found["parameters"] = parameters
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": reference(operation.body)}}}
    return found


def failure_of(operation: Operation) -> type:
    """What a response that is no success holds."""
    if concerns(operation.path):
        return MessageError
    return Health if operation.answer is Health else ErrorResponse


def reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def schemas(options: ApiConfig) -> dict[str, Any]:
    """Every struct that crosses HTTP. What is decoded in a second pass stands as it is decoded there."""
    components: dict[str, Any] = msgspec.json.decode(structs())
    messages = {"type": "array", "minItems": 1, "items": reference(ChatMessage)}
    arguments = {"anyOf": [{"type": "object"}, {"type": "null"}], "default": None}
    components["ChatRequest"]["properties"] |= {"messages": messages, "chat_template_kwargs": arguments}
    components["ChatRequest"]["properties"] |= tool_properties()
    components["TokenizeRequest"]["properties"] |= {"messages": messages, "chat_template_kwargs": arguments}
    for kind, without, refused in DESCRIBED:
        schema = components[kind.__name__]
        effects = f"Accepted without effect: {', '.join(without)}. Refused, not built: {', '.join(refused)}."
        schema["description"] = f"{schema.get('description', '')} {effects}".strip()
    for kind in (ChatRequest, CompletionRequest):
        schema = components[kind.__name__]
        for name, form in (("response_format", ResponseFormat), ("structured_outputs", StructuredOutputs)):
            schema["properties"][name] = {"anyOf": [reference(form), {"type": "null"}], "default": None}
        for name in LIMIT_OPTIONS.keys() & schema["properties"].keys():
            bound(schema["properties"][name], limit_of(name, options))
    return components


@functools.lru_cache(maxsize=1)  # looking at all types takes 40 ms, and they stay what they are
def structs() -> bytes:
    """The types alone, by name, as JSON."""
    kinds = {operation.body for operation in OPERATIONS} | {operation.answer for operation in OPERATIONS}
    roots = sorted((kind for kind in kinds if kind is not None), key=name_of)
    roots += [ErrorResponse, MessageError, ChatMessage, ResponseFormat, StructuredOutputs, Tool, ToolChoice]
    _, found = msgspec.json.schema_components(roots, ref_template="#/components/schemas/{name}", schema_hook=free)
    return msgspec.json.encode(found)


def bound(schema: dict[str, Any], most: int) -> None:
    """Let the numbers, lists and objects that `schema` allows hold no more than `most`."""
    for form in schema.get("anyOf", [schema]):
        word = MOST.get(form.get("type", ""))
        if word:
            form[word] = most


def tool_properties() -> dict[str, Any]:
    """`tools` and `tool_choice` as `services.openai.tools` decodes them."""
    words = {"enum": ["none", "auto", "required"]}
    tools = {"type": "array", "items": reference(Tool), "maxItems": limits.MAX_TOOLS}
    return {
        "tools": {"anyOf": [tools, {"type": "null"}], "default": None},
        "tool_choice": {"anyOf": [words, reference(ToolChoice), {"type": "null"}], "default": None},
    }


def free(kind: type) -> dict[str, Any]:
    """Schema of a type that msgspec has none for: any JSON will do."""
    assert kind is object
    return {}


def name_of(kind: type) -> str:
    return kind.__name__
