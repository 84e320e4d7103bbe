"""Snapshots of recurrent states: which place holds the state behind which prefix, and which one goes for the next.

A snapshot is found by the identity of the block that ends at its position, so it covers what the block's does: salt,
adapter, every token. All places are equally large. The one that goes is found by GreedyDual (Young, 1994): the least of
clock + gain, both as of its last use. A gain is the positions since the nearest shorter snapshot of the same chain,
which is what a hit saves. The clock is what went last had, so that large gains age too.

A place is free, being written, or findable. Whatever it is, it is taken only once no planned step touches it.

Behind the device's places may stand some in the host's memory. What goes from the device is copied there, where what
would go next gives way to it. A sequence begins from a place of the host's as from any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from penstock.protocol.steps import HOST_PLACES

NO_PLACE = -1
NO_SNAPSHOT = 0, NO_PLACE  # its length and place


class SnapshotStatistics(msgspec.Struct, frozen=True):
    """Counters as of now."""

    total: int  # places on the device
    held: int  # findable snapshots there
    host_total: int = 0  # places in the host's memory
    host_held: int = 0
    kept: int = 0  # the rest are totals since start
    hits: int = 0
    host_hits: int = 0  # of those, from places of the host's
    spilled: int = 0  # copied there
    evicted: int = 0  # forgotten


class Snapshots:
    """Owner of the places: 0..total-1 on the device, `host` more behind them in the host's memory."""

    def __init__(self, total: int, host: int = 0) -> None:
        self._kept = self._hits = self._host_hits = self._spills = self._evicted = 0
        self.clear(total, host)

    def clear(self, total: int, host: int = 0) -> None:
        """Every place is free: the states themselves are gone."""
        self.total, self.host = total, host
        places = total + host
        self._places: dict[bytes, int] = {}  # findable
        self._identities: list[bytes | None] = [None] * places  # of those and of what is being written
        self._clock = 0.0
        self._priority = np.full(places, -np.inf)  # of what is findable
        self._busy = np.zeros(places, np.int64)  # last planned step that reads or writes the place
        self._gain = np.zeros(places, np.int64)
        self._parent = np.full(places, NO_PLACE)  # place of the nearest shorter snapshot of the chain
        self._used = np.zeros(places, bool)  # since it was kept
        self._last = np.zeros(places, np.int64)  # number of the last use, which parts equal priorities
        self._uses = 0
        self.spilled = NO_PLACE  # of the last `reserve`: the place of the host's that gets what stood there

    def number(self, place: int) -> int:
        """As plans name the place."""
        return place if place < self.total else HOST_PLACES + place - self.total

    def find(self, identity: bytes) -> int:
        """The place of the state behind this prefix; NO_PLACE if there is none."""
        return self._places.get(identity, NO_PLACE)

    def longest(
        self, chain: Sequence[bytes], blocks: int, unit: int, known: tuple[int, int] = NO_SNAPSHOT
    ) -> tuple[int, int]:
        """The longest snapshot of a chain's first `blocks` blocks, at multiples of `unit` blocks.

        Returns its length in blocks and its place; `known`, which is shorter or is being written, if there is none.
        """
        for length in range(blocks // unit * unit, known[0], -unit):
            place = self._places.get(chain[length - 1], NO_PLACE)
            if place != NO_PLACE:
                return length, place
        return known

    def read(self, place: int, step: int) -> None:
        """`step`, which is about to be planned, begins a sequence from this place."""
        assert self._identities[place] is not None
        self._busy[place] = step
        self._used[place] = True
        self._value(place)
        self._hits += 1
        self._host_hits += place >= self.total

    def reserve(self, identity: bytes, gain: int, parent: int, step: int, applied: int, own: int = NO_PLACE) -> int:
        """A place that `step` writes; what it held is forgotten. NO_PLACE if planned steps touch every one.

        gain: positions since the snapshot at `parent`, which may be about to be written, or since the beginning. own: a
        place to take before any other.
        """
        behind = None if parent == NO_PLACE else self._identities[parent]
        self.spilled = NO_PLACE
        if own == NO_PLACE or self._busy[own] > applied:
            own = self._next(0, self.total, applied)
            if own == NO_PLACE:
                return NO_PLACE
            held = self._identities[own]
            if held is not None and self._places.get(held) == own:
                self._clock = max(self._clock, float(self._priority[own]))
                self._spill(held, own, step, applied)
        self._forget(own)
        self._identities[own] = identity
        self._busy[own], self._gain[own], self._used[own], self._parent[own] = step, gain, False, NO_PLACE
        if behind is not None:
            self._parent[own] = self._places.get(behind, parent if self._identities[parent] == behind else NO_PLACE)
        return own

    def _next(self, first: int, end: int, applied: int) -> int:
        """Which of these places is taken next; NO_PLACE if planned steps touch every one."""
        free = first + (self._busy[first:end] <= applied).nonzero()[0]
        return int(free[np.lexsort((self._last[free], self._priority[free]))[0]]) if len(free) else NO_PLACE

    def _spill(self, identity: bytes, place: int, step: int, applied: int) -> None:
        """The findable snapshot at a place of the device, which is about to be forgotten there, goes to the host's
        memory if there is room, for which another may be forgotten."""
        target = self._next(self.total, self.total + self.host, applied)
        if target == NO_PLACE or self._identities[target] is not None:
            self._evicted += 1
        if target == NO_PLACE:
            return
        self._forget(target)
        for column in (self._priority, self._gain, self._parent, self._used, self._last):
            column[target] = column[place]
        self._parent[self._parent == place] = target
        self._identities[target], self._places[identity], self._busy[target] = identity, target, step
        self.spilled = target - self.total
        self._spills += 1

    def publish(self, place: int, identity: bytes) -> None:
        """The step that wrote the place has been applied: its snapshot can be found, unless it was distrusted since or
        an equal one came before."""
        if self._identities[place] != identity:
            return
        if identity in self._places:
            self._identities[place] = None
            self._parent[self._parent == place] = self._places[identity]
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
        host = int(np.isfinite(self._priority[self.total :]).sum())
        return SnapshotStatistics(
            self.total, len(self._places) - host, self.host, host, self._kept, self._hits, self._host_hits,
            self._spills, self._evicted,
        )  # fmt: skip
