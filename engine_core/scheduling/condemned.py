"""Signatures of requests that executors died of. The like of them is refused for a while."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from protocol.messages import SubmitTokens

REFUSED_SECONDS = 600.0
MOST = 256  # remembered signatures


class Condemned:
    """Signatures of requests that killed executors. Bounded: the oldest is forgotten first."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, message: SubmitTokens, now: float) -> None:
        self._until[signature(message)] = now + REFUSED_SECONDS
        while len(self._until) > MOST:
            self._until.popitem(last=False)

    def holds(self, message: SubmitTokens, now: float) -> bool:
        """Whether the like of this request is refused now."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return bool(self._until) and signature(message) in self._until


def signature(message: SubmitTokens) -> bytes:
    """What two requests have in common that ask for the same, whoever asks: all but the seed, which may be ours."""
    parameters = msgspec.structs.replace(message.sampling, seed=0)
    digest = blake2b(message.token_ids, digest_size=16)
    digest.update(msgspec.msgpack.encode((parameters, message.automaton, message.prediction, message.n)))
    return digest.digest()
