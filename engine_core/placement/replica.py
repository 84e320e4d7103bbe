"""One replica as a placement sees it: what it last said, and what was sent there since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from penstock.protocol.messages import EngineStatus

MOST = 1 << 18  # identities of one replica; some 30 MB


class ReplicaStatistics(msgspec.Struct, frozen=True):
    """What is known of a replica, and what went there."""

    ready: bool
    load: int  # choices it has, as far as is known
    identities: int  # blocks that its cache is taken to hold
    placed: int  # requests, total since start


class Replica:
    """Knowledge of one replica. Owned by the placement."""

    def __init__(self) -> None:
        self.shadow = Shadow()
        self.taking = False  # it has been ready, is there, and has not said that it ends
        self.placed = 0
        self._status: EngineStatus | None = None
        self._own = 0  # choices that we sent there and that have not ended
        self._since = 0  # of those, how many more there are than when it last reported

    @property
    def ready(self) -> bool:
        """Whether it would run a request at once."""
        return self.taking and self._status is not None and self._status.ready

    @property
    def stalled(self) -> bool:
        """Whether it is there without its executors: what it has waits."""
        status = self._status
        return status is not None and not status.ready and not status.draining

    @property
    def load(self) -> int:
        """Choices it has: what it said, corrected by what we did since; never less than our own."""
        status = self._status
        reported = status.running + status.waiting if status is not None else 0
        return max(self._own, reported + self._since)

    def report(self, status: EngineStatus) -> None:
        """What it says of itself. Another epoch has another cache."""
        if self._status is not None and self._status.epoch != status.epoch:
            self.shadow.clear()
        self._status = status
        self._since = 0
        self.taking = (self.taking or status.ready) and not status.draining
        self.shadow.resize(status.blocks)

    def leave(self) -> None:
        """It is gone, with its cache and all it had."""
        self._status = None
        self.taking = False
        self._own = self._since = 0
        self.shadow.clear()

    def take(self, choices: int) -> None:
        """So many more choices were sent there."""
        self.placed += 1
        self._own += choices
        self._since += choices

    def give(self, choices: int) -> None:
        """So many choices that were sent there have ended, or were taken back."""
        self._own -= choices
        self._since -= choices
        assert self._own >= 0, "what ended was sent there"

    def statistics(self) -> ReplicaStatistics:
        return ReplicaStatistics(self.ready, self.load, len(self.shadow), self.placed)


class Shadow:
    """Identities by use, least recent first."""

    def __init__(self) -> None:
        self._identities: OrderedDict[bytes, None] = OrderedDict()  # a dict's first is ever farther behind what is gone
        self._limit = 0

    def __len__(self) -> int:
        return len(self._identities)

    @property
    def room(self) -> int:
        """Blocks that can be added before any is forgotten."""
        return self._limit - len(self._identities)

    def resize(self, blocks: int) -> None:
        """The replica has so many blocks."""
        self._limit = min(blocks, MOST)
        self._trim()

    def hits(self, chain: Sequence[bytes]) -> int:
        """How many blocks at the beginning of `chain` are there."""
        identities = self._identities
        count = 0
        for identity in chain:
            if identity not in identities:
                break
            count += 1
        return count

    def use(self, chain: Sequence[bytes]) -> None:
        """These blocks are used, or made, now."""
        identities = self._identities
        for identity in reversed(chain):  # the beginning last: whatever is longer goes through it
            identities[identity] = None
            identities.move_to_end(identity)
        self._trim()

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._identities.clear()

    def _trim(self) -> None:
        for _ in range(len(self._identities) - self._limit):
            self._identities.popitem(last=False)
