"""One HTTP request and its response, as the log and the metrics see it. Made by the gate, filled by the endpoint."""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

from services.api.reply import Reply

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
KEY = "penstock.exchange"  # where the scope holds it


class Exchange:
    """`id` is the client's X-Request-Id or one of ours; it names the exchange in the log and nothing inside."""

    __slots__ = ("completion_tokens", "endpoint", "first_token", "id", "prompt_tokens", "started", "status")

    def __init__(self, id: bytes, started: float) -> None:
        self.id = id
        self.started = started  # monotonic seconds
        self.endpoint = "other"
        self.status = 0  # 0 until the response has begun
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.first_token: float | None = None  # seconds after the start

    def note(self, reply: Reply) -> None:
        """Take over what the reply knows."""
        usage = reply.usage
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        if reply.first_token is not None:
            self.first_token = reply.first_token - self.started


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


def new_id() -> bytes:
    return secrets.token_hex(16).encode()
