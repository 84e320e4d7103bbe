from __future__ import annotations

import copy
import re

import pytest

from penstock.protocol import errors
from penstock.protocol.errors import (
    REQUEST_ERRORS,
    ConfigError,
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PenstockError,
    RequestError,
    Unsupported,
    UnsupportedSchema,
    error_of,
)
from penstock.protocol.messages import Rejected


def kinds() -> list[type[Exception]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_error_is_ours(kind):
    assert issubclass(kind, PenstockError)


@pytest.mark.parametrize(("status", "kind"), REQUEST_ERRORS.items())
def test_a_status_leads_to_its_error(status, kind):
    error = kind("why", param="prompt", code="word")
    assert (error.status, error.message, error.param, error.code) == (status, "why", "prompt", "word")
    assert str(error) == "why"


def test_every_status_has_an_openai_type():
    found = {kind.status: kind.type for kind in kinds() if issubclass(kind, RequestError)}
    assert found == {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "invalid_request_error",
        409: "invalid_request_error",
        413: "invalid_request_error",
        415: "invalid_request_error",
        429: "rate_limit_error",
        431: "invalid_request_error",
        500: "server_error",
        501: "invalid_request_error",
        503: "service_unavailable",
        504: "timeout_error",
        505: "invalid_request_error",
    }


def requests() -> list[type[RequestError]]:
    return [kind for kind in kinds() if issubclass(kind, RequestError)]


@pytest.mark.parametrize("kind", requests(), ids=lambda kind: kind.__name__)
def test_every_refusal_has_a_code(kind: type[RequestError]) -> None:
    """Also where whoever refuses names none, and on its way from the process that refuses to the client."""
    assert re.fullmatch("[a-z_]+", kind.code)
    error = kind.__new__(kind)
    RequestError.__init__(error, "why", code=None)
    assert error.code == kind.code


@pytest.mark.parametrize("status", sorted({kind.status for kind in requests()}))
def test_a_rejection_without_a_code_gets_one(status: int) -> None:
    assert error_of(Rejected(id=1, status=status, message="why")).code
    assert error_of(Rejected(id=1, status=status, message="why", code="")).code


def test_what_is_not_built_is_a_400_that_says_so():
    error = Unsupported("tools are not supported", param="tools")
    assert (error.status, error.code, error.param) == (400, "unsupported", "tools")


def test_overload_tells_when_to_come_back():
    error = Overloaded("full", retry_after=2.5)
    assert (error.status, error.retry_after, error.code) == (429, 2.5, "overloaded")


def test_a_config_error_names_option_value_and_what_is_allowed():
    error = ConfigError("--port", 70000, "it must be between 0 and 65535")
    assert str(error) == "--port: 70000 is not allowed; it must be between 0 and 65535"
    assert (error.option, error.value, error.allowed) == ("--port", 70000, "it must be between 0 and 65535")


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("m", param="p", code="c"),
        ContextExceeded("m", param="p", prompt=3, wanted=2, limit=4),
        UnsupportedSchema("type", "/a", "why"),
        Overloaded("m", retry_after=2.0),
        DeadlineExceeded("m"),
    ],
)
def test_a_copy_says_the_same_and_holds_no_frames(error: RequestError) -> None:
    try:
        raise error
    except RequestError as raised:
        made = copy.copy(raised)
    assert type(made) is type(error)
    assert (str(made), vars(made)) == (str(error), vars(error))
    assert made.__traceback__ is None
