"""The executor group as the scheduler sees it: who joined, who is ready, since when somebody is missing."""

from __future__ import annotations

import logging

from penstock.protocol.steps import ExecutorReady
from penstock.services.links.link import Peer
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

MEMBERS_LIMIT = 30.0  # seconds between the first member of a group that is ready and the last
MISSING_LIMIT = 60.0  # seconds that requests wait for a lost executor to come back


class ExecutorGroup:
    """One replica's executors. Each time the group becomes complete a new epoch begins."""

    def __init__(self, size: int, epoch: int, now: float, answering: int = 0) -> None:
        self.epoch = epoch  # of the group that is complete, or of the next one
        self.missing_since = now  # monotonic seconds; holds while the group is not complete
        self.crash_loop = ""  # why no executor will come, as the launcher says
        self._size = size
        self._answering = answering  # place in the group of the one that samples
        self._ready: dict[Peer, ExecutorReady] = {}
        self._waited_since = float("inf")  # monotonic seconds since when some are ready, and others are not

    @property
    def complete(self) -> bool:
        return len(self._ready) == self._size

    @property
    def in_step(self) -> bool:
        """Whether all who are ready have run the same plans. The last ones of a scheduler that was killed may have
        reached some members only, and the next collective would put two different steps together."""
        return len({ready.plans for ready in self._ready.values()}) <= 1

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._ready)

    @property
    def answering(self) -> tuple[Peer, ...]:
        """The one of a complete group that samples: masks are for it alone."""
        return (sorted(self._ready, key=lambda peer: peer.index)[self._answering],)

    @property
    def devices(self) -> str:
        """What a complete group runs on, in words: what its first executor says, and how many there are."""
        return self.first.device if self._size == 1 else f"{self._size} x {self.first.device}"

    @property
    def blocks(self) -> int:
        """KV blocks that every executor of the group has."""
        return min(ready.blocks for ready in self._ready.values())

    @property
    def step_tokens(self) -> int:
        """Token budget that every executor of the group agrees to."""
        return min(ready.step_tokens for ready in self._ready.values())

    @property
    def mask_places(self) -> int:
        """Masks that every executor of the group keeps."""
        return min(ready.mask_places for ready in self._ready.values())

    @property
    def draft_tokens(self) -> int:
        """Drafts of a row that every executor of the group makes."""
        return min(ready.draft_tokens for ready in self._ready.values())

    @property
    def first(self) -> ExecutorReady:
        """What the group's first executor said."""
        return self._ready[min(self._ready, key=lambda peer: peer.index)]

    def add(self, peer: Peer, ready: ExecutorReady, now: float) -> bool:
        """An executor has loaded; whether the group is complete now. One that says so twice has lost its slots."""
        if peer in self._ready:
            self.remove(peer, now)
        for other in self.peers:
            assert other.index != peer.index, "the link loses a peer before another takes its index"
        self._ready[peer] = ready
        self._waited_since = float("inf") if self.complete else min(self._waited_since, now)
        logs.info(log, "executor_ready", executor=peer.index, blocks=ready.blocks, device=ready.device,
                     dtype=ready.dtype, load_seconds=ready.load_seconds)  # fmt: skip
        return self.complete

    def remove(self, peer: Peer, now: float) -> bool:
        """An executor is gone; whether that broke a complete group. The next group has an epoch of its own."""
        broke = self.complete and peer in self._ready
        self._ready.pop(peer, None)
        if broke:
            self.epoch += 1
            self.missing_since = self._waited_since = now
        if not self._ready:
            self._waited_since = float("inf")
        return broke

    def given_up(self, now: float) -> bool:
        """Whether executors have been missing for so long, or failed so often, that requests should not wait."""
        late = now - self.missing_since >= MISSING_LIMIT
        return not self.complete and (late or bool(self.crash_loop))

    def stuck(self, now: float) -> bool:
        """Whether those who are ready have waited for the others for longer than that takes: members of one life are
        ready at about the same time, because none is without the others, so somebody hangs in a step."""
        return not self.complete and now - self._waited_since >= MEMBERS_LIMIT
