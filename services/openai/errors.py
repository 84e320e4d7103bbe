"""Errors as OpenAI sends them: `{"error": {message, type, param, code}}`, in a response or in a stream.

Source: OpenAI API reference, "Error codes"; the shape is `ErrorResponse` of its API description.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.errors import (
    REQUEST_ERRORS,
    ContextExceeded,
    EngineFailure,
    Overloaded,
    RequestError,
    Unavailable,
)
from penstock.protocol.messages import Rejected


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


def from_rejected(rejected: Rejected) -> RequestError:
    """The error that a later part refused the request with."""
    if rejected.status == 429:
        return Overloaded(rejected.message, retry_after=rejected.retry_after or 1.0)
    if rejected.status == Unavailable.status:
        return Unavailable(rejected.message, code=rejected.code, retry_after=rejected.retry_after)
    if rejected.context is not None:
        length = rejected.context
        return ContextExceeded(
            rejected.message, param=rejected.param, prompt=length.prompt, wanted=length.wanted, limit=length.limit
        )
    kind = REQUEST_ERRORS.get(rejected.status, EngineFailure)
    error = kind(rejected.message, param=rejected.param)
    error.code = rejected.code or error.code
    return error
