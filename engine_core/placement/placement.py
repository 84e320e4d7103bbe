"""The decision: which of several replicas a request goes to.

What a placement costs is counted in tokens that are computed sooner or later:

    cost(r) = missing(r) + displaced(r) + load(r) * typical

`missing(r)` are the tokens of the request that replica r's cache is not expected to hold, `displaced(r)` those for
which another prompt's have to go, to be computed again when that prompt goes on, `load(r)` the choices that r has and
`typical` the mean of what requests of late have missed: each that is ahead has, or had, about as much to compute. Where
prefill is what takes time, the least of the first and the last term is the earliest first token, the rule of Mooncake's
scheduler (Qin et al., arXiv:2407.00079: the time in the queue plus the prefill of what is not cached). Weighing a known
prefix against the load of who has it and against what is evicted for it is Preble's (Srivatsa et al.,
arXiv:2407.00023). Without the second term few requests at a time would all follow a beginning that they share to one
replica, and turn its cache over while the others' are empty.

It does not count what decoding costs: streams slow one another down wherever they were prefilled. So there is a
watermark: a replica whose load is more than RATIO times the least one plus SLACK counts as if it knew no prefix, and
requests spill to the others until the loads are closer. With fewer choices than SLACK a step's time is that of reading
the weights, whoever shares it; at twice the load a step takes up to twice as long.

Where no prefix decides (all replicas would miss the same), a session stays where it was, up to the same watermark.
Equal costs go round. No clock, no randomness: the same reports and requests give the same placements.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from penstock.engine_core.placement.replica import Replica, ReplicaStatistics
from penstock.protocol.messages import EngineStatus

RATIO = 2
SLACK = 8  # choices
RECENT = 32  # requests over which `typical` forgets
MOST = 1 << 16


class Asked(msgspec.Struct, frozen=True):
    """What a request says to its placement."""

    tokens: int  # that it has: of its prompt, and of what was written before it was moved
    chain: Sequence[bytes] = ()  # identities of the full blocks of these
    session: str = ""
    choices: int = 1


class PlacementStatistics(msgspec.Struct, frozen=True):
    """Totals since start, and what is known of each replica."""

    placed: int
    tokens: int  # of placed requests
    expected: int  # of those, in the cache of the replica that was chosen, as it was thought to be
    prefixes: int  # placements that a known prefix decided
    sessions: int  # placements that a session decided
    spills: int  # placements that passed by the longest known prefix, for the load of who has it
    replicas: tuple[ReplicaStatistics, ...]


class Placement:
    """Places requests over `replicas` by `policy`: prefix, least_loaded or round_robin."""

    def __init__(self, policy: str, replicas: int, block_size: int) -> None:
        self.replicas = tuple(Replica() for _ in range(replicas))
        self.block_size = block_size
        self._policy = policy
        self._sessions = Sessions()
        self._turn = 0  # the replica that equal costs fall to
        self._typical = 0.0  # tokens
        self._placed = self._tokens = self._expected = 0
        self._prefixes = self._stuck = self._spills = 0

    @property
    def chains(self) -> bool:
        """Whether identities of blocks make a difference."""
        return self._policy == "prefix" and len(self.replicas) > 1

    def report(self, replica: int, status: EngineStatus) -> None:
        self.replicas[replica].report(status)

    def place(self, asked: Asked, without: Set[int] = frozenset()) -> int | None:
        """The replica that takes the request from now on, none of `without`; None while there is none.

        Replicas that are ready come before those that wait for their executors.
        """
        taking = [number for number, replica in enumerate(self.replicas) if replica.taking and number not in without]
        among = [number for number in taking if self.replicas[number].ready] or taking
        if not among:
            return None
        hits = [self.replicas[number].shadow.hits(asked.chain) if self.chains else 0 for number in among]
        chosen = self._choose(asked, among, hits)
        self._book(asked, chosen, hits[among.index(chosen)])
        return chosen

    def learn(self, replica: int, chain: Sequence[bytes]) -> None:
        """A request there has made the blocks of `chain`: it may be the beginning of the next one's prompt."""
        if self.chains:
            self.replicas[replica].shadow.use(chain)

    def _choose(self, asked: Asked, among: Sequence[int], hits: Sequence[int]) -> int:
        if self._policy == "round_robin":
            return self._least(among, [0.0] * len(among))
        loads = [self.replicas[number].load for number in among]
        if self._policy == "least_loaded":
            return self._least(among, loads)
        most = RATIO * min(loads) + SLACK
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
        missing = max(0, asked.tokens - hits * self.block_size)
        room = self.replicas[number].shadow.room * self.block_size if self.chains else missing
        return missing + max(0, missing - room) + load * max(self._typical, self.block_size)

    def _least(self, among: Sequence[int], costs: Sequence[float]) -> int:
        """Of the cheapest replicas the one whose turn comes first."""
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
            replicas=tuple(replica.statistics() for replica in self.replicas),
        )


class Sessions:
    """Replicas by a session's name, least recent first."""

    def __init__(self, most: int = MOST) -> None:
        self._replicas: dict[str, int] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._replicas)

    def find(self, session: str) -> int | None:
        """Where the session was last; None for one that is not known, or that has no name."""
        return self._replicas.get(session)

    def put(self, session: str, replica: int) -> None:
        """The session goes on there. One without a name is none."""
        if not session:
            return
        self._replicas.pop(session, None)
        self._replicas[session] = replica
        if len(self._replicas) > self._most:
            del self._replicas[next(iter(self._replicas))]
