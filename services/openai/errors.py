"""Errors as OpenAI sends them: `{"error": {message, type, param, code}}`, in a response or in a stream.

Source: OpenAI API reference, "Error codes"; the shape is `ErrorResponse` of its API description.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.errors import RequestError


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong; `param` is the field of the request, `code` a stable word."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    """Body of every response that is not a success."""

    error: ErrorDetail


def encode(error: RequestError) -> bytes:
    """The error as JSON."""
    return msgspec.json.encode(ErrorResponse(ErrorDetail(error.message, error.type, error.param, error.code)))
