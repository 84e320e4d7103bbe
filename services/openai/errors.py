"""Errors as OpenAI sends them, `{"error": {message, type, param, code}}`, and as Anthropic does, in a response or in a
stream.

Source: OpenAI API reference, "Error codes"; the shape is `ErrorResponse` of its API description. Anthropic API
reference, "Errors".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.protocol.errors import ContextExceeded, RequestError

MESSAGES = "/v1/messages"  # the path of Messages, which with all below it answers as Anthropic does
VERSION_HEADER = b"anthropic-version"
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `param` is the field of the request, `code` a stable word."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct, frozen=True):
    """Body of every response that is not a success."""

    error: ErrorDetail


def encode(error: RequestError) -> bytes:
    """The error as JSON."""
    return msgspec.json.encode(ErrorResponse(ErrorDetail(error.message, error.type, error.param, error.code)))


class MessageErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `message` names the field of the request."""

    type: str
    message: str


class MessageError(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every response that is not a success."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None = None


def encode_for_messages(error: RequestError, request_id: str | None = None) -> bytes:
    """The error as JSON, with its field in front of the message where that does not name it."""
    message = error.message
    if isinstance(error, ContextExceeded):
        message = context_exceeded(error)
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    detail = MessageErrorDetail(ANTHROPIC_TYPES.get(error.status, "invalid_request_error"), message)
    return msgspec.json.encode(MessageError(error=detail, request_id=request_id))


def context_exceeded(error: ContextExceeded) -> str:
    """What exceeds the context as Anthropic tells it: clients take the numbers from it and ask for less."""
    if error.wanted and error.prompt < error.limit:
        return (
            f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.wanted} > {error.limit}, "
            "decrease input length or `max_tokens` and try again (--max-model-len, --clamp-max-tokens)"
        )
    return f"prompt is too long: {error.prompt} tokens > {error.limit} maximum (--max-model-len)"


def concerns(path: str) -> bool:
    """Whether what is answered on this path has Anthropic's shape."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")
