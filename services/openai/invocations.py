"""POST /invocations, where Amazon SageMaker sends every request: what the body holds says which endpoint it is for.

Source: Amazon SageMaker developer guide, "Custom inference code with hosting services", as vLLM reads it.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.protocol.errors import InvalidRequest
from penstock.services.http import request_context as exchange
from penstock.services.openai.app_state import Service
from penstock.services.openai.validation import raw_fields, read_json

# Fields of a body → the path whose body has them; the first that fits.
PATHS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(("messages",)), "/v1/chat/completions"),
    (frozenset(("prompt",)), "/v1/completions"),
    (frozenset(("text_1", "text_2")), "/v1/score"),
    (frozenset(("query", "documents")), "/v1/rerank"),
    (frozenset(("input",)), "/v1/embeddings"),
)


class Invocations:
    """Hands a request to the one of `apps`, by path, that it is for."""

    def __init__(self, service: Service, apps: Mapping[str, ASGIApp]) -> None:
        self._service = service
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json(scope, receive, self._service.config.api)
        names = raw_fields(body).keys()
        path = next((path for fields, path in PATHS if fields <= names), None)
        if path is None:
            known = "; ".join(" and ".join(sorted(fields)) for fields, _ in PATHS)
            raise InvalidRequest(f"the body is for no endpoint: it holds none of {known}", code="invalid_value")
        exchange.of(scope).body = body
        del body
        await self._apps[path](scope, receive, send)
