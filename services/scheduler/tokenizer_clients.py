"""The scheduler's clients, which are tokenizer processes, and the rejections that wait for credit at one of them."""

from __future__ import annotations

import logging
from collections import deque

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.control import Controlled, EngineStatus
from penstock.protocol.messages import Rejected
from penstock.services.links.link import Link, Peer
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)


class TokenizerClients:
    """Owner of the numbers by which the scheduler knows tokenizers: the sources of its requests."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.refused = 0  # requests that came while nothing could serve them
        self._sources: dict[Peer, int] = {}
        self._joined = 0
        self._rejections: deque[tuple[Peer, Rejected | Controlled]] = deque()

    @property
    def rejections(self) -> int:
        return len(self._rejections)

    def source(self, peer: Peer) -> int:
        return self._sources[peer]

    def join(self, peer: Peer) -> None:
        logs.info(log, "tokenizer_joined", tokenizer=peer.index, pid=peer.pid)
        self._joined += 1
        self._sources[peer] = self._joined

    def leave(self, peer: Peer, reason: str) -> int:
        """The source whose requests nobody waits for any more."""
        logs.info(log, "tokenizer_left", tokenizer=peer.index, pid=peer.pid, reason=reason)
        return self._sources.pop(peer)

    def refuse(self, peer: Peer, request: int, why: str) -> None:
        """Reject a request that nothing can serve now."""
        self.refused += 1
        self.reject(peer, Rejected(id=request, status=503, message=why, code="not_ready"))

    def reject(self, peer: Peer, rejected: Rejected) -> None:
        self._rejections.append((peer, rejected))

    def answer(self, peer: Peer, controlled: Controlled) -> None:
        """Tell what became of what the operator asked."""
        self._rejections.append((peer, controlled))

    def send_rejections(self) -> None:
        """And answers, as far as there is credit. Those of a tokenizer that has left are dropped."""
        for _ in range(len(self._rejections)):
            peer, rejected = self._rejections.popleft()
            if peer in self._sources and not self.link.send(peer, rejected):
                self._rejections.append((peer, rejected))

    def deliver(self, scheduler: Scheduler, waiting: tuple[int, ...]) -> None:
        """Give each tokenizer what it has credit for; the rest stays in the scheduler and is merged there.

        `waiting`: sources that have undelivered outputs.
        """
        for peer, source in self._sources.items():
            if source in waiting:
                for message in scheduler.outputs(source, peer.credit):
                    self.link.send(peer, message)  # refused only by a peer that is gone; its `Left` follows

    def send_status(self, status: EngineStatus) -> None:
        self.link.send_each([peer for peer in self._sources if peer.credit > 0], status)
