"""Requests for one of several models that has never been loaded: they wait here for its scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.protocol.errors import Overloaded, rejection
from penstock.protocol.messages import SubmitTokens
from penstock.services.links.link import Peer
from penstock.services.scheduler.tokenizer_clients import TokenizerClients

ABORTED = "the operator has aborted it before the model was loaded"
LATE = "the request has waited for {:g} s for its model to be loaded (--max-queue-time)"


@dataclass(frozen=True, slots=True)
class EarlyRequest:
    """Whose it is, and since when it waits."""

    peer: Peer
    request: SubmitTokens
    since: float


class EarlyRequests:
    """In the order in which they came. longest: seconds that one may wait; 0: as long as it takes."""

    def __init__(self, clients: TokenizerClients, longest: float) -> None:
        self._clients, self._longest = clients, longest
        self._held: dict[int, EarlyRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, peer: Peer, request: SubmitTokens, now: float) -> None:
        self._held[request.id] = EarlyRequest(peer, request, now)

    def take(self) -> list[tuple[Peer, SubmitTokens]]:
        """All of them, which are the caller's from now on."""
        return [(one.peer, one.request) for one in self._ended(list(self._held.values()))]

    def abort(self, number: int) -> bool:
        """Its client wants it no more. Whether it was here."""
        return self._held.pop(number, None) is not None

    def abort_all(self, rid: str) -> None:
        """End every one, or those that are called so."""
        for one in self._ended([one for one in self._held.values() if not rid or one.request.rid == rid]):
            self._clients.refuse(one.peer, one.request.id, ABORTED)

    def expire(self, now: float) -> None:
        """End those that have waited too long."""
        late = [one for one in self._held.values() if self._longest and now - one.since >= self._longest]
        for one in self._ended(late):
            self._clients.reject(one.peer, rejection(one.request.id, Overloaded(LATE.format(self._longest))))

    def refuse(self, why: str) -> None:
        """End every one, since the model does not come."""
        for peer, request in self.take():
            self._clients.refuse(peer, request.id, why)

    def forget(self, peer: Peer) -> None:
        """Nobody waits for a tokenizer's requests any more."""
        self._ended([one for one in self._held.values() if one.peer is peer])

    def _ended(self, found: Sequence[EarlyRequest]) -> Sequence[EarlyRequest]:
        for one in found:
            del self._held[one.request.id]
        return found
