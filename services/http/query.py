"""The query of a URL, as far as it says what the body may say too: `?stream=true`."""

from __future__ import annotations

from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Scope

from penstock.protocol.errors import InvalidRequest
from penstock.services.openai.messages.request import MessageRequest
from penstock.services.openai.responses.request import ResponseRequest
from penstock.services.openai.schema import GenerationRequest

R = TypeVar("R", bound=GenerationRequest | MessageRequest | ResponseRequest)

YES = ("true", "True", "1", "")
NO = ("false", "False", "0")


def with_query(request: R, scope: Scope) -> R:
    """`request` with what the query adds where the body is silent. Raises InvalidRequest for what makes no sense."""
    said = stream_asked(scope)
    return request if said is None or request.stream is not None else msgspec.structs.replace(request, stream=said)


def stream_asked(scope: Scope) -> bool | None:
    """What the query says about `stream`; None: nothing."""
    query = scope["query_string"]
    if not query:
        return None
    said = [value for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if name == "stream"]
    if not said:
        return None
    if len(said) > 1 or said[0] not in YES + NO:
        raise InvalidRequest("stream must be true or false in the query", param="stream", code="invalid_value")
    return said[0] in YES
