"""The application's outermost layer: host, origin, key, routing, errors as responses, log and metrics.

A CORS preflight comes before the key, since browsers send none with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import (
    MethodNotAllowed,
    Overloaded,
    RequestError,
    RequestTimeout,
    Unauthorized,
    Unavailable,
)
from penstock.protocol.messages import TraceContext
from penstock.services.http.connection import LATE
from penstock.services.http.request_context import (
    REQUEST_ID_KEY,
    BodyBudget,
    ClientDisconnect,
    RequestContext,
    bug,
    digest,
    new_trace,
)
from penstock.services.http.routing import MAX_SHOWN, UNKNOWN_PATH, Access, Methods, Router
from penstock.services.http.security import Cors, Keys, TrustedHosts
from penstock.services.metrics.requests import Traffic
from penstock.services.supervisor import logs
from penstock.services.tracing import names
from penstock.services.tracing.tracer import ServerSpan, Tracer, client_context

log = logging.getLogger(__name__)

BEARER = b"bearer "
CLIENT_CLOSED_REQUEST = 499  # in the log and the metrics alone; there is nobody to receive it
MAX_RETRY_AFTER = 60  # seconds
PREFLIGHT = "preflight"


class Dialect(msgspec.Struct, frozen=True):
    """How an API writes errors, and the headers that name the request. `roots` are the paths that speak it, with all
    below them, and the header that a request must have, if any."""

    encode_error: Callable[[RequestError, str], bytes]  # the error, and the request's id
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    roots: Mapping[str, bytes] = {}

    def covers(self, context: RequestContext) -> bool:
        path = context.path
        return any(
            (path == root or path.startswith(root + "/")) and (not header or header in context.headers)
            for root, header in self.roots.items()
        )


class Middleware:
    """The ASGI application: every request passes here once, in and out."""

    def __init__(
        self,
        router: Router,
        state: Any,
        options: ApiConfig,
        keys: Keys,
        traffic: Traffic,
        dialects: Sequence[Dialect],
        *,
        tracer: Tracer,
        always: Sequence[tuple[bytes, bytes]] = (),
        operator: bool = False,
    ) -> None:
        self._router = router
        self._state = state
        self._keys = keys
        self._hosts = TrustedHosts(options)
        self._cors = Cors(options)
        self._traffic = traffic
        self._dialects = dialects  # the last one is spoken wherever no other one is
        self._timeout = options.request_timeout or None  # seconds that every request has
        self._budget = BodyBudget(options)
        self._always = always  # headers of every response
        self._operator = operator  # it changes the server: the log has all that is asked of it
        self._tracer = tracer
        self._unrecorded = ServerSpan(None, TraceContext())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # websockets and lifespan are switched off
        context = RequestContext(scope, receive, send, self._budget)
        scope[REQUEST_ID_KEY] = context.id
        if self._timeout is not None:
            context.set_timeout(self._timeout, "--request-timeout")
        methods, context.path_params = self._router.exact.get(context.path) or self._router.find(context.path)
        quiet = any(route.quiet for route in methods.values())
        span = self._unrecorded
        if self._tracer.enabled or b"traceparent" in context.headers:
            span = ServerSpan(None if quiet else self._tracer, client_context(context.headers))
        context.trace = span.context if span.context.traceparent or quiet else new_trace()
        dialect = next((each for each in self._dialects if each.covers(context)), self._dialects[-1])
        context.response_headers = [*((name, context.id) for name in dialect.id_headers), *self._always]
        if self._cors.enabled:
            context.response_headers += self._cors.headers(context)
        if span.recording:
            # Source: "Trace Context Level 2", section 4.
            context.response_headers.append((b"traceresponse", span.context.traceparent.encode()))
        try:
            await self._handle(context, methods, dialect)
        finally:
            if not context.background:
                self._budget.total -= context.size
            self._account(context)
            if span.recording:
                attributes = {names.HTTP_REQUEST_ID: context.id.decode(), names.URL_SCHEME: scope["scheme"]}
                status = context.outcome.status or CLIENT_CLOSED_REQUEST
                span.end(context.method, context.outcome.route, status, attributes, (context.started, time.monotonic()))

    async def _handle(self, context: RequestContext, methods: Methods, dialect: Dialect) -> None:
        outcome = context.outcome
        route = methods.get("GET" if context.method == "HEAD" else context.method)
        if route is not None:
            outcome.route = route.name
        try:
            access = next((route.access for route in methods.values()), Access.KEY)
            if access is not Access.PROBE:
                if not self._hosts.any:
                    self._hosts.check(context)
                if b"origin" in context.headers:
                    self._cors.check(context)
            if context.method == "OPTIONS" and (allowed := self._cors.preflight(context)) is not None:
                outcome.route = PREFLIGHT
                await context.start(204, allowed)
                await context.send({"type": "http.response.body", "body": b""})
                return
            if access is Access.KEY and self._keys.locked:
                self._check_key(context)
            if b"x-request-timeout" in context.headers:
                context.set_timeout(context.header_timeout(), "X-Request-Timeout")
            if route is None:
                raise self._router.refusal(methods, context.method, context.path)
            outcome.quiet = route.quiet
            await route.handler(self._state, context)
            return
        except ClientDisconnect:
            outcome.status = CLIENT_CLOSED_REQUEST
            if LATE in context.scope:
                outcome.status, outcome.reason = RequestTimeout.status, "request_timeout"
            return
        except RequestError as error:
            # A traceback holds this frame and all below, the body with them, and this frame would hold the error.
            refusal = error.with_traceback(None)
        except Exception:  # guard: design 7, one request that finds a bug of ours ends alone
            refusal = bug(context)
            if outcome.status:
                outcome.reason = refusal.code
                raise
        outcome.reason = refusal.code
        body = dialect.encode_error(refusal, context.id.decode())
        await context.send_json(body, refusal.status, error_headers(refusal))

    def _check_key(self, context: RequestContext) -> None:
        given = key_of(context)
        if given is None or not self._keys.accepts(given):
            what = "You didn't provide an API key" if given is None else "Incorrect API key provided"
            raise Unauthorized(f"{what}; send it as the header Authorization: Bearer KEY")
        context.tenant = digest(b"key:" + given)

    def _account(self, context: RequestContext) -> None:
        """Count the response and log it."""
        outcome, seconds = context.outcome, time.monotonic() - context.started
        status = outcome.status or CLIENT_CLOSED_REQUEST
        self._traffic.answered(
            outcome.route, status, outcome.prompt_tokens, outcome.completion_tokens, seconds, outcome.reason
        )
        fields: dict[str, object] = {"id": context.id.decode(), "method": context.method, "route": outcome.route}
        if trace := context.trace.traceparent:
            fields["trace_id"] = trace[3:35]  # as TraceContext.trace_id, without a call
        if self._operator:
            fields["query"] = context.query[:MAX_SHOWN]
        if outcome.reason == UNKNOWN_PATH:
            fields["path"] = context.path[:MAX_SHOWN]
        fields["status"] = status
        if outcome.prompt_tokens or outcome.completion_tokens:
            fields.update(prompt_tokens=outcome.prompt_tokens, completion_tokens=outcome.completion_tokens)
        if outcome.first_token is not None:
            fields["ttft"] = outcome.first_token
        if outcome.reason:
            fields["reason"] = outcome.reason
        fields["seconds"] = seconds
        logs.write(log, logging.DEBUG if outcome.quiet else logging.INFO, "request", fields)


def key_of(context: RequestContext) -> bytes | None:
    """The client's key: a bearer token (RFC 6750, section 2.1), or else X-Api-Key as Anthropic's clients send it."""
    value = context.header(b"authorization")
    if value is not None:
        return value[len(BEARER) :].strip() if value[: len(BEARER)].lower() == BEARER else b""
    given = context.headers.get(b"x-api-key")
    return given[-1] if given else None


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    """Headers of an error's response beside those of its body."""
    if isinstance(error, Overloaded | Unavailable) and error.retry_after is not None:
        seconds = min(max(math.ceil(error.retry_after), 1), MAX_RETRY_AFTER)
        return [(b"retry-after", str(seconds).encode())]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", error.allowed.encode())]
    return []
