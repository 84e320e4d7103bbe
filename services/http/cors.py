"""Pages of other origins that may call this server. Source: WHATWG Fetch, "HTTP CORS protocol".

Browsers keep the answer from a page of another origin, but send its request all the same: a form or a fetch without a
content type needs no preflight. So a request that names an origin which is neither ours nor in --allowed-origins is
refused, whatever it asks for.
"""

from __future__ import annotations

from penstock.protocol.config import TOKEN, ApiConfig
from penstock.protocol.errors import Forbidden
from penstock.protocol.option import words
from penstock.services.http.request_context import RequestContext

Headers = list[tuple[bytes, bytes]]

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = b"X-Request-Id, Retry-After"  # what a page may read beside the few headers that it always may
MAX_AGE = b"600"  # seconds that a browser may remember a preflight
SHOWN = 200  # characters of an origin
MAX_ASKED = 4096  # bytes of header names in a preflight


class Origins:
    """What the options allow."""

    def __init__(self, options: ApiConfig) -> None:
        self._origins = frozenset(origin.encode() for origin in words(options.allowed_origins))
        self._any = b"*" in self._origins
        methods = words(options.allowed_methods)
        self._methods = METHODS if "*" in methods else ", ".join(methods)
        headers = words(options.allowed_headers)
        self._headers = None if "*" in headers else ", ".join(headers).encode()  # None: those that are asked for
        self._credentials = options.allow_credentials

    def check(self, context: RequestContext) -> None:
        """Raise Forbidden for a request of a page that may not call this server. Browsers alone name an origin."""
        for value in context.headers.get(b"origin", ()):
            if not (self._any or value in self._origins or own(value, context)):
                shown = value.decode("latin-1")[:SHOWN]
                message = f"pages of {shown!r} may not call this server; --allowed-origins names those that may"
                raise Forbidden(message, code="origin_not_allowed")

    def headers(self, context: RequestContext) -> Headers:
        """What an answer says about the page that asked."""
        if not self._origins:
            return []
        origin = value_of(context, b"origin")
        vary: Headers = [] if self._any else [(b"vary", b"Origin")]
        return [*self._allowance(origin), (b"access-control-expose-headers", EXPOSED), *vary] if origin else vary

    def preflight(self, context: RequestContext) -> Headers | None:
        """What the answer to a preflight of an allowed origin says beside `headers`; None for every other request."""
        asked = value_of(context, b"access-control-request-method")
        if not self._origins or context.method != "OPTIONS" or not asked:
            return None
        if not self._allowance(value_of(context, b"origin")):
            return None
        names = self._headers
        if names is None:
            names = value_of(context, b"access-control-request-headers")
            if len(names) > MAX_ASKED or not all(map(TOKEN.fullmatch, words(names.decode("latin-1")))):
                return None
        return [
            (b"access-control-allow-methods", self._methods.encode()),
            *([(b"access-control-allow-headers", names)] if names else []),
            (b"access-control-max-age", MAX_AGE),
        ]

    def _allowance(self, origin: bytes) -> Headers:
        if not origin or not (self._any or origin in self._origins):
            return []
        allowed: Headers = [(b"access-control-allow-origin", b"*" if self._any else origin)]
        return [*allowed, (b"access-control-allow-credentials", b"true")] if self._credentials else allowed


def own(origin: bytes, context: RequestContext) -> bool:
    """Whether a page of this origin is this server's own. A front may have ended TLS, so http and https are alike; one
    that sends another Host leaves the browser's own word (W3C Fetch Metadata), which no page can write."""
    authority = origin.partition(b"://")[2]
    host, site = value_of(context, b"host"), value_of(context, b"sec-fetch-site")
    return bool(authority) and (authority.lower() == host.lower() or site == b"same-origin")


def value_of(context: RequestContext, header: bytes) -> bytes:
    """The header's value; empty where it is absent."""
    return context.header(header) or b""
