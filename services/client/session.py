"""The session that a request belongs to, and the number by which requests of one conversation find one another.

A session is named by the header X-Session-Id, or else by the body's `user`. Its requests go to one replica where no
prefix that a replica knows decides (engine_core/placement). The name itself goes no further than a digest of it.

The client is whom the engine is shared out to (engine_core/scheduling/request_queue.py): the tenant is the key, on a
server that has keys, and below it stands the body's `user`, or else the session, or else the connection. So a key gains
nothing by inventing users. Keys that nobody checks are no names: OpenAI's client sends the same one from everywhere.
"""

from __future__ import annotations

import re
import zlib
from hashlib import blake2b

import msgspec
from starlette.types import Scope

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Client, SubmitText
from penstock.services.http import request_context as exchange

HEADER = b"x-session-id"
NAME = re.compile(rb"[\x21-\x7e]{1,256}")
DIGEST_BYTES = 12


class Speaker(msgspec.Struct, frozen=True):
    """A chat message, as far as it matters here."""

    role: str = ""


MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
SPEAKER = msgspec.json.Decoder(Speaker)


def session_of(scope: Scope, user: str | None = None) -> str:
    """A digest of the session's name; empty for a request of none. Raises InvalidRequest for a header like none."""
    given = [value for name, value in scope["headers"] if name == HEADER]
    if len(given) > 1 or (given and not NAME.fullmatch(given[0])):
        message = "the header X-Session-Id must be given once, as 1 to 256 visible ASCII characters"
        raise InvalidRequest(message, code="invalid_header")
    if given:
        return digest(b"header:" + given[0])
    return digest(b"user:" + user.encode("utf-8", "surrogatepass")) if user else ""


def tenant_of(key: bytes) -> str:
    """A digest of an accepted key."""
    return digest(b"key:" + key)


def client_of(scope: Scope, user: str | None = None) -> Client:
    """Whom a request is for. Raises InvalidRequest as `session_of` does."""
    if user:
        name = digest(b"user:" + user.encode("utf-8", "surrogatepass"))
    elif not (name := session_of(scope)):
        host, port = scope.get("client") or ("", 0)
        name = digest(f"connection:{host}:{port}".encode())
    return Client(exchange.of(scope).tenant, name)


def digest(name: bytes) -> str:
    return blake2b(name, digest_size=DIGEST_BYTES).hexdigest()


def affinity(request: SubmitText) -> int:
    """The same number for all requests of a session, or of a chat that goes on: who tokenized one knows where it went.

    A chat is known by all that comes before the first answer; a prompt without a session by nothing but itself.
    """
    if request.session:
        return zlib.crc32(request.session.encode())
    if request.messages is None:
        return request.id
    number = 0
    for message in MESSAGES.decode(request.messages):
        number = zlib.crc32(message, number)
        if SPEAKER.decode(message).role == "user":
            break
    return number
