"""LoRA adapters: which ones executors have read, which have a place on the device, and who gets a place next.

A sequence enters a slot when its adapter has a place, or a place can be had: one that is empty, or whose adapter no
running sequence uses. The one that was used longest ago goes. Whoever lacks its adapter is passed over and delays
nobody. An adapter that has waited PATIENCE seconds for a place has one emptied for it: sequences that are behind in the
order no longer enter with the adapter there. It is the place with the fewest users, unless emptying it has taken as
long again: one long output would keep a place for minutes while others come and go. Each adapter has one place emptied
for it, and at most a quarter of them are at once.

Adapters are read in the order in which the queue asks for them, LOADS at a time. The host's memory holds `memory` of
them. For another one the longest unused goes of those that have a place or that nobody ahead in the order asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.protocol.messages import Adapter
from penstock.protocol.steps import DropAdapter, LoadAdapter

LOADS = 2  # at once: each shares the bandwidth with the others, and a link has room for few messages
RETRY, MOST_REFUSED = 30.0, 1024  # seconds for which it is known, and of how many, that an adapter cannot be read
PATIENCE = 0.5  # seconds that an adapter waits for a place to become free by itself


class AdapterStatistics(msgspec.Struct, frozen=True):
    """Counters as of now."""

    places: int
    placed: int  # adapters in them
    running: dict[str, int]  # running sequences by their adapter's name
    waiting: dict[str, int]  # the first waiting ones
    held: int  # in the host's memory
    loads: int  # totals since start: adapters read,
    failures: int  # that could not be read,
    copies: int  # and copied to a place


@dataclass(slots=True, eq=False)
class Holding:
    """One adapter that executors have."""

    adapter: Adapter
    number: int
    used: int  # the larger the later
    held: bool = True  # in the host's memory, or being read into it
    loaded: set[int] = field(default_factory=set)  # executors that have read it
    ready: bool = False  # all have
    place: int = 0
    users: int = 0  # running sequences
    wanted: int = 0  # the last pass over the queue that asked for it
    since: float = math.inf  # when it first lacked a place
    emptied: float = math.inf  # since when its place is emptied for others, now or before


class AdapterPlaces:
    """Owner of the places and of what executors hold in the host's memory."""

    def __init__(self, places: int, memory: int, executors: int) -> None:
        assert memory >= places
        self.messages: list[LoadAdapter | DropAdapter] = []  # to executors, behind the plans so far
        self._memory, self._executors = memory, executors
        self._holdings: dict[str, Holding] = {}
        self._loading: dict[int, Holding] = {}
        self._places: list[Holding | None] = [None] * places  # the first has number 1
        self.changes: list[tuple[int, int]] = []  # of the plan that is being made: numbers and their places
        self._emptied: dict[Holding, Holding] = {}  # whose places are, in this pass, and for whom
        self._pass = self._turn = self._number = 0
        self._refused: dict[str, tuple[str, float]] = {}  # by identity: why they could not be read, and when
        self._loads = self._failures = self._copies = 0

    def begin_pass(self) -> None:
        """The queue is gone through anew, in order."""
        self._pass += 1
        self._emptied.clear()

    def prefetch(self, adapter: Adapter) -> None:
        """Have it read if there is room: a request has come that will need it."""
        if adapter.identity not in self._holdings and self._held() < self._memory:
            self._load(adapter)

    def refuse(self, adapter: Adapter, error: str, now: float) -> None:
        """It could not be read: for a while nobody has it tried again, which takes another one's memory."""
        self._refused.pop(adapter.identity, None)
        self._refused[adapter.identity] = error, now
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def refused(self, adapter: Adapter, now: float) -> str:
        """Why it could not be read a while ago; empty: nothing is known."""
        error, since = self._refused.get(adapter.identity, ("", -math.inf))
        return error if now - since < RETRY else ""

    def lacks(self, adapter: Adapter) -> bool:
        """Whether a sequence with this adapter cannot enter a slot now."""
        holding = self._holdings.get(adapter.identity)
        if holding is None or not holding.ready:
            return True
        return not holding.place and self._free_place() is None

    def ask(self, adapter: Adapter, now: float) -> bool:
        """Whether the next sequence in order may enter a slot. If not, what it lacks is on its way as far as may be."""
        holding = self._holdings.get(adapter.identity)
        if holding is None:
            self._load(adapter)
            return False
        holding.wanted = self._pass
        if holding.place:
            return holding not in self._emptied
        if not holding.ready:
            return False
        if self._free_place() is not None:
            return True
        holding.since = min(holding.since, now)
        most = max(1, len(self._places) // 4)
        if now - holding.since >= PATIENCE and holding not in self._emptied.values() and len(self._emptied) < most:
            others = [other for other in self._places if other is not None and other not in self._emptied]
            found = min(others, key=lambda other: (now - other.emptied >= PATIENCE, other.users, other.used))
            found.emptied, self._emptied[found] = min(found.emptied, now), holding
        return False

    def enter(self, adapter: Adapter) -> None:
        """A sequence for which `ask` said yes has a slot now."""
        holding = self._holdings[adapter.identity]
        if not holding.place:
            self._put(holding)
        holding.users += 1
        holding.used = self._next_turn()

    def leave(self, adapter: Adapter) -> None:
        """A sequence leaves its slot. Steps in flight run before whatever is written to the place from now on."""
        holding = self._holdings[adapter.identity]
        assert holding.users > 0
        holding.users -= 1

    def place(self, adapter: Adapter | None) -> int:
        """Of a running sequence."""
        return 0 if adapter is None else self._holdings[adapter.identity].place

    def take_changes(self) -> bytes:
        """`StepPlan.adapters` of the plan that is being made."""
        changes = np.array(self.changes, np.int32).tobytes()
        self.changes.clear()
        return changes

    def loaded(self, number: int, executor: int, error: str) -> Adapter | None:
        """An executor has read an adapter, or could not: then the adapter, which is forgotten everywhere. What it says
        of another epoch is ignored."""
        holding = self._loading.get(number)
        if holding is None:
            return None
        if error:
            self._failures += 1
            del self._loading[number], self._holdings[holding.adapter.identity]
            self.messages.append(DropAdapter(number))
            return holding.adapter
        holding.loaded.add(executor)
        if len(holding.loaded) == self._executors:
            holding.ready = True
            del self._loading[number]
            self._loads += 1
        return None

    def clear(self) -> None:
        """Executors begin anew with empty places, and no sequence runs."""
        assert not any(holding.users for holding in self._holdings.values())
        self._holdings.clear()
        self._loading.clear()
        self.changes.clear()
        self._emptied.clear()
        self._refused.clear()
        self.messages.clear()
        self._places = [None] * len(self._places)

    def statistics(self, waiting: dict[str, int]) -> AdapterStatistics:
        """Those who wait are the queue's to count. An adapter whose folder changed has its name in several places."""
        placed = [holding for holding in self._places if holding is not None]
        running: Counter[str] = Counter()
        for holding in placed:
            running[holding.adapter.name] += holding.users
        return AdapterStatistics(
            len(self._places), len(placed), dict(+running), waiting, self._held(), self._loads, self._failures,
            self._copies,
        )  # fmt: skip

    def _held(self) -> int:
        return sum(holding.held for holding in self._holdings.values())

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _load(self, adapter: Adapter) -> None:
        if len(self._loading) >= LOADS:
            return
        if self._held() >= self._memory:
            spare = [
                holding
                for holding in self._holdings.values()
                if holding.held and holding.ready and (holding.place or holding.wanted < self._pass)
            ]
            if not spare:
                return
            self._drop(min(spare, key=lambda holding: holding.used))
        self._number += 1
        holding = Holding(adapter, self._number, self._next_turn(), wanted=self._pass)
        self._holdings[adapter.identity] = self._loading[self._number] = holding
        self.messages.append(LoadAdapter(self._number, adapter.path, adapter.version))

    def _drop(self, holding: Holding) -> None:
        """Have executors forget it in the host's memory. In a place it serves on."""
        holding.held = False
        self.messages.append(DropAdapter(holding.number))
        if not holding.place:
            del self._holdings[holding.adapter.identity]

    def _free_place(self) -> int | None:
        """The place to take next: an empty one, else the one that was used longest ago of those without users."""
        free = [
            (-1 if holding is None else holding.used, place)
            for place, holding in enumerate(self._places, 1)
            if holding is None or not holding.users
        ]
        return min(free)[1] if free else None

    def _put(self, holding: Holding) -> None:
        place = self._free_place()
        assert place is not None, "`ask` found one"
        before = self._places[place - 1]
        if before is not None:
            before.place = 0
            if not before.held:
                del self._holdings[before.adapter.identity]
        self._places[place - 1], holding.place, holding.since = holding, place, math.inf
        for other in self._holdings.values():
            other.emptied = math.inf
        self.changes.append((holding.number, place))
        self._copies += 1
