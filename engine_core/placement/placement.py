"""Which of several replicas a request goes to.

A placement's cost is counted in tokens that are computed sooner or later:

    cost(r) = missing(r) + displaced(r) + load(r) * typical

- missing(r): tokens of the request that replica r's cache is not expected to hold.
- displaced(r): tokens whose blocks are evicted for them, and computed again when their prompt goes on.
- load(r): choices that r has. `typical` is the mean of what recent requests have missed: each choice that is ahead has
  about as much to compute.

Where prefill takes the time, the least of the first and the last term gives the earliest first token. That is the rule
of Mooncake's scheduler: the time in the queue plus the prefill of what is not cached (Qin et al., arXiv:2407.00079).
Weighing a known prefix against its holder's load and against evictions is Preble's (Srivatsa et al., arXiv:2407.00023).
Without the second term a few requests at a time would all follow their common prefix to one replica, and turn its cache
over while the others' are empty.

Decoding costs nothing here: streams slow one another down wherever they were prefilled. Instead there is a watermark. A
replica whose load is more than RATIO times the least one plus SLACK counts as if it knew no prefix, and requests spill
to the others until the loads are closer. With fewer choices than SLACK a step takes as long as reading the weights; at
twice the load it takes up to twice as long.

Where no prefix decides (all replicas would miss the same), a session stays where it was, up to the same watermark.
With `prefill` replicas, the first ones compute prompts for the others. A request goes to one of them, unless some other
replica below the watermark lacks few of its tokens, and then to one of the others. Where none of its kind is ready it
goes to any.

Equal costs rotate. No clock, no randomness: the same reports and requests give the same placements.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set

import msgspec

from penstock.protocol.control import EngineStatus

RATIO = 2
SLACK = 8  # choices
RECENT = 32  # requests over which `typical` is averaged
MAX_SESSIONS = 1 << 16
MAX_BLOCKS = 1 << 18  # identities of one replica; some 30 MB


class Replica:
    """One replica: its last report, and what was sent there since. Owned by the placement."""

    def __init__(self) -> None:
        self.shadow = Shadow()
        self.taking = False  # it has been ready, is connected, and does not drain
        self.placed = 0
        self._status: EngineStatus | None = None
        self._own = 0  # choices that were sent there from here and have not ended
        self._since = 0  # how many more these are than at its last report

    @property
    def ready(self) -> bool:
        """Whether it would run a request at once."""
        return self.taking and self._status is not None and self._status.ready

    @property
    def connected(self) -> bool:
        return self._status is not None

    @property
    def stalled(self) -> bool:
        """Whether it is connected without its executors, so that its requests wait."""
        status = self._status
        return status is not None and not status.ready and not status.draining

    @property
    def load(self) -> int:
        """Choices that it has: its last report, corrected since; never less than those sent from here."""
        status = self._status
        reported = status.running + status.waiting if status is not None else 0
        return max(self._own, reported + self._since)

    def report(self, status: EngineStatus) -> None:
        """Its own report. Another epoch has another cache."""
        if self._status is not None and self._status.epoch != status.epoch:
            self.shadow.clear()
        self._status = status
        self._since = 0
        self.taking = (self.taking or status.ready) and not status.draining
        self.shadow.resize(status.blocks)

    def leave(self) -> None:
        """It is gone, with its cache and its requests."""
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


class Shadow:
    """Identities of a replica's cached blocks, least recently used first."""

    def __init__(self) -> None:
        self._identities: OrderedDict[bytes, None] = OrderedDict()  # a plain dict finds its first key ever slower
        self._limit = 0

    def __len__(self) -> int:
        return len(self._identities)

    @property
    def room(self) -> int:
        """Blocks that can be added before any is forgotten."""
        return self._limit - len(self._identities)

    def resize(self, blocks: int) -> None:
        """The replica has so many blocks."""
        self._limit = min(blocks, MAX_BLOCKS)
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
        for identity in reversed(chain):  # the beginning last: longer prefixes contain it
            identities[identity] = None
            identities.move_to_end(identity)
        self._trim()

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._identities.clear()

    def _trim(self) -> None:
        for _ in range(len(self._identities) - self._limit):
            self._identities.popitem(last=False)


def watermark(loads: Sequence[int]) -> int:
    """The load above which a replica's cached prefixes are worth nothing, among replicas of these loads."""
    return RATIO * min(loads, default=0) + SLACK


class Asked(msgspec.Struct, frozen=True):
    """The properties of a request that its placement depends on."""

    tokens: int  # of its prompt, and of its output before it was moved
    chain: Sequence[bytes] = ()  # identities of the full blocks of these
    session: str = ""
    choices: int = 1
    pooled: bool = False  # nothing is decoded
    prefilled: bool = False  # its blocks come with it


class PlacementStatistics(msgspec.Struct, frozen=True):
    """Totals since the start."""

    placed: int
    tokens: int  # of placed requests
    expected: int  # of those, believed to be in the cache of the chosen replica
    prefixes: int  # placements that a known prefix decided
    sessions: int  # placements that a session decided
    spills: int  # placements that left the longest known prefix, because of its replica's load
    replicas: tuple[int, ...]  # requests that were placed at each


class Placement:
    """Places requests over `replicas` by `policy`: prefix, least_loaded or round_robin."""

    def __init__(self, policy: str, replicas: int, block_size: int, prefill: int = 0, most_local: int = 0) -> None:
        """prefill: the first so many replicas compute prompts for the others. most_local: tokens of a prompt that the
        others compute themselves."""
        assert 0 <= prefill < replicas
        self._prefill, self._most_local = prefill, most_local
        self.replicas = tuple(Replica() for _ in range(replicas))
        self.block_size = block_size
        self._policy = policy
        self._sessions = Sessions()
        self._turn = 0  # the replica that wins at equal costs
        self._typical = 0.0  # tokens
        self._placed = self._tokens = self._expected = 0
        self._prefixes = self._stuck = self._spills = 0

    @property
    def chains(self) -> bool:
        """Whether identities of blocks matter."""
        return self._policy == "prefix" and len(self.replicas) > 1

    @property
    def apart(self) -> bool:
        """Whether some replicas compute prompts for the others."""
        return self._prefill > 0

    def report(self, replica: int, status: EngineStatus) -> None:
        self.replicas[replica].report(status)

    def place(self, asked: Asked, without: Set[int] = frozenset()) -> int | None:
        """The replica that has the request from now on, none of `without`; None while there is none.

        Replicas that are ready come before those that wait for their executors.
        """
        taking = [number for number, replica in enumerate(self.replicas) if replica.taking and number not in without]
        among = self._of_a_kind(asked, [number for number in taking if self.replicas[number].ready] or taking)
        if not among:
            return None
        hits = [self._hits(asked, number) for number in among]
        chosen = self._choose(asked, among, hits)
        self._book(asked, chosen, hits[among.index(chosen)])
        return chosen

    def hands_over(self, number: int) -> bool:
        """Whether what is placed there goes on elsewhere, once its prompt has been computed."""
        return number < self._prefill and any(replica.ready for replica in self.replicas[self._prefill :])

    def _of_a_kind(self, asked: Asked, numbers: list[int]) -> list[int]:
        """Those that compute prompts for others, or those that do not, whichever the request wants; all, if there are
        none of these. It goes to one that decodes if that lacks little of it, and has no load far above the others'."""
        computing = [number for number in numbers if number < self._prefill]
        if not computing or asked.prefilled:
            return [number for number in numbers if number not in computing] or numbers
        others = [] if asked.pooled else [number for number in numbers if number not in computing]
        most = watermark([self.replicas[number].load for number in others])
        near = [
            number for number in others
            if self._missing(asked, self._hits(asked, number)) <= self._most_local
            and self.replicas[number].load <= most
        ]  # fmt: skip
        return near or computing

    def _hits(self, asked: Asked, number: int) -> int:
        """Blocks of it that a replica is believed to hold."""
        return self.replicas[number].shadow.hits(asked.chain) if self.chains else 0

    def _missing(self, asked: Asked, hits: int) -> int:
        return max(0, asked.tokens - hits * self.block_size)

    def learn(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request there has computed the blocks of `chain`, with which the next prompt may begin."""
        if self.chains:
            self.replicas[replica].shadow.use(chain)

    def _choose(self, asked: Asked, among: Sequence[int], hits: Sequence[int]) -> int:
        if self._policy == "round_robin":
            return self._least(among, [0.0] * len(among))
        loads = [self.replicas[number].load for number in among]
        if self._policy == "least_loaded":
            return self._least(among, loads)
        most = watermark(loads)
        known = [hit if load <= most else 0 for hit, load in zip(hits, loads, strict=True)]
        if max(known) == min(known):
            last = self._sessions.find(asked.session)
            if last is not None and last in among and loads[among.index(last)] <= most:
                self._stuck += 1
                return last
        else:
            self._prefixes += 1
        numbers = zip(among, known, loads, strict=True)
        chosen = self._least(among, [self._cost(asked, number, hit, load) for number, hit, load in numbers])
        self._spills += hits[among.index(chosen)] < max(hits)
        return chosen

    def _cost(self, asked: Asked, number: int, hits: int, load: int) -> float:
        missing = self._missing(asked, hits)
        room = self.replicas[number].shadow.room * self.block_size if self.chains else missing
        return missing + max(0, missing - room) + load * max(self._typical, self.block_size)

    def _least(self, among: Sequence[int], costs: Sequence[float]) -> int:
        """Of the cheapest replicas the one whose turn is first."""
        size = len(self.replicas)
        _, _, chosen = min((cost, (r - self._turn) % size, r) for r, cost in zip(among, costs, strict=True))
        self._turn = (chosen + 1) % size
        return chosen

    def _book(self, asked: Asked, chosen: int, hits: int) -> None:
        expected = min(hits * self.block_size, asked.tokens)
        missing = asked.tokens - expected
        self._typical += (missing - self._typical) / min(self._placed + 1, RECENT)
        self._placed += 1
        self._tokens += asked.tokens
        self._expected += expected
        self._sessions.put(asked.session, chosen)
        self.replicas[chosen].take(asked.choices)
        self.learn(chosen, asked.chain)

    def statistics(self) -> PlacementStatistics:
        """Counters for metrics and tests."""
        return PlacementStatistics(
            placed=self._placed,
            tokens=self._tokens,
            expected=self._expected,
            prefixes=self._prefixes,
            sessions=self._stuck,
            spills=self._spills,
            replicas=tuple(replica.placed for replica in self.replicas),
        )


class Sessions:
    """Replicas by session, least recently used first."""

    def __init__(self, most: int = MAX_SESSIONS) -> None:
        self._replicas: dict[str, int] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, session: str) -> int | None:
        """Where the session was last; None for an unknown or empty name."""
        return self._replicas.get(session)

    def put(self, session: str, replica: int) -> None:
        """The session continues there. An empty name is ignored."""
        if not session:
            return
        self._replicas.pop(session, None)
        self._replicas[session] = replica
        if len(self._replicas) > self._most:
            del self._replicas[next(iter(self._replicas))]
