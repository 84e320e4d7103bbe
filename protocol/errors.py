"""Errors that a user or an operator can cause, and what they map to.

    PenstockError
    ├── RequestError                 one request is wrong or cannot be served; carries HTTP status and OpenAI error type
    │   ├── InvalidRequest           400 invalid_request_error
    │   │   ├── ContextExceeded      400 invalid_request_error, code "context_length_exceeded"
    │   │   ├── GrammarFailure       400 invalid_request_error, code "grammar_failed"
    │   │   ├── Unsupported          400 invalid_request_error, code "unsupported"
    │   │   └── UnsupportedSchema    400 invalid_request_error, code "unsupported_schema"
    │   ├── Unauthorized             401 authentication_error
    │   ├── Forbidden                403 permission_error
    │   ├── NotFound                 404 not_found_error
    │   ├── MethodNotAllowed         405 invalid_request_error
    │   ├── RequestTimeout           408 invalid_request_error
    │   ├── Conflict                 409 invalid_request_error
    │   ├── PayloadTooLarge          413 invalid_request_error
    │   ├── UnsupportedMediaType     415 invalid_request_error
    │   ├── HeadTooLarge             431 invalid_request_error
    │   ├── Overloaded               429 rate_limit_error
    │   ├── EngineFailure            500 server_error
    │   ├── UnknownCoding            501 invalid_request_error
    │   ├── Unavailable              503 service_unavailable
    │   ├── DeadlineExceeded         504 timeout_error
    │   └── UnknownVersion           505 invalid_request_error
    ├── ConfigError                  an option of the command line or the config file
    │   └── AddressError             the address to listen on is taken or not this machine's
    ├── ModelError                   the model folder: a missing, truncated or misshapen file, an unknown architecture
    └── LinkError                    a peer process: refused handshake, wrong version, lost

Only RequestError reaches a client; its message never holds a path, a prompt or a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from penstock.protocol.messages import ContextLength, Rejected


class PenstockError(Exception):
    """Root of every error that is not a bug of ours."""


class RequestError(PenstockError):
    """One request ends with this error. `param` names the request's field in OpenAI's notation. `code` is a word that
    clients can compare; each class has one for what nothing more exact is said of."""

    status: int = 500
    type: str = "server_error"
    code: str = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code:
            self.code = code

    def __copy__(self) -> Self:
        """The same without its traceback, whatever its class is made from."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made


class InvalidRequest(RequestError):
    """A wrong type, an out-of-range value, an over-long prompt, a malformed body."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class ContextExceeded(InvalidRequest):
    """The prompt, or prompt and output together, have more tokens than the model's context. `wanted` is the output that
    was asked for, 0 where the prompt alone is too long."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None, prompt: int, wanted: int, limit: int) -> None:
        super().__init__(message, param=param)
        self.prompt = prompt
        self.wanted = wanted
        self.limit = limit


class Unsupported(InvalidRequest):
    """A known parameter or value that Penstock does not support. Refused, never ignored."""

    code = "unsupported"


class GrammarFailure(InvalidRequest):
    """The automaton of this request's output met a limit while it ran, and would again. The output until then followed
    it."""

    code = "grammar_failed"


class UnsupportedSchema(InvalidRequest):
    """A JSON Schema is wrong, or asks for what no automaton can hold exactly. `path` is a JSON pointer into it."""

    code = "unsupported_schema"

    def __init__(self, keyword: str, path: str, reason: str) -> None:
        super().__init__(f"{keyword} at {path or '/'}: {reason}", param="response_format")
        self.keyword = keyword
        self.path = path


class Unauthorized(RequestError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(RequestError):
    """An origin or a host name that this server does not answer."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(RequestError):
    status, type, code = 404, "not_found_error", "not_found"


class MethodNotAllowed(RequestError):
    """`allowed` is the value of the header Allow."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, allowed: str = "") -> None:
        super().__init__(message, param=param, code=code)
        self.allowed = allowed


class RequestTimeout(RequestError):
    """The client did not send its request in time."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class HeadTooLarge(RequestError):
    """Request line and headers; RFC 6585, section 5."""

    status, type, code = 431, "invalid_request_error", "head_too_large"


class Conflict(RequestError):
    """What is asked does not go with the state that the server is in."""

    status, type, code = 409, "invalid_request_error", "conflict"


class PayloadTooLarge(RequestError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMediaType(RequestError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(RequestError):
    """The queue is full. `retry_after` is in seconds and becomes the Retry-After header."""

    status, type, code = 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineFailure(RequestError):
    """The engine failed this request (non-finite logits, a lost process); a retry may succeed."""


class UnknownCoding(RequestError):
    """A transfer coding other than chunked; RFC 9112, section 6.1."""

    status, type, code = 501, "invalid_request_error", "unsupported_transfer_coding"


class UnknownVersion(RequestError):
    """A version of HTTP other than 1.0 and 1.1; RFC 9110, section 15.6.6."""

    status, type, code = 505, "invalid_request_error", "http_version_not_supported"


class Unavailable(RequestError):
    """The server is loading, draining or missing a part. `retry_after` is in seconds, where a retry may help."""

    status, type, code = 503, "service_unavailable", "unavailable"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The request's own timeout, or the server's, ended before its answer."""

    # as google.rpc.Code has it for DEADLINE_EXCEEDED
    status, type, code = 504, "timeout_error", "deadline_exceeded"


class ConfigError(PenstockError):
    """An option is wrong: its name as typed, the value given, or None without one, and what is allowed."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option}: {allowed}" if value is None else f"{option}: {value!r} is not allowed; {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed


class AddressError(ConfigError):
    """The address of --host and --port cannot be listened on."""


class ModelError(PenstockError):
    """The model folder cannot be served; the message names the file."""


class LinkError(PenstockError):
    """A peer process was refused or lost; the message says which side to fix."""


REQUEST_ERRORS: Mapping[int, type[RequestError]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    413: PayloadTooLarge,
    415: UnsupportedMediaType,
    500: EngineFailure,
    503: Unavailable,
}


def rejection(request: int, error: RequestError) -> Rejected:
    """The message that ends a request with this error."""
    context = None
    if isinstance(error, ContextExceeded):
        context = ContextLength(error.prompt, error.wanted, error.limit)
    return Rejected(
        id=request, status=error.status, message=error.message, param=error.param, code=error.code, context=context,
        retry_after=error.retry_after if isinstance(error, Overloaded) else None,
    )  # fmt: skip


def error_of(rejected: Rejected) -> RequestError:
    """The error of a rejected request: the inverse of `rejection`."""
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
    return kind(rejected.message, param=rejected.param, code=rejected.code)


def invalid(param: str, why: str, code: str | None = None) -> InvalidRequest:
    """The error of a field. Its message is the field's name and how it goes on: behind a space, or with a colon."""
    return InvalidRequest(joined(param, why), param=param, code=code)


def unsupported(param: str, why: str) -> Unsupported:
    """The same of one that Penstock does not support."""
    return Unsupported(joined(param, why), param=param)


def joined(param: str, why: str) -> str:
    return param + why if why.startswith(":") else f"{param} {why}"
