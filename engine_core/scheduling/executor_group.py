"""The executor group of one replica as a state machine: who joined, who is ready or asleep, since when a member is
missing.

A group sleeps once nothing has been asked of it for the idle timeout: its members give their devices back, and come
again to wait. What comes next wakes them, and they load as at a start. The state says what is wanted of the group;
members follow whenever they are heard of. One that is ready while the group sleeps is sent to sleep, and one that waits
while it is awake is woken. So it does not matter which of them ends, or falls asleep late, in between.

Where several models share a device (`on_demand`) somebody else says when a group sleeps and when it wakes. Until it has
been told, it takes what it finds: members that wait go on waiting, and one that is ready means that it is awake.
"""

from __future__ import annotations

import enum
from typing import Generic, Protocol, TypeVar

from penstock.protocol.messages import BlocksAddresses
from penstock.protocol.steps import ExecutorReady

MEMBERS_LIMIT = 30.0  # seconds between the first member of a group that is ready and the last
MISSING_LIMIT = 60.0  # seconds that requests wait for a lost executor to come back
LOADS = 2.0  # times as long as the slowest load so far that they wait beyond that for one that was woken


class Member(Protocol):
    """A connection to an executor."""

    @property
    def index(self) -> int: ...


M = TypeVar("M", bound=Member)


class Rest(enum.Enum):
    """What is wanted of a group, and whether it has followed."""

    AWAKE = enum.auto()
    ASLEEP = enum.auto()
    WAKING = enum.auto()  # it loads, and requests wait for it


class ExecutorGroup(Generic[M]):
    """One replica's executors. Each time the group becomes complete a new epoch begins."""

    def __init__(
        self, size: int, epoch: int, now: float, answering: int = 0, stage: int = 1, idle_timeout: float = 0.0, *,
        on_demand: bool = False,
    ) -> None:  # fmt: skip
        self.epoch = epoch  # of the group that is complete, or of the next one
        self.missing_since = now  # monotonic seconds; holds while the group is not complete
        self.crash_loop = ""  # why no executor will come, as the launcher says
        self.rest = Rest.ASLEEP if on_demand else Rest.AWAKE
        self.wake_seconds = 0.0  # that the last wake took
        self._on_demand = on_demand
        self._told = not on_demand  # somebody has said whether it is to sleep
        self.rest_since = now  # monotonic seconds
        self.known: ExecutorReady | None = None  # the first member of the group that was last complete
        self._size = size
        self._answering = answering  # place in the group of the member that samples
        self._stage = stage  # members of a stage
        self._idle_timeout = idle_timeout  # seconds; 0: it never sleeps by itself
        self._busy_at = now  # monotonic seconds
        self._load_seconds = 0.0  # of the member that has taken longest
        self._ready: dict[M, ExecutorReady] = {}
        self._asleep: dict[M, int] = {}  # with the bytes of weights that they keep in the host's memory
        self.discards = False  # those that fall asleep are to keep none
        self._waited_since = float("inf")  # monotonic seconds, since when some members are ready and others are not

    @property
    def complete(self) -> bool:
        return len(self._ready) == self._size

    @property
    def serves(self) -> bool:
        """Whether requests are taken: a group that sleeps or wakes will run them, unless it is known not to come."""
        return self.complete or (self.rest is not Rest.AWAKE and not (self._on_demand and self.crash_loop))

    @property
    def all_asleep(self) -> bool:
        """Whether no member holds its device, and each has said so."""
        return len(self._asleep) == self._size and self.rest is Rest.ASLEEP

    @property
    def kept_bytes(self) -> int:
        """Of weights, in the host's memory while members sleep."""
        return sum(self._asleep.values())

    @property
    def in_step(self) -> bool:
        """Whether all ready members have run the same plans. The last plans of a scheduler that was killed may have
        reached some members only, and the next collective would put two different steps together."""
        return len({ready.plans for ready in self._ready.values()}) <= 1

    @property
    def peers(self) -> tuple[M, ...]:
        return tuple(self._ready)

    @property
    def answering(self) -> tuple[M, ...]:
        """The member of a complete group that samples, and so needs masks."""
        return (sorted(self._ready, key=lambda peer: peer.index)[self._answering],)

    @property
    def encoding(self) -> tuple[M, ...]:
        """The members of a complete group that encode images: those of the first stage."""
        return tuple(sorted(self._ready, key=lambda peer: peer.index)[: self._stage])

    @property
    def devices(self) -> str:
        """The device of the first member, and the number of members, in words; empty before the group was complete."""
        if self.known is None:
            return ""
        return self.known.device if self._size == 1 else f"{self._size} x {self.known.device}"

    @property
    def blocks(self) -> int:
        """KV blocks that every executor of the group has."""
        return min(ready.blocks for ready in self._ready.values())

    @property
    def step_tokens(self) -> int:
        """Token budget that every executor of the group agrees to."""
        return min(ready.step_tokens for ready in self._ready.values())

    @property
    def mask_slots(self) -> int:
        """Masks that every executor of the group keeps."""
        return min(ready.mask_slots for ready in self._ready.values())

    @property
    def draft_tokens(self) -> int:
        """Drafts of a row that every executor of the group makes."""
        return min(ready.draft_tokens for ready in self._ready.values())

    @property
    def state_places(self) -> tuple[int, int]:
        """Snapshots that every executor of the group has room for on the device and in the host's memory, but those
        whose layers have no states."""
        found = [ready for ready in self._ready.values() if ready.state_bytes]
        return (
            min([ready.state_places for ready in found], default=0),
            min([ready.state_host_places for ready in found], default=0),
        )

    @property
    def host_blocks(self) -> int:
        """KV blocks that each of `caching` has room for in its host's memory."""
        return min([self._ready[peer].host_blocks for peer in self.caching], default=0)

    @property
    def disk_blocks(self) -> int:
        """KV blocks that each of `caching` has room for on its disk."""
        return min([self._ready[peer].disk_blocks for peer in self.caching], default=0)

    @property
    def kv_store(self) -> bool:
        """Whether behind the host's memory is a store that other servers use as well."""
        return all(self._ready[peer].kv_store for peer in self.caching)

    @property
    def room(self) -> tuple[int, tuple[int, int], int, int, int, BlocksAddresses]:
        """What `Scheduler.restart` is told: KV blocks, places for states, rows of images, KV blocks in the host's
        memory and on disk, and where other hosts read those of the host's memory."""
        tiers = self.host_blocks, self.disk_blocks, self.addresses
        return self.blocks, self.state_places, self.encoder_rows, *tiers

    @property
    def caching(self) -> tuple[M, ...]:
        """The members that have KV blocks: layers of a stage may all be recurrent."""
        return tuple([peer for peer, ready in self._ready.items() if ready.cache_bytes])

    @property
    def addresses(self) -> BlocksAddresses:
        """Where other hosts read the blocks of each member of a complete group; of none where none can be read."""
        found = tuple(self._ready[peer].address for peer in sorted(self._ready, key=lambda peer: peer.index))
        return found if any(found) else ()

    @property
    def adapter_places(self) -> int:
        """Places for adapters that every executor of the group has."""
        return min(ready.adapter_places for ready in self._ready.values())

    @property
    def encoder_rows(self) -> int:
        """Rows that the encoder cache of every executor of a complete group's first stage has."""
        return min(self._ready[peer].encoder_rows for peer in self.encoding)

    @property
    def readies(self) -> tuple[ExecutorReady, ...]:
        """What the members say."""
        return tuple(self._ready.values())

    @property
    def first(self) -> ExecutorReady:
        return self._ready[min(self._ready, key=lambda peer: peer.index)]

    def adopt(self, now: float) -> tuple[M, ...]:
        """A member is ready. Where nobody has said what is wanted, the group is awake; members to be woken for that."""
        if self._told or self.rest is not Rest.ASLEEP:
            return ()
        self._told, self.missing_since = True, now
        self.rest, self.rest_since = Rest.AWAKE, now
        return tuple(self._asleep)

    def add(self, peer: M, ready: ExecutorReady, now: float) -> bool:
        """An executor has loaded; whether the group is complete now. One that reports again has no slots left."""
        assert self.rest is not Rest.ASLEEP, "it is sent to sleep"
        if peer in self._ready:
            self.remove(peer, now)
        for other in self.peers:
            assert other.index != peer.index, "the link loses a peer before another takes its index"
        self._ready[peer] = ready
        self._load_seconds = max(self._load_seconds, ready.load_seconds)
        self._waited_since = float("inf") if self.complete else min(self._waited_since, now)
        if self.complete:
            self.known, self._busy_at = self.first, now
        return self.complete

    def remove(self, peer: M, now: float) -> bool:
        """An executor is gone; whether that broke a complete group. The next group has an epoch of its own."""
        broke = self.complete and peer in self._ready
        self._ready.pop(peer, None)
        self._asleep.pop(peer, None)
        if broke:
            self.epoch += 1
            self.missing_since = self._waited_since = now
        if not self._ready:
            self._waited_since = float("inf")
        return broke

    def given_up(self, now: float) -> bool:
        """Whether executors have been missing for so long, or failed so often, that requests should not wait."""
        if self.complete or (self.rest is Rest.ASLEEP and not (self._on_demand and self.crash_loop)):
            return False
        patience = LOADS * self._load_seconds if self.rest is Rest.WAKING else 0.0
        return now - self.missing_since >= MISSING_LIMIT + patience or bool(self.crash_loop)

    def stuck(self, now: float) -> bool:
        """Whether the ready members have waited too long for the others. Members of one generation are ready at about
        the same time, because none is without the others: so one of them hangs in a step."""
        return not self.complete and now - self._waited_since >= MEMBERS_LIMIT

    def busy(self, now: float) -> None:
        """Requests run or wait."""
        self._busy_at = now

    def idle_for(self, now: float) -> float:
        """Seconds since requests last ran or waited, or since the group became complete."""
        return now - self._busy_at

    def sleep_due(self, now: float) -> bool:
        """Whether a complete group has had nothing to do for the idle timeout."""
        return 0.0 < self._idle_timeout <= self.idle_for(now) and self.complete

    def sleep(self, now: float, *, discard: bool = False) -> tuple[M, ...]:
        """Let the members go, which are to be told. The next group has an epoch of its own."""
        members, self.discards = self.peers, discard
        self.epoch += 1
        self._ready.clear()
        self._waited_since = float("inf")
        self.rest, self.rest_since, self._told = Rest.ASLEEP, now, True
        return members

    def fall_asleep(self, peer: M, kept_bytes: int = 0) -> bool:
        """A member says that it sleeps; whether it is to be woken at once."""
        self._asleep[peer] = kept_bytes
        return self.rest is not Rest.ASLEEP

    def discard(self) -> tuple[M, ...]:
        """A group that sleeps is to keep no weights any more; members that do, which are to be told once."""
        told, self.discards = self.discards, True
        return () if told else tuple(peer for peer, kept in self._asleep.items() if kept)

    def wake(self, now: float) -> tuple[M, ...]:
        """The members that sleep so far, which are to be told; those that are yet to fall asleep are woken then."""
        assert self.rest is Rest.ASLEEP
        self.missing_since = now
        self.rest, self.rest_since, self._told = Rest.WAKING, now, True
        return tuple(self._asleep)

    def end_wake(self, now: float) -> None:
        """The group is complete again, or has been given up: nothing is special about it any more."""
        if self.complete:
            self.wake_seconds = now - self.rest_since
        self.rest, self.rest_since = Rest.AWAKE, now
