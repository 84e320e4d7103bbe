"""Signatures of poison requests, which executors or tokenizers died of. Requests like them are refused for a while."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from penstock.protocol.messages import Detokenize, SubmitText, SubmitTokens, Tokenize

REFUSED_SECONDS = 600.0
MOST = 256  # remembered signatures


class PoisonRequests:
    """Signatures of requests that killed processes. Bounded: the oldest is forgotten first."""

    def __init__(self) -> None:
        self.until: OrderedDict[bytes, float] = OrderedDict()  # the seconds at which each is forgotten

    def add(self, found: bytes, now: float) -> None:
        self.until[found] = now + REFUSED_SECONDS
        while len(self.until) > MOST:
            self.until.popitem(last=False)

    def holds(self, found: bytes, now: float) -> bool:
        """Whether the like of a request with this signature is refused now."""
        while self.until and next(iter(self.until.values())) <= now:
            self.until.popitem(last=False)
        return found in self.until


def signature(message: SubmitTokens) -> bytes:
    """Equal for two requests that ask for the same, from any client: everything but the seed, which may be ours."""
    parameters = msgspec.structs.replace(message.sampling, seed=0)
    digest = blake2b(message.token_ids, digest_size=16)
    for image in message.images:
        digest.update(image.digest)
    digest.update(
        msgspec.msgpack.encode((parameters, message.automaton, message.prediction, message.n, message.adapter))
    )
    return digest.digest()


def text_signature(message: SubmitText | Tokenize | Detokenize) -> bytes:
    """Equal for two requests that give a tokenizer the same work."""
    match message:
        case Detokenize():
            parts: tuple[object, ...] = (message.token_ids,)
        case Tokenize():
            parts = (message.messages, message.images, message.tools, message.template_arguments, message.prompt)
        case SubmitText():
            parts = (
                message.messages, message.images, message.tools, message.template_arguments, message.prompt,
                message.prompt_ids, message.chat_template, message.prediction, message.stop, message.bad_words,
            )  # fmt: skip
    return blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
