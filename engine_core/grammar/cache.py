"""Which automata are kept for requests to start from: how many bytes they may take, and which are evicted.

The automaton library does not tell how large an automaton is. A compile worker has made the same one before and
measured what was allocated meanwhile; what it learns in use comes on top. An automaton counts as long as anything holds
it: the cache, the build that makes it, or a request that runs by it.

The caller makes automata: `reserve` and `wants` give it room for one, and `built` takes what came of it.
"""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakSet

import msgspec

from penstock.engine_core.grammar.guide import Charge, Guide, first_line
from penstock.protocol.errors import GrammarFailure, InvalidRequest, Overloaded, RequestError
from penstock.protocol.messages import Automaton

Key = tuple[str, bytes, bytes]  # an automaton's source, what it begins after, and its unique items
FAMILY = 16  # requests after which an automaton is made once more: masks of one's copies are filled one by one
OPTION = "--grammar-cache-bytes"
RETRY = 1.0  # seconds after which a request that ran may have ended

# Measured with glibc's count of allocated bytes, see tests/engine_core/grammar/test_cache.py: outputs of hundreds of
# tokens add up to 400 KiB to what was there after a worker's walk, and at most a sixteenth to large ones.
LEARNED = 512 << 10  # bytes
PLACES = 16  # bytes for each of what says where unique items stand
UNMEASURED = 640  # bytes for each of a source, where the C library tells nothing


def cost(automaton: Automaton) -> int:
    """Bytes that an automaton is taken to hold, its source included."""
    source = len(automaton.source) * (1 if automaton.source.isascii() else 4) + PLACES * len(automaton.unique)
    built = automaton.memory or UNMEASURED * source
    return source + built + built // 16 + LEARNED


def key_of(automaton: Automaton) -> Key:
    return automaton.source, automaton.after, automaton.unique


class GrammarCacheStatistics(msgspec.Struct, frozen=True):
    """Counters since start, and what is kept now."""

    entries: int  # now
    bytes: int  # now: of those and of others that requests still run by
    built: int
    hits: int  # requests whose automaton was kept
    failed: int


class Entry:
    """An automaton, made once or several times, whose copies requests start from in turns."""

    def __init__(self) -> None:
        self.guides: list[Guide] = []
        self.users: WeakSet[Guide] = WeakSet()
        self.building = 0  # further ones that are being made
        self.uses = 0  # requests

    @property
    def size(self) -> int:
        """Bytes that evicting it frees, if no request uses it."""
        return sum([guide.charge.size for guide in self.guides if guide.charge is not None])

    def next(self) -> Guide:
        """A guide of a request's own."""
        self.uses += 1
        found = self.guides[self.uses % len(self.guides)].copy()
        self.users.add(found)
        return found


class GrammarCache:
    """Owner of the automata. `families` is how often one automaton is made at most."""

    def __init__(self, limit: int, families: int = 1) -> None:
        self._limit = limit
        self._families = families
        self._entries: OrderedDict[Key, Entry] = OrderedDict()  # least recently used first
        self._charges: WeakSet[Charge] = WeakSet()
        self._built = self._hits = self._failed = 0

    @property
    def bytes(self) -> int:
        """Of all automata that anything holds."""
        return sum([charge.size for charge in self._charges])

    def find(self, automaton: Automaton) -> Guide | None:
        """A guide for a request that has just come, if its automaton is kept."""
        found = self.guide(automaton)
        self._hits += found is not None
        return found

    def guide(self, automaton: Automaton) -> Guide | None:
        """A guide for a request, if its automaton is kept."""
        key = key_of(automaton)
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry.next()

    def reserve(self, automaton: Automaton) -> Charge:
        """Room for an automaton that is to be made; unused ones are evicted for it.

        Raises InvalidRequest for one that is larger than the cache, Overloaded where running requests hold the rest.
        """
        size = cost(automaton)
        if size > self._limit:
            message = f"the structure takes {size >> 20} MiB of memory; {OPTION} leaves {self._limit >> 20} MiB"
            raise InvalidRequest(message, code="grammar_too_complex")
        excess = self.bytes + size - self._limit
        idle = [(key, entry.size) for key, entry in self._entries.items() if not (entry.users or entry.building)]
        if excess > sum([held for _, held in idle]):
            message = f"the structures of running requests take all of {self._limit >> 20} MiB ({OPTION})"
            raise Overloaded(message, retry_after=RETRY)
        for key, held in idle:
            if excess <= 0:
                break
            del self._entries[key]
            excess -= held
        return self._charged(size)

    def wants(self, automaton: Automaton) -> Charge | None:
        """Room for one more of an automaton that many requests start from."""
        entry, size = self._entries.get(key_of(automaton)), cost(automaton)
        if entry is None or self.bytes + size > self._limit:
            return None
        wanted = min(self._families, 1 + entry.uses // FAMILY)
        if wanted <= len(entry.guides) + entry.building:
            return None
        entry.building += 1
        return self._charged(size)

    def built(self, automaton: Automaton, charge: Charge, found: Guide | BaseException) -> RequestError | None:
        """Keep an automaton that was made; otherwise the error that its requests end with."""
        if isinstance(found, Guide):
            self._built += 1
            found.charge = charge
            entry = self._entries.setdefault(key_of(automaton), Entry())
            if entry.guides:
                found.share(entry.guides[0])
            else:
                charge.states = found.states
            entry.guides.append(found)
            entry.building = max(0, entry.building - 1)
            return None
        self._failed += 1
        if isinstance(found, RequestError):
            return found.with_traceback(None)  # its frames hold the automaton
        return GrammarFailure(f"the structure could not be prepared: {first_line(str(found))}")

    def statistics(self) -> GrammarCacheStatistics:
        return GrammarCacheStatistics(len(self._entries), self.bytes, self._built, self._hits, self._failed)

    def _charged(self, size: int) -> Charge:
        charge = Charge(size)
        self._charges.add(charge)
        return charge
