"""The outermost layer: names each exchange, asks who calls, turns errors into responses, logs and counts.

A preflight comes before the key, since browsers send none with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.protocol.errors import (
    EngineFailure,
    MethodNotAllowed,
    NotFound,
    RequestError,
    RequestTimeout,
    Unauthorized,
)
from penstock.services.client.session import tenant_of
from penstock.services.http import request_context as exchange
from penstock.services.http.allowed_hosts import Hosts
from penstock.services.http.api_keys import Keys
from penstock.services.http.connection import LATE
from penstock.services.http.cors import Origins
from penstock.services.http.disconnect import ClientLeft
from penstock.services.http.request_context import Bodies, Exchange
from penstock.services.http.static_files import FILES
from penstock.services.metrics.requests import Traffic
from penstock.services.openai.errors import headers, send_error, send_json
from penstock.services.openai.messages import errors as messages
from penstock.services.supervisor import logs
from penstock.services.tracing import names
from penstock.services.tracing.propagation import client_context, unsampled
from penstock.services.tracing.request import ServerSpan
from penstock.services.tracing.tracer import Tracer

log = logging.getLogger(__name__)

# Asked without a key: the probes, which say yes or no and no more, and files that are the same on every server.
PROBES = frozenset(("/health/live", "/health/ready", "/ping"))  # asked by any name
OPEN_PATHS = frozenset((*PROBES, *FILES))
QUIET = frozenset((*OPEN_PATHS, "/health", "/metrics"))  # logged at debug
BEARER = b"bearer "
CLIENT_LEFT = 499  # in the log and the metrics alone; nobody is there to receive it


class Gate:
    """Wraps the routes. Every request passes through here exactly once, in and out."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Hosts,
        origins: Origins,
        traffic: Traffic,
        *,
        request_timeout: float,
        max_queued_bytes: int,
        always: Sequence[tuple[bytes, bytes]] = (),
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._origins = origins
        self._traffic = traffic
        self._timeout = request_timeout or None  # seconds that every request has
        self._bodies = Bodies(max_queued_bytes)
        self._always = always  # headers of every answer
        self._untraced = Tracer()
        self._tracer = tracer if tracer is not None else self._untraced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # main.py configures neither websockets nor lifespan
        current = Exchange(exchange.request_id(scope), time.monotonic(), self._bodies)
        current.bound(self._timeout, "--request-timeout")
        scope[exchange.KEY] = current
        shared = [*self._always, *self._origins.headers(scope)]
        quiet = scope["path"] in QUIET
        span = ServerSpan(self._untraced if quiet else self._tracer, client_context(scope))
        current.context = span.context
        if span.recording:
            # Source: "Trace Context Level 2", section 4.
            shared.append((b"traceresponse", span.context.traceparent.encode()))
        elif not span.context.traceparent and not quiet:
            current.context = unsampled()

        anthropic = messages.spoken(scope)

        async def answer(message: Message) -> None:
            if not current.status:
                current.status = message["status"]
                names = (b"x-request-id", b"request-id") if anthropic else (b"x-request-id",)
                ids = [(name, current.id) for name in names]
                message["headers"] = [*message["headers"], *ids, *current.headers, *shared]
            await send(message)

        try:
            await self._pass(scope, receive, answer, current)
        finally:
            if not current.lasting:
                current.end()
            self._account(scope, current)
            if span.recording:
                attributes = {names.HTTP_REQUEST_ID: current.id.decode(), names.URL_SCHEME: scope["scheme"]}
                status = current.status or CLIENT_LEFT
                span.end(scope["method"], current.endpoint, status, attributes, (current.started, time.monotonic()))

    async def _pass(self, scope: Scope, receive: Receive, send: Send, current: Exchange) -> None:
        extra: list[tuple[bytes, bytes]] = []
        try:
            if scope["path"] not in PROBES:
                self._hosts.check(scope)
                self._origins.check(scope)
            if (allowed := self._origins.preflight(scope)) is not None:
                current.endpoint = "preflight"
                await send({"type": "http.response.start", "status": 204, "headers": allowed})
                await send({"type": "http.response.body", "body": b""})
                return
            self._check_key(scope)
            current.bound(exchange.timeout_of(scope), "X-Request-Timeout")
            await self._app(scope, receive, send)
            return
        except ClientLeft:
            current.status = RequestTimeout.status if LATE in scope else CLIENT_LEFT
            return
        except RequestError as error:
            # A traceback holds this frame and all below, the body with them, and this frame would hold the error.
            refusal = error.with_traceback(None)
        except HTTPException as error:
            refusal, extra = routing_error(error, scope)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            trace = current.context.trace_id
            logs.exception(log, "request_failed", id=current.id.decode(), trace_id=trace, route=current.endpoint)
            refusal = EngineFailure("the server failed on this request", code="internal_error")
            if current.status:
                current.rejection = exchange.reason_of(refusal)
                raise
        current.rejection = exchange.reason_of(refusal)
        if not messages.spoken(scope):
            await send_error(send, refusal, extra)
            return
        body = messages.encode(refusal, current.id.decode())
        await send_json(send, body, refusal.status, [*headers(refusal), *extra])

    def _check_key(self, scope: Scope) -> None:
        if not self._keys.locked or scope["path"] in OPEN_PATHS:
            return
        given = key_of(scope)
        if given is None or not self._keys.accepts(given):
            what = "You didn't provide an API key" if given is None else "Incorrect API key provided"
            raise Unauthorized(f"{what}; send it as the header Authorization: Bearer KEY", code="invalid_api_key")
        exchange.of(scope).tenant = tenant_of(given)

    def _account(self, scope: Scope, current: Exchange) -> None:
        now = time.monotonic()
        status = current.status or CLIENT_LEFT
        self._traffic.answered(
            current.endpoint, status, current.prompt_tokens, current.completion_tokens, now - current.started,
            current.rejection,
        )  # fmt: skip
        write = logs.debug if current.endpoint in QUIET else logs.info
        fields: dict[str, object] = {"id": current.id.decode(), "method": scope["method"], "route": current.endpoint}
        if trace := current.context.trace_id:
            fields["trace_id"] = trace
        fields["status"] = status
        if current.prompt_tokens or current.completion_tokens:
            fields.update(prompt_tokens=current.prompt_tokens, completion_tokens=current.completion_tokens)
        if current.first_token is not None:
            fields["ttft"] = current.first_token
        if current.rejection:
            fields["reason"] = current.rejection
        write(log, "request", **fields, seconds=now - current.started)


def key_of(scope: Scope) -> bytes | None:
    """The key that the client shows: as bearer token (RFC 6750, section 2.1), or as Anthropic's clients do."""
    shown: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            return bytes(value[len(BEARER) :]).strip() if value[: len(BEARER)].lower() == BEARER else b""
        if name == b"x-api-key":
            shown = bytes(value)
    return shown


def routing_error(error: HTTPException, scope: Scope) -> tuple[RequestError, list[tuple[bytes, bytes]]]:
    """What the router found wrong: the method, with those that are allowed, or the path."""
    path = str(scope["path"])[:200]
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"{scope['method']} is not allowed on {path}; allowed: {allowed}"
        return MethodNotAllowed(message, code="method_not_allowed"), [(b"allow", allowed.encode())]
    return NotFound(f"there is nothing at {path}", code="unknown_path"), []
