"""Pages of other origins that may call this server. Source: WHATWG Fetch, "HTTP CORS protocol".

Without --allowed-origins no answer names an origin and no preflight is answered, so browsers keep such pages out.
"""

from __future__ import annotations

from starlette.types import Scope

from protocol.config import TOKEN, ApiConfig, words

Headers = list[tuple[bytes, bytes]]

METHODS = "GET, HEAD, POST, DELETE"
EXPOSED = b"X-Request-Id, Retry-After"  # what a page may read beside the few headers that it always may
MAX_AGE = b"600"  # seconds that a browser may remember a preflight
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

    def headers(self, scope: Scope) -> Headers:
        """What an answer says about the page that asked."""
        if not self._origins:
            return []
        origin = value_of(scope, b"origin")
        vary: Headers = [] if self._any else [(b"vary", b"Origin")]
        return [*self._allowance(origin), (b"access-control-expose-headers", EXPOSED), *vary] if origin else vary

    def preflight(self, scope: Scope) -> Headers | None:
        """What the answer to a preflight of an allowed origin says beside `headers`; None for every other request."""
        asked = value_of(scope, b"access-control-request-method")
        if not self._origins or scope["method"] != "OPTIONS" or not asked:
            return None
        if not self._allowance(value_of(scope, b"origin")):
            return None
        names = self._headers
        if names is None:
            names = value_of(scope, b"access-control-request-headers")
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


def value_of(scope: Scope, header: bytes) -> bytes:
    """The header's value; empty where it is absent."""
    return next((bytes(value) for name, value in scope["headers"] if name == header), b"")
