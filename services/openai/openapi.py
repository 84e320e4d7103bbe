"""GET /openapi.json: OpenAPI 3.1 made from the types that decode the requests and encode the answers.

Source: OpenAPI Specification 3.1.0; schemas are JSON Schema 2020-12 as msgspec writes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig
from penstock.protocol.control import PauseMode
from penstock.protocol.version import VERSION
from penstock.services.http.routing import Access, Route
from penstock.services.openai.errors import ErrorResponse, MessageError, concerns
from penstock.services.openai.health import Health
from penstock.services.openai.messages.request import REFUSALS as MESSAGE_REFUSALS
from penstock.services.openai.messages.request import WITHOUT_EFFECT as MESSAGE_WITHOUT_EFFECT
from penstock.services.openai.messages.request import MessageRequest
from penstock.services.openai.parameters import UNSUPPORTED, WITHOUT_EFFECT, limit_of
from penstock.services.openai.responses.endpoint import MAX_PAGE, PAGE
from penstock.services.openai.responses.request import REFUSALS as RESPONSE_REFUSALS
from penstock.services.openai.responses.request import RESPONSE_WITHOUT_EFFECT, ResponseRequest
from penstock.services.openai.schema import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
)
from penstock.services.openai.structured_output import ResponseFormat, StructuredOutputs
from penstock.services.openai.tools import Tool, ToolChoice
from penstock.services.openai.validation import LIMIT_OPTIONS, NO, YES

JSON = "application/json"
STREAM = "text/event-stream"


PLACE = re.compile(r"\{(\w+)\}")
MOST: Mapping[str, str] = {"integer": "maximum", "array": "maxItems", "object": "maxProperties"}
STREAM_QUERY: Mapping[str, Any] = {
    "name": "stream", "in": "query", "description": "as the field of the body, where that is silent",
    "schema": {"enum": [*YES, *NO]},
}  # fmt: skip
PAGE_QUERY: tuple[Mapping[str, Any], ...] = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "description": "id of an item", "schema": {"type": "string"}},
)  # fmt: skip
PAUSE_QUERY: tuple[Mapping[str, Any], ...] = (
    {"name": "mode", "in": "query", "schema": {"enum": list(PauseMode), "default": PauseMode.ABORT}},
    {"name": "clear_cache", "in": "query", "schema": {"type": "boolean", "default": True}},
)  # fmt: skip
SLEEP_QUERY: tuple[Mapping[str, Any], ...] = (
    {"name": "level", "in": "query", "schema": {"enum": [1, 2], "default": 1}},
)
WORLD_QUERY: tuple[Mapping[str, Any], ...] = (
    {"name": "include_dp", "in": "query", "schema": {"type": "boolean", "default": True}},
)
EVENT: Mapping[str, Any] = {
    "description": "one event of the stream: `data` is a chunk or an error as JSON, and `[DONE]` at the end",
    "type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"],
}  # fmt: skip
REQUEST_ID: Mapping[str, Any] = {
    "description": "the client's own X-Request-Id if it is printable and short, else one of the server's",
    "schema": {"type": "string"},
}


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
    409: "It does not go with the state that the server is in",
    429: "Too many requests are unfinished; see Retry-After",
    500: "The engine failed on this request",
    503: "The server is loading, draining or missing a part",
    504: "The request took longer than it may: `timeout`, X-Request-Timeout or --request-timeout",
}


def document(routes: Sequence[Route], options: ApiConfig, *, locked: bool) -> dict[str, Any]:
    """The description of `routes`, with the limits of `options`. `locked`: the server has keys."""
    paths: dict[str, Any] = {}
    described = [route for route in routes if route.summary]
    for route in described:
        paths.setdefault(route.name, {})[route.method.lower()] = operation(route, locked)
    components: dict[str, Any] = {"schemas": schemas(described, options), "headers": {"request": REQUEST_ID}}
    if locked:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": VERSION, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": components,
    }


def operation(route: Route, locked: bool) -> dict[str, Any]:
    content: dict[str, Any] = {route.media: {"schema": {"type": "string"}}}
    if route.answer is not None:
        content = {JSON: {"schema": reference(route.answer)}}
    if route.streams:
        content[STREAM] = {"schema": EVENT}
    responses: dict[str, Any] = {"200": {"description": "Success", "content": content}}
    closed = locked and route.access is Access.KEY
    for status in sorted({*route.statuses, *((401,) if closed else ())}):
        failure = failure_of(route)
        responses[str(status)] = {
            "description": STATUS_TEXTS[status], "content": {JSON: {"schema": reference(failure)}}
        }  # fmt: skip
    for response in responses.values():
        response["headers"] = {"X-Request-Id": {"$ref": "#/components/headers/request"}}
    found: dict[str, Any] = {
        "operationId": route.summary.lower().replace(" ", "_").replace("'", ""),
        "summary": route.summary,
        "responses": responses,
    }
    if closed:
        found["security"] = [{"key": []}]
    placed = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PLACE.findall(route.name)
    ]
    if parameters := [*placed, *route.query, *((STREAM_QUERY,) if route.streams else ())]:
        found["parameters"] = parameters
    if route.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": reference(route.body)}}}
    return found


def failure_of(route: Route) -> type:
    """What a response that is no success holds."""
    if concerns(route.path):
        return MessageError
    return Health if route.answer is Health else ErrorResponse


def reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def schemas(routes: Sequence[Route], options: ApiConfig) -> dict[str, Any]:
    """Every struct that crosses HTTP. What is decoded in a second pass stands as it is decoded there."""
    components: dict[str, Any] = structs(routes)
    if "ChatRequest" not in components:
        return components  # the operator's
    messages = {"type": "array", "minItems": 1, "items": reference(ChatMessage)}
    arguments = {"anyOf": [{"type": "object"}, {"type": "null"}], "default": None}
    components["ChatRequest"]["properties"] |= {"messages": messages, "chat_template_kwargs": arguments}
    components["ChatRequest"]["properties"] |= tool_properties()
    components["TokenizeRequest"]["properties"] |= {"messages": messages, "chat_template_kwargs": arguments}
    for kind, without, refused in DESCRIBED:
        schema = components[kind.__name__]
        effects = f"Accepted without effect: {', '.join(without)}. Not supported, refused: {', '.join(refused)}."
        schema["description"] = f"{schema.get('description', '')} {effects}".strip()
    for kind in (ChatRequest, CompletionRequest):
        schema = components[kind.__name__]
        for name, form in (("response_format", ResponseFormat), ("structured_outputs", StructuredOutputs)):
            schema["properties"][name] = {"anyOf": [reference(form), {"type": "null"}], "default": None}
        for name in LIMIT_OPTIONS.keys() & schema["properties"].keys():
            bound(schema["properties"][name], limit_of(name, options))
    return components


def structs(routes: Sequence[Route]) -> dict[str, Any]:
    """The types alone, by name."""
    kinds = {route.body for route in routes} | {route.answer for route in routes}
    roots = sorted((kind for kind in kinds if kind is not None), key=name_of)
    roots += [ErrorResponse, MessageError, ChatMessage, ResponseFormat, StructuredOutputs, Tool, ToolChoice]
    _, found = msgspec.json.schema_components(roots, ref_template="#/components/schemas/{name}", schema_hook=free)
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(found))  # with lists, as JSON has them
    return plain


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
