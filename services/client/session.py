"""The session that a request belongs to, and the number by which requests of one conversation find one another.

A session is named by the header X-Session-Id, or else by the body's `user`. Its requests go to one replica where no
prefix that a replica knows decides (engine_core/placement). The name itself goes no further than a digest of it.

The client is whom the engine is shared out to (engine_core/scheduling/request_queue.py): the tenant is the key, on a
server that has keys, and below it stands the body's `user`, or else the session, or else the connection. So a key gains
nothing by inventing users. Keys that nobody checks are no names: OpenAI's client sends the same one from everywhere.
"""

from __future__ import annotations

import zlib
from hashlib import blake2b

import msgspec

from penstock.protocol.messages import SubmitText

DIGEST_BYTES = 12


class Speaker(msgspec.Struct, frozen=True):
    """A chat message, as far as it matters here."""

    role: str = ""


MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
SPEAKER = msgspec.json.Decoder(Speaker)


def tenant_of(key: bytes) -> str:
    """A digest of an accepted key."""
    return digest(b"key:" + key)


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
