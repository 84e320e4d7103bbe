"""The number by which the requests of one conversation find one tokenizer."""

from __future__ import annotations

import zlib

import msgspec

from penstock.protocol.messages import SubmitText


class Speaker(msgspec.Struct, frozen=True):
    """A chat message, as far as it matters here."""

    role: str = ""


MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])
SPEAKER = msgspec.json.Decoder(Speaker)


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
