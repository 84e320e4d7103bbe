"""One HTTP request and its response, as the log and the metrics see it. Made by the gate, filled by the endpoint."""

from __future__ import annotations

import math
import re
import secrets

from starlette.types import Scope

from penstock.protocol import limits
from penstock.protocol.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError
from penstock.protocol.messages import TraceContext
from penstock.services.client.output_collector import Reply

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
KEY = "penstock.exchange"  # where the scope holds it
TIMEOUT = b"x-request-timeout"  # seconds, in ASCII digits, with a fraction or without
SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")


class Bodies:
    """Bytes of the bodies of all requests that have not ended, and how many there may be."""

    __slots__ = ("limit", "total")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0


class Exchange:
    """`id` is the client's X-Request-Id or one of ours; it names the exchange in the log and nothing inside."""

    __slots__ = (
        "_bodies", "body", "completion_tokens", "context", "endpoint", "first_token", "headers", "id",
        "lasting", "prompt_tokens", "rejection", "size", "source", "started", "status", "tenant", "timeout",
    )  # fmt: skip

    def __init__(self, id: bytes, started: float, bodies: Bodies | None = None) -> None:
        self.id = id
        self.started = started  # monotonic seconds
        self.endpoint = "other"
        self.status = 0  # 0 until the response has begun
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.rejection = ""  # the code of the error that it is, or ended with
        self.first_token: float | None = None  # seconds after the start
        self.timeout = math.inf  # seconds from the start in which it must end
        self.source = ""  # who said so
        self.size = 0  # bytes of its body so far
        self.context = TraceContext()  # what its requests carry on
        self.headers: list[tuple[bytes, bytes]] = []  # of the response, beside those that all have
        self.body: bytes | None = None  # what was read of it by who hands it on
        self.tenant = ""  # a digest of the key that was accepted; empty where none is asked for
        self.lasting = False  # its request goes on behind its answer: whoever sees to that calls `end`
        self._bodies = bodies

    def grow(self, size: int) -> None:
        """So many bytes of its body have come. Raises Overloaded when those of all together are too many; one that is
        alone has any size that is allowed."""
        bodies = self._bodies
        if bodies is None:
            return
        if bodies.total > self.size and bodies.total + size > bodies.limit:
            told = f"the bodies of unfinished requests would be more than {bodies.limit} bytes (--max-queued-bytes)"
            raise Overloaded(told)
        bodies.total += size
        self.size += size

    def end(self) -> None:
        """Its body takes no more room. Called once."""
        if self._bodies is not None:
            self._bodies.total -= self.size

    def bound(self, seconds: float | None, source: str) -> None:
        """It must end within so many seconds from its start; of several bounds the shortest holds."""
        if seconds is not None and seconds < self.timeout:
            self.timeout, self.source = seconds, source

    def left(self, now: float) -> float:
        """Seconds that remain, infinity without a bound."""
        return max(0.0, self.started + self.timeout - now)

    def late(self) -> DeadlineExceeded:
        """What a request ends with that is not complete by then."""
        return DeadlineExceeded(f"the request was not complete after {self.timeout:g} s ({self.source})")

    def note(self, reply: Reply) -> None:
        """Take over what the reply knows."""
        usage = reply.usage
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if reply.error is not None and not reply.left:
            self.rejection = reason_of(reply.error)
        if reply.first_token is not None:
            self.first_token = reply.first_token - self.started


def reason_of(error: RequestError) -> str:
    """Why, in a word: one of those that our own errors have."""
    return error.code or error.type


def of(scope: Scope) -> Exchange:
    exchange = scope[KEY]
    assert isinstance(exchange, Exchange)
    return exchange


def request_id(scope: Scope) -> bytes:
    """The client's X-Request-Id if it is printable and at most 128 bytes long, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return new_id()


def timeout_of(scope: Scope) -> float | None:
    """Seconds of the header X-Request-Timeout, None without it. Raises InvalidRequest."""
    given = [value for name, value in scope["headers"] if name == TIMEOUT]
    if not given:
        return None
    seconds = float(given[0]) if len(given) == 1 and SECONDS.fullmatch(given[0]) else math.nan
    if not limits.MIN_TIMEOUT <= seconds <= limits.MAX_TIMEOUT:
        bounds = f"from {limits.MIN_TIMEOUT:g} to {limits.MAX_TIMEOUT}"
        message = f"the header X-Request-Timeout must be a number of seconds {bounds}"
        raise InvalidRequest(message, code="invalid_header")
    return seconds


def new_id() -> bytes:
    return secrets.token_hex(16).encode()
