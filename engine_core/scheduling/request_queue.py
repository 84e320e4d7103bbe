"""The waiting sequences in admission order: priorities, then fair shares, then arrival.

A smaller first number of the rank (a higher priority) goes strictly first. Among equals tenants take turns, and below
each tenant its clients, so a tenant that invents clients gains nothing over another one. A client's own sequences go by
rank; with a single client that is the whole order.

Turns are deficit round robin in tokens. Source: Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round
Robin", SIGCOMM 1995; counted in tokens as in Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. A
turn is worth QUANTUM tokens. A share is served while its balance is positive and pays afterwards, because a sequence's
cost is known only when it has ended; a share in debt sits out as many rounds as it takes to pay. Rounds have numbers,
so a share that sits out is not visited, and time spent with nothing waiting pays a debt too. Between two shares that
both wait, service differs by at most the most expensive sequence and three quanta. Newcomers join the next round, so a
waiting share is passed only by those before it: endless newcomers starve nothing.

Preempted sequences have been paid for and go before all turns, by rank. Before them goes the first sequence of a
starved client: one that has had nothing running for PATIENCE seconds while another tenant holds at least two slots more
than its own, or a sibling at least two. The most junior sequence of the largest holder gives up its slot (`victim`).
Each exchange makes the shares more even, so exchanges come to an end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from penstock.engine_core.scheduling.request import Rank, Sequence

QUANTUM = 64  # tokens: a short turn costs nothing, and what is cheap waits for less
MOST = 2 * QUANTUM  # largest balance after a refund
Place = tuple[int, int]  # round, then the order of coming into it
PATIENCE = 0.25  # seconds; mostly a slot is free before
LOOK = 0.05  # seconds between searches for starved clients
TYPICAL = 256  # expected tokens of an output, before any has ended
MOST_BLOCKED = 64  # sequences of a client that one pass looks at and leaves
MEMORY = 1.0 / 32  # weight of one output in the mean


class Share:
    """A tenant or a client that takes turns with others."""

    __slots__ = ("balance", "place", "waits")

    def __init__(self) -> None:
        self.balance = 0  # tokens left of its turn, positive while it waits
        self.place: Place = (0, 0)
        self.waits = False


S = TypeVar("S", bound=Share)


class Ring(Generic[S]):
    """Owner of the places and balances of shares."""

    def __init__(self) -> None:
        self._turns: list[tuple[int, int, S]] = []
        self._round = 0  # in which a share was last served in its turn
        self._orders = 0

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, share: S) -> None:
        """It has a waiting sequence now."""
        assert not share.waits
        round_ = share.place[0]
        if round_ <= self._round:
            round_, share.balance = self._round + 1, QUANTUM
        self._insert(share, round_)

    def leave(self, share: S) -> None:
        """It has no waiting sequence any more. A debt is kept."""
        del self._turns[bisect_left(self._turns, share.place)]
        share.waits = False

    def next(self, place: Place) -> S | None:
        """The first share at this place or behind it."""
        index = bisect_left(self._turns, place)
        return self._turns[index][2] if index < len(self._turns) else None

    def serve(self, share: S, tokens: int) -> None:
        """A sequence of it was admitted, which is expected to cost this many tokens."""
        if self._turns and self._turns[0][2] is share:
            self._round = max(self._round, share.place[0])
        self.charge(share, tokens)

    def charge(self, share: S, tokens: int) -> None:
        """It costs this many tokens more than expected, or fewer if negative. A refund does not move it before shares
        that wait in the next round already."""
        share.balance -= tokens
        rounds = (QUANTUM - share.balance) // QUANTUM  # until the balance is positive again
        if not rounds:
            return
        before = share.place[0]
        share.balance += rounds * QUANTUM
        after, least = before + rounds, min(before, self._round + 1)
        if after < least:
            after, share.balance = least, min(share.balance + (least - after) * QUANTUM, MOST)
        if after == before:
            return
        if share.waits:
            self.leave(share)
            self._insert(share, after)
        else:
            share.place = (after, 0)

    def _insert(self, share: S, round_: int) -> None:
        self._orders += 1
        share.place, share.waits = (round_, self._orders), True
        insort(self._turns, (round_, self._orders, share))


class Client(Share):
    """The waiting and running sequences of one client at one priority."""

    __slots__ = ("name", "running", "sequences", "tenant")

    def __init__(self, name: str, tenant: Tenant) -> None:
        super().__init__()
        self.name = name
        self.tenant = tenant
        self.sequences: list[Sequence] = []  # waiting, by rank
        self.running: dict[Sequence, None] = {}  # have a slot, or are promised the next one

    def place_of(self, sequence: Sequence) -> int:
        index = bisect_left(self.sequences, sequence.rank, key=rank)
        assert self.sequences[index] is sequence
        return index


class Tenant(Share):
    """The clients of one tenant at one priority."""

    __slots__ = ("clients", "crowded", "level", "name", "ring", "running", "starving")

    def __init__(self, name: str, level: Level) -> None:
        super().__init__()
        self.name = name
        self.level = level
        self.ring: Ring[Client] = Ring()
        self.clients: dict[str, Client] = {}
        self.running = 0
        self.crowded = 0  # clients with more than one running
        self.starving: OrderedDict[Client, float] = OrderedDict()  # wait with nothing running, since when


class Level:
    """All tenants of one priority."""

    __slots__ = ("number", "preempted", "promised", "ring", "tenants")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ring: Ring[Tenant] = Ring()
        self.tenants: dict[str, Tenant] = {}
        self.promised: dict[Sequence, None] = {}  # of starved clients, in order of the promise
        self.preempted: list[Sequence] = []  # by rank


class RequestQueue:
    """Owner of the order, and of what each client has running. `fair`: without it all are one client."""

    def __init__(self, *, fair: bool = True) -> None:
        self.tokens = 0  # of the prompts of those that wait
        self._fair = fair
        self._levels: dict[int, Level] = {}
        self._numbers: list[int] = []  # of the levels, the one that goes first first
        self.waiting = 0  # sequences
        self._clients: dict[Sequence, Client] = {}  # from a sequence's first wait to its end
        self._paid: dict[Sequence, int] = {}  # tokens that a sequence was expected to reach when its client paid for it
        self._typical = float(TYPICAL)
        self._look_at = 0.0

    def __len__(self) -> int:
        return self.waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting sequences, in no particular order between clients."""
        for number in self._numbers:
            for tenant in self._levels[number].tenants.values():
                for client in tenant.clients.values():
                    yield from client.sequences

    @property
    def clients(self) -> int:
        """Clients with anything waiting."""
        return sum(len(tenant.ring) for level in self._levels.values() for tenant in level.tenants.values())

    def put(self, sequence: Sequence, now: float, *, preempted: bool = False) -> None:
        """Queue a sequence."""
        client = self._clients[sequence] = self._client(sequence)
        tenant = client.tenant
        insort(client.sequences, sequence, key=rank)
        self.tokens += sequence.request.prompt_tokens
        self.waiting += 1
        if preempted:
            insort(tenant.level.preempted, sequence, key=rank)
        if not client.waits:
            tenant.ring.join(client)
        if not tenant.waits:
            tenant.level.ring.join(tenant)
        if not client.running:
            tenant.starving.setdefault(client, now)

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        assert sequence in self._clients, "it has been in the queue"
        client = self._clients[sequence]
        self._take(sequence, client)
        if sequence in client.running:
            self._stop(sequence, client)
        self._tidy(client)

    def enter(self, sequence: Sequence, computed: int) -> None:
        """A sequence gets a slot. Its client pays for the computed positions and the expected output, once, however
        often the sequence is preempted."""
        client = self._clients[sequence]
        tenant = client.tenant
        if sequence not in self._paid:
            expected = min(sequence.limit - len(sequence.tokens), int(self._typical))
            self._paid[sequence] = len(sequence.tokens) + expected
            tenant.level.ring.serve(tenant, computed + expected)
            tenant.ring.serve(client, computed + expected)
        self._take(sequence, client)
        self._run(sequence, client)

    def leave(self, sequence: Sequence, now: float) -> None:
        """A sequence leaves its slot. It waits again, or ends."""
        client = self._clients[sequence]
        self._stop(sequence, client)
        if client.sequences and not client.running:
            client.tenant.starving[client] = now
        self._tidy(client)

    def settle(self, sequence: Sequence) -> None:
        """A sequence ends: correct what was paid for it to what it cost. Called before `leave`."""
        if sequence in self._paid:
            client = self._clients[sequence]
            more = len(sequence.tokens) - self._paid[sequence]
            client.tenant.ring.charge(client, more)
            client.tenant.level.ring.charge(client.tenant, more)
            self._typical += MEMORY * (sequence.outputs - self._typical)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended and will not return."""
        self._clients.pop(sequence, None)
        self._paid.pop(sequence, None)

    def walk(self) -> Walk:
        return Walk([self._levels[number] for number in self._numbers], self._clients)

    def starved(self, now: float, blocked: Callable[[Sequence], bool] | None = None) -> Sequence | None:
        """The first sequence of a starved client, if another client should yield a slot to it. A slot is of no use to
        one that is `blocked`."""
        if now < self._look_at:
            return None
        for number in self._numbers:
            level = self._levels[number]
            below, most = self._below(level), busiest(level)
            for tenant in level.tenants.values():
                late = (one for one, since in tenant.starving.items() if since + PATIENCE <= now)
                client = next((one for one in late if blocked is None or not blocked(one.sequences[0])), None)
                if client is None:
                    continue
                if below is not None or tenant.crowded or most.running >= tenant.running + 2:
                    return client.sequences[0]
        self._look_at = now + LOOK
        return None

    def promise(self, sequence: Sequence) -> None:
        """Put a sequence before all others of its priority; it counts as running from now on."""
        client = self._clients[sequence]
        client.tenant.level.promised[sequence] = None
        self._run(sequence, client)

    def promised(self) -> list[Sequence]:
        """Waiting sequences that were promised a slot, in order."""
        return [sequence for number in self._numbers for sequence in self._levels[number].promised]

    def victim(self, sequence: Sequence) -> Sequence | None:
        """The running sequence that yields its slot to a promised one: the most junior one of the largest client of the
        largest tenant. None where that would not make shares more even."""
        own = self._clients[sequence].tenant
        tenant = self._below(own.level)
        if tenant is None:
            most = busiest(own.level)
            tenant = most if most.running > own.running else own
        client = max(tenant.clients.values(), key=lambda each: len(each.running))
        if tenant is own and len(client.running) < 2:
            return None
        return max([each for each in client.running if each.slot >= 0], key=rank, default=None)

    def _below(self, level: Level) -> Tenant | None:
        """The largest tenant of the least priority below this one, if anything runs there."""
        for number in reversed(self._numbers):
            if number == level.number:
                break
            most = busiest(self._levels[number])
            if most.running:
                return most
        return None

    def _client(self, sequence: Sequence) -> Client:
        """The account of the sequence's client at its priority, made at its first use."""
        message = sequence.request.message
        tenant_name, name = (message.client.tenant, message.client.name) if self._fair else ("", "")
        level = self._levels.get(sequence.rank[0])
        if level is None:
            level = self._levels[sequence.rank[0]] = Level(sequence.rank[0])
            insort(self._numbers, level.number)
        tenant = level.tenants.get(tenant_name)
        if tenant is None:
            tenant = level.tenants[tenant_name] = Tenant(tenant_name, level)
        client = tenant.clients.get(name)
        if client is None:
            client = tenant.clients[name] = Client(name, tenant)
        return client

    def _take(self, sequence: Sequence, client: Client) -> None:
        """Remove a sequence from every waiting list."""
        tenant, index = client.tenant, client.place_of(sequence)
        del client.sequences[index]
        self.tokens -= sequence.request.prompt_tokens
        self.waiting -= 1
        level = tenant.level
        level.promised.pop(sequence, None)
        index = bisect_left(level.preempted, sequence.rank, key=rank)
        if index < len(level.preempted) and level.preempted[index] is sequence:
            del level.preempted[index]
        if not client.sequences:
            tenant.starving.pop(client, None)
            tenant.ring.leave(client)
            if not tenant.ring:
                level.ring.leave(tenant)

    def _run(self, sequence: Sequence, client: Client) -> None:
        """Count a sequence as running, once."""
        if sequence in client.running:
            return
        client.running[sequence] = None
        client.tenant.running += 1
        client.tenant.crowded += len(client.running) == 2
        client.tenant.starving.pop(client, None)

    def _stop(self, sequence: Sequence, client: Client) -> None:
        client.tenant.crowded -= len(client.running) == 2
        client.tenant.running -= 1
        del client.running[sequence]

    def _tidy(self, client: Client) -> None:
        """Remove the accounts of a client that has no sequences left. It starts anew when it returns."""
        tenant = client.tenant
        if client.sequences or client.running:
            return
        del tenant.clients[client.name]
        if not tenant.clients:
            del tenant.level.tenants[tenant.name]
        if not tenant.level.tenants:
            del self._levels[tenant.level.number]
            self._numbers.remove(tenant.level.number)


class Walk:
    """One pass over the waiting sequences in order. Admitting one moves its client back, so the order is looked up anew
    for each; a sequence that was skipped is not returned again."""

    def __init__(self, levels: list[Level], clients: Mapping[Sequence, Client]) -> None:
        self._levels = levels
        self._client_of = clients
        self._passed: dict[Client, int] = {}  # its sequences from the first on
        self._preempted: dict[Level, int] = {}  # of the preempted ones
        self._tenants: dict[Level, Place] = {}  # everything before is passed over
        self._clients: dict[Tenant, Place] = {}
        self.passed = 0
        self.blocked = 0  # passed over because something was missing that others do not need
        self._blocked: dict[Client, int] = {}

    def next(self) -> Sequence | None:
        """The first sequence that was not passed over."""
        for level in self._levels:
            found = self._ahead(level) or self._in_turn(level)
            if found is not None:
                return found
        return None

    def skip(self, sequence: Sequence) -> None:
        client = self._client_of[sequence]
        self._passed[client] = self._passed.get(client, 0) + 1
        self.passed += 1

    def skip_blocked(self, sequence: Sequence) -> None:
        """Pass over a sequence that delays nobody. After MOST_BLOCKED of a client's that is the client, unless it is
        the only one."""
        client = self._client_of[sequence]
        count = self._blocked[client] = self._blocked.get(client, 0) + 1
        alone = len(self._levels) == 1 and len(client.tenant.level.tenants) == len(client.tenant.clients) == 1
        given_up = count >= MOST_BLOCKED and not alone
        self._passed[client] = len(client.sequences) if given_up else self._passed.get(client, 0) + 1
        self.blocked += 1

    def _ahead(self, level: Level) -> Sequence | None:
        """The next promised or preempted sequence: they go before all turns."""
        for sequence in level.promised:
            client = self._client_of[sequence]
            passed = self._passed.get(client, 0)
            if client.place_of(sequence) >= passed:
                return client.sequences[passed]
        index = self._preempted.get(level, 0)
        while index < len(level.preempted):
            sequence = level.preempted[index]
            client = self._client_of[sequence]
            passed = self._passed.get(client, 0)
            if client.place_of(sequence) >= passed:
                return client.sequences[passed]  # an older one of the client's first: they are never out of order
            index = self._preempted[level] = index + 1
        return None

    def _in_turn(self, level: Level) -> Sequence | None:
        """The next sequence of the first tenant's first client in turn."""
        while (tenant := level.ring.next(self._tenants.get(level, (0, 0)))) is not None:
            while (client := tenant.ring.next(self._clients.get(tenant, (0, 0)))) is not None:
                passed = self._passed.get(client, 0)
                if passed < len(client.sequences):
                    return client.sequences[passed]
                self._clients[tenant] = behind(client)
            self._tenants[level] = behind(tenant)
        return None


def busiest(level: Level) -> Tenant:
    return max(level.tenants.values(), key=lambda tenant: tenant.running)


def behind(share: Share) -> Place:
    return share.place[0], share.place[1] + 1


def rank(sequence: Sequence) -> Rank:
    return sequence.rank
