"""The routes of the api, as one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.protocol.errors import NotFound
from penstock.services.http import request_context as exchange
from penstock.services.http.allowed_hosts import Hosts
from penstock.services.http.cors import Origins
from penstock.services.http.middleware import Gate
from penstock.services.http.static_files import FILES, StaticFile
from penstock.services.openai.app_state import Service
from penstock.services.openai.chat import ChatCompletions
from penstock.services.openai.cohere import Embed
from penstock.services.openai.completions import Completions
from penstock.services.openai.embeddings import Embeddings
from penstock.services.openai.health import HealthReport, Liveness, MetricsText, Readiness, Version
from penstock.services.openai.invocations import Invocations
from penstock.services.openai.messages.endpoint import Messages, MessageTokens
from penstock.services.openai.models import Models
from penstock.services.openai.openapi import Description
from penstock.services.openai.responses.endpoint import (
    BackgroundWork,
    CancelledResponse,
    InputItems,
    Responses,
    StoredResponse,
)
from penstock.services.openai.scoring import Reranks, Scores
from penstock.services.openai.tokenization import DetokenizeText, TokenizerInfo, TokenizeText

MOST_SHOWN = 200  # characters of a path


class Endpoint:
    """An endpoint under its route's name in the metrics and the log, whatever the path held."""

    def __init__(self, path: str, app: ASGIApp) -> None:
        self._name = path.replace(":path", "")
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange.of(scope).endpoint = self._name
        await self._app(scope, receive, send)


WRONG_OUTPUT = b"x-penstock-wrong-output"


class Routes:
    """The router; it raises HTTPException for an unknown path or a wrong method, which the gate answers."""

    def __init__(self, service: Service, background: BackgroundWork | None = None) -> None:
        background = background or BackgroundWork(service)
        invoked: dict[str, ASGIApp] = {
            "/v1/chat/completions": ChatCompletions(service),
            "/v1/completions": Completions(service),
            "/v1/embeddings": Embeddings(service),
            "/v1/score": Scores(service),
            "/v1/rerank": Reranks(service, documents=True),
        }
        endpoints: tuple[tuple[str, str, ASGIApp], ...] = (
            *(("POST", path, app) for path, app in invoked.items()),
            ("POST", "/invocations", Invocations(service, invoked)),
            ("POST", "/score", invoked["/v1/score"]),
            ("POST", "/rerank", invoked["/v1/rerank"]),
            ("POST", "/v2/embed", Embed(service)),
            ("POST", "/v2/rerank", Reranks(service, documents=False)),
            ("POST", "/v1/responses", Responses(service, background)),
            ("GET DELETE", "/v1/responses/{id}", StoredResponse(service, background)),
            ("GET", "/v1/responses/{id}/input_items", InputItems(service)),
            ("POST", "/v1/responses/{id}/cancel", CancelledResponse(service, background)),
            ("POST", "/v1/messages", Messages(service)),
            ("POST", "/v1/messages/count_tokens", MessageTokens(service)),
            ("GET", "/v1/models", Models(service)),
            ("GET", "/v1/models/{name:path}", Models(service)),
            ("POST", "/tokenize", TokenizeText(service)),
            ("POST", "/detokenize", DetokenizeText(service)),
            ("GET", "/tokenizer_info", TokenizerInfo(service)),
            ("GET POST", "/ping", Readiness(service)),
            ("GET", "/health", HealthReport(service)),
            ("GET", "/health/live", Liveness()),
            ("GET", "/health/ready", Readiness(service)),
            ("GET", "/version", Version()),
            ("GET", "/metrics", MetricsText(service)),
            ("GET", "/openapi.json", Description(service)),
            *(("GET", path, StaticFile(file)) for path, file in FILES.items()),
        )
        routes = [Route(path, Endpoint(path, app), methods=methods.split()) for methods, path, app in endpoints]
        self._paths = frozenset(path for _, path, _ in endpoints)
        self._router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # starlette's sign that errors of routing are raised, not answered in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            near = self._near(scope["path"]) if error.status_code == NotFound.status else ""
            if not near:
                raise
            path = scope["path"][:MOST_SHOWN]
            raise NotFound(f"there is nothing at {path}; {near} is served", code="unknown_path") from error

    def _near(self, path: str) -> str:
        """The path that is meant where a base URL lacks its /v1 or has it twice, or a slash is too many; or none."""
        bare = path.rstrip("/")
        others = (bare, "/v1" + bare, bare.removeprefix("/v1"))
        return next((other for other in others if other in self._paths), "")


def application(service: Service, background: BackgroundWork | None = None) -> Gate:
    """The whole application; `background` is for whoever waits for it at the end."""
    options = service.config.api
    return Gate(
        Routes(service, background),
        service.keys,
        Hosts(options),
        Origins(options),
        service.traffic,
        request_timeout=options.request_timeout,
        max_queued_bytes=options.max_queued_bytes,
        always=warnings(service.model.wrong_output),
        tracer=service.tracer,
    )


def warnings(reasons: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The header that every answer of a server carries whose output is wrong."""
    return [(WRONG_OUTPUT, "; ".join(reasons).encode())] if reasons else []
