"""Snapshots of recurrent states: which place holds the state behind which prefix, and which one goes for the next.

A snapshot is found by the identity of the block that ends at its position, so it covers what the block's does: salt,
adapter, every token. All places are equally large. The one that goes is found by GreedyDual (Young, 1994): the least of
clock + gain, both as of its last use. A gain is the positions since the nearest shorter snapshot of the same chain,
which is what a hit saves. The clock is what went last had, so that large gains age too.

A place is free, being written, or findable. Whatever it is, it is taken only once no planned step touches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

NO_PLACE = -1


class SnapshotStatistics(msgspec.Struct, frozen=True):
    total: int  # places
    held: int  # findable snapshots
    kept: int = 0  # the rest are totals since start
    hits: int = 0
    evicted: int = 0


class Snapshots:
    """Owner of the places 0..total-1."""

    def __init__(self, total: int) -> None:
        self._kept = self._hits = self._evicted = 0
        self.clear(total)

    def clear(self, total: int) -> None:
        """Every place is free: the states themselves are gone."""
        self.total = total
        self._places: dict[bytes, int] = {}  # findable
        self._identities: list[bytes | None] = [None] * total  # of those and of what is being written
        self._clock = 0.0
        self._priority = np.full(total, -np.inf)  # of what is findable
        self._busy = np.zeros(total, np.int64)  # last planned step that reads or writes the place
        self._gain = np.zeros(total, np.int64)
        self._parent = np.full(total, NO_PLACE)  # place of the nearest shorter snapshot of the chain
        self._used = np.zeros(total, bool)  # since it was kept
        self._last = np.zeros(total, np.int64)  # number of the last use, which parts equal priorities
        self._uses = 0

    def find(self, identity: bytes) -> int:
        """The place of the state behind this prefix; NO_PLACE if there is none."""
        return self._places.get(identity, NO_PLACE)

    def longest(self, chain: Sequence[bytes], blocks: int, unit: int) -> tuple[int, int]:
        """The longest snapshot of a chain's first `blocks` blocks, at multiples of `unit` blocks.

        Returns its length in blocks and its place; (0, NO_PLACE) if there is none.
        """
        for length in range(blocks // unit * unit, 0, -unit):
            place = self._places.get(chain[length - 1], NO_PLACE)
            if place != NO_PLACE:
                return length, place
        return 0, NO_PLACE

    def read(self, place: int, step: int) -> None:
        """`step`, which is about to be planned, begins a sequence from this place."""
        assert self._identities[place] is not None
        self._busy[place] = step
        self._used[place] = True
        self._value(place)
        self._hits += 1

    def reserve(self, identity: bytes, gain: int, parent: int, step: int, applied: int, own: int = NO_PLACE) -> int:
        """A place that `step` writes; what it held is forgotten. NO_PLACE if planned steps touch every one.

        gain: positions since the snapshot at `parent`, or since the beginning. own: a place to take before any other.
        """
        if own == NO_PLACE or self._busy[own] > applied:
            free = (self._busy <= applied).nonzero()[0]
            if not len(free):
                return NO_PLACE
            own = int(free[np.lexsort((self._last[free], self._priority[free]))[0]])
            if self._identities[own] is not None:
                self._clock = max(self._clock, float(self._priority[own]))
                self._evicted += 1
        self._forget(own)
        self._identities[own] = identity
        self._busy[own], self._gain[own], self._used[own] = step, gain, False
        self._parent[own] = NO_PLACE if parent == own else parent
        return own

    def publish(self, place: int, identity: bytes) -> None:
        """The step that wrote the place has been applied: its snapshot can be found, unless it was distrusted since or
        an equal one came before."""
        if self._identities[place] != identity:
            return
        if identity in self._places:
            self._identities[place] = None
            return
        self._places[identity] = place
        self._value(place)
        self._kept += 1

    def _value(self, place: int) -> None:
        """The place is used now."""
        self._uses += 1
        self._last[place] = self._uses
        self._priority[place] = self._clock + self._gain[place]

    def moves(self, place: int, identity: bytes) -> bool:
        """Whether the place still holds this snapshot and nothing has begun from it."""
        return self._identities[place] == identity and not self._used[place]

    def distrust(self, identities: Iterable[bytes]) -> None:
        """Forget the states behind these prefixes, also those that are being written."""
        doubtful = set(identities)
        for place in [place for place, found in enumerate(self._identities) if found in doubtful]:
            self._forget(place)

    def _forget(self, place: int) -> None:
        identity = self._identities[place]
        if identity is None:
            return
        self._identities[place] = None
        if self._places.get(identity) == place:
            del self._places[identity]
        heirs = self._parent == place  # what began behind it would have to begin where it did
        self._gain[heirs] += self._gain[place]
        self._priority[heirs] += self._gain[place]
        self._parent[heirs] = self._parent[place]
        self._priority[place] = -np.inf

    def check(self) -> tuple[str, ...]:
        """What is wrong with the accounts, in words."""
        faults = []
        if any(self._identities[place] != identity for identity, place in self._places.items()):
            faults.append("a snapshot is found at a place that holds another")
        if len(self._places) != int(np.isfinite(self._priority).sum()):
            faults.append(f"{len(self._places)} snapshots are findable, others have a priority")
        return tuple(faults)

    def statistics(self) -> SnapshotStatistics:
        """Counters as of now."""
        return SnapshotStatistics(self.total, len(self._places), self._kept, self._hits, self._evicted)
