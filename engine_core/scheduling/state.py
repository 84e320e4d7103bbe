"""The scheduler's state in one place; planning, applying results and the life cycle are functions over it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.spacing import Habits
from penstock.engine_core.kv.block_layout import BlockLayout
from penstock.engine_core.kv.block_pool import BlockPool
from penstock.engine_core.kv.host_tier import HostTier
from penstock.engine_core.kv.prefix_index import PrefixIndex
from penstock.engine_core.kv.snapshots import Snapshots
from penstock.engine_core.scheduling.adapters import AdapterPlaces
from penstock.engine_core.scheduling.encoder_cache import EncoderCache
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.outbox import Outboxes
from penstock.engine_core.scheduling.peak_estimate import Forecast
from penstock.engine_core.scheduling.poison_requests import PoisonRequests
from penstock.engine_core.scheduling.request import Request, Sequence
from penstock.engine_core.scheduling.request_queue import RequestQueue
from penstock.engine_core.scheduling.running_batch import NEVER, GuidedRow, Ints, RunningBatch, Slots, StopTokenCounts
from penstock.engine_core.scheduling.statistics import HostTotals, SequenceHistograms, Totals, TransferCounters
from penstock.engine_core.scheduling.tracing import RequestTraces
from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.draft_model import DeviceDrafts
from penstock.engine_core.speculation.jump_forward import JumpForward
from penstock.engine_core.speculation.step_cost import StepCost
from penstock.protocol.control import FIRST_VERSION, PauseMode
from penstock.protocol.groups import ReplicaRole
from penstock.protocol.messages import BlocksAddresses, Finish, KVTransfer
from penstock.protocol.steps import NO_STATE, CopyBlocks, keep_window
from penstock.protocol.storage_blocks import StorageMessage


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One row of a plan's chunks."""

    sequence: Sequence
    start: int
    count: int
    sample: bool
    pool: bool = False  # its sequence's vector comes with the step's result


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The drafts of one step. Rows are counted in its batch, where decoding slots come first."""

    rows: Ints  # ascending
    counts: Ints  # at least 1
    ids: list[list[int]]
    own: npt.NDArray[np.bool_]  # whether a row's drafts are the executors' own

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def sizes(self, rows: int) -> Ints:
        """Entries of each row."""
        sizes = np.ones(rows, np.int64)
        sizes[self.rows] += self.counts
        return sizes

    def by_row(self) -> dict[int, list[int]]:
        return dict(zip(self.rows.tolist(), self.ids, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedDrafts:
    """Device drafts whose ids come with a step's result: `count` were requested, `ids` is as long as is needed."""

    ids: list[int]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftingWork:
    """Drafting behind a step without chunks, whose time is worth measuring."""

    rows: int
    turns: int  # drafts of the row that has the most


class InFlightStep(msgspec.Struct, frozen=True, eq=False):
    """A planned step whose result has not come. Its rows are in the order of the result."""

    step: int
    batch: RunningBatch
    chunks: tuple[Chunk, ...]
    drafts: Drafts | None = None
    carried: dict[int, list[int]] = {}  # the drafts of rows that have some
    guided: tuple[GuidedRow, ...] = ()
    awaited_drafts: tuple[AwaitedDrafts, ...] = ()
    drafting_before: DraftingWork | None = None  # the drafting behind the step before
    microbatch: int = 0  # whose decoding rows it runs
    depends_on: int = 0  # the last step before it with a guided row: masks of this one depend on those tokens
    planned: float = 0.0  # when
    kept: tuple[KeptState, ...] = ()
    last: bool = False  # its token may be the last that a row's limit allows


@dataclass(frozen=True, slots=True, eq=False)
class SequenceEnd:
    """How a row's sequence ends: how many of the row's tokens count, and why."""

    sequence: Sequence
    tokens: int
    finish: Finish
    stop_token: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Fenced:
    """A block table and its slot, given up while a step in flight may still write through them."""

    blocks: list[int]
    slot: int


@dataclass(slots=True, eq=False)
class KVState:
    """The KV blocks: which sequences hold them, what they contain, and which prefixes are being computed."""

    pool: BlockPool
    prefix: PrefixIndex
    fence: dict[int, list[Fenced]]  # by the step in flight that touches them last: it is applied before they are free
    layout: BlockLayout
    owners: npt.NDArray[np.int64]  # [blocks + 1], `life` of the sequence that a held block is accounted to
    # By the hash of the next block to be cached: the sequence that computes it.
    in_flight_prefixes: dict[bytes, Sequence] = field(default_factory=dict)
    filled: deque[int] = field(default_factory=deque)  # slots that have got another block: the one before is full soon
    recurrent: RecurrentStates | None = None  # None: the model has no recurrent layers
    host: HostCopies | None = None  # None: no blocks are kept in the host's memory
    pressure: bool = False  # the last plan lacked blocks for what runs


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks that are copied from the host's memory."""

    number: int  # of the message
    sequence: Sequence  # for which it is done; others may wait for it as well
    blocks: tuple[int, ...]  # on the device
    sources: tuple[int, ...]  # in the host's memory
    keys: tuple[bytes, ...]  # what they will be found by
    table: list[int]  # blocks on the device that are held until it is done: these, and what they stand behind
    since: float
    transfer: KVTransfer | None = None  # the blocks are another replica's, and `sources` numbers of its host's memory
    done: bool = False  # nobody waits for it
    stale: bool = False  # what an executor has read is something else
    answered: set[int] = field(default_factory=set)  # executors


@dataclass(slots=True, eq=False)
class Spill:
    """Blocks that are copied to the host's memory."""

    number: int
    blocks: tuple[tuple[int, int], ...]  # on the device, in the host's memory
    keys: tuple[bytes, ...]
    held: list[int] = field(default_factory=list)  # blocks on the device whose copies others have been told of
    answered: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are read from storage into the host's memory."""

    number: int  # of the message
    sequence: Sequence  # for which it is done; others may wait for it as well
    blocks: tuple[int, ...]  # of the host's memory
    places: tuple[int, ...]  # in storage
    keys: tuple[bytes, ...]
    held: tuple[int, ...]  # other blocks of the host's memory, which belong to the same prefix
    until: float  # for so long sequences wait for it
    done: bool = False  # nobody waits for it
    answered: set[int] = field(default_factory=set)  # executors
    failed: set[int] = field(default_factory=set)  # rows that one of them could not read
    seconds: float = 0.0  # of the slowest of them


@dataclass(slots=True, eq=False)
class Store:
    """Blocks of the host's memory that are written to storage."""

    number: int
    blocks: tuple[int, ...]
    places: tuple[int, ...]
    keys: tuple[bytes, ...]
    answered: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Lookup:
    """Blocks that a shared store is asked for: whether they are there."""

    number: int
    keys: tuple[bytes, ...]
    until: float  # for so long a sequence waits for the answer
    done: bool = False  # nobody waits for it
    failed: bool = False  # an executor's store did not answer
    answered: set[int] = field(default_factory=set)  # executors
    missing: set[int] = field(default_factory=set)  # numbers of keys that one of them lacks


LONGEST_REST = 64.0  # seconds that a store is left alone for


@dataclass(slots=True)
class Rest:
    """A store that fails is left alone, each time twice as long."""

    strikes: int = 0  # times in a row that it failed
    until: float = 0.0

    def note(self, now: float, *, failed: bool) -> None:
        self.strikes = self.strikes + 1 if failed else 0
        if failed:
            self.until = now + min(2.0**self.strikes, LONGEST_REST)


@dataclass(slots=True, eq=False)
class Lookups:
    """What a shared store is asked for."""

    open: dict[int, Lookup] = field(default_factory=dict)  # by number
    rest: Rest = field(default_factory=Rest)  # from asking, after answers or reads that failed
    count: int = 0  # totals since start: see StorageTierStatistics
    failed: int = 0


@dataclass(slots=True, eq=False)
class Listing:
    """What executors say is on their disks. Before all have, nothing is written there or read from there."""

    number: int
    found: dict[int, dict[int, bytes]] = field(default_factory=dict)  # by executor: keys by place
    complete: set[int] = field(default_factory=set)  # executors


@dataclass(slots=True, eq=False)
class StorageCopies:
    """KV blocks in storage, and those on their way between it and the host's memory. Without one there are no places.

    shared: it is a store that other servers use as well. Its places are no memory, but what is remembered of it: blocks
    that were there when it was asked, or that have been written."""

    tier: HostTier
    queue: deque[bytes]  # what has come to the host's memory and is to be written
    shared: bool = False
    lookups: Lookups = field(default_factory=Lookups)
    listing: Listing | None = None
    loads: dict[int, Load] = field(default_factory=dict)  # by number
    stores: dict[int, Store] = field(default_factory=dict)
    loading: dict[bytes, Load] = field(default_factory=dict)  # by key
    storing: set[bytes] = field(default_factory=set)  # keys
    # Of sequences without a slot: what they wait for, or have waited for.
    waiting: dict[Sequence, Load | Lookup] = field(default_factory=dict)
    block_seconds: float = 0.0  # that reading a block takes
    measured: float = 0.0  # when that was measured last
    writes: Rest = field(default_factory=Rest)
    stored: int = 0  # totals since start: see StorageTierStatistics
    lost: int = 0
    loaded: int = 0
    load_count: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class Handover:
    """A request that goes on at another replica, which reads its blocks."""

    source: int
    since: float
    held: list[int]  # blocks in the host's memory


@dataclass(slots=True, eq=False)
class Transfers:
    """Blocks in the host's memory that other replicas read."""

    eager: bool  # what sequences have filled is copied at once
    stamps: dict[int, int] = field(default_factory=dict)  # of blocks that have been copied, or are
    handovers: dict[int, Handover] = field(default_factory=dict)  # by request
    addresses: BlocksAddresses = ()  # where other hosts read them, by executor
    counters: TransferCounters = field(default_factory=TransferCounters)


@dataclass(slots=True, eq=False)
class HostCopies:
    """KV blocks in the host's memory, and the copies on their way between it and the device."""

    tier: HostTier
    reserve: int  # blocks on the device that can go at once, their content being copied where there is any
    storage: StorageCopies
    transfers: Transfers
    messages: list[CopyBlocks | StorageMessage] = field(default_factory=list)  # to executors, in their order
    number: int = 0  # of the last one
    fetches: dict[int, Fetch] = field(default_factory=dict)  # by number
    spills: dict[int, Spill] = field(default_factory=dict)
    fetching: dict[bytes, Fetch] = field(default_factory=dict)  # by key
    spilling: dict[bytes, int] = field(default_factory=dict)  # places in the host's memory by key
    written: dict[int, int] = field(default_factory=dict)  # by block: a step behind which its content is there
    filled: deque[tuple[int, int]] = field(default_factory=deque)  # such steps, and blocks: the last ones
    # Of sequences without a slot: what they wait for, or have waited for.
    waiting: dict[Sequence, Fetch] = field(default_factory=dict)
    block_seconds: float = 0.0  # that fetching a block takes
    measured: float = 0.0  # when that was measured last
    position_seconds: float = 0.0  # that computing a position takes; 0: it is not known
    totals: HostTotals = field(default_factory=HostTotals)


class KeptState(msgspec.Struct, frozen=True, eq=False):
    """A state that a planned step keeps: of which slot, as of which position, where, and what it will be found by."""

    slot: int
    position: int
    place: int
    identity: bytes
    spilled: int  # place of the host's memory to which what stood there is copied, or NO_STATE


@dataclass(slots=True, eq=False)
class RecurrentStates:
    """Of a model with recurrent layers: the snapshots of its states, and which are to come. Lists are by slot."""

    snapshots: Snapshots
    window: int  # positions in which a step that decodes may begin to keep a state, from the state's own on
    unit: int  # positions: the least multiple of it at which blocks end
    stops: list[list[int]]  # positions of the prompt to keep, ascending
    moving: list[tuple[int, bytes] | None]  # the place that moves up with the output, and what it holds
    due: Ints  # [slots], the next position to keep of what is written; NEVER: none
    begins: list[int]  # the place that the slot's sequence began from, as plans name it
    found: tuple[int, int] = 0, NO_STATE  # of the last look for a prefix: the blocks known, the place of its state
    coming: dict[bytes, Sequence] = field(default_factory=dict)  # identities that will be kept, and by whom


@dataclass(slots=True, eq=False)
class SpeculationState:
    """What was learned of drafts, and what they cost."""

    device_drafts: DeviceDrafts
    cost: StepCost
    acceptance: Acceptance = field(default_factory=Acceptance)  # of all sequences' drafts
    jump_forward: JumpForward = field(default_factory=JumpForward)
    habits: Habits = field(default_factory=Habits)  # where outputs put whitespace between JSON tokens
    drafted: DraftingWork | None = None  # the drafting behind the last planned step


@dataclass(slots=True, eq=False)
class PauseState:
    """Why no step is planned. In mode wait the requests that are there run to their ends first, and those that come are
    held apart: they have no place in the queue, so they can stand in nobody's way. The operator's mode and `frozen` are
    told apart: one does not end the other."""

    mode: PauseMode | None = None  # the operator's
    frozen: bool = False  # executors' weights, or what they have computed, are being changed
    closed: bool = False  # what runs goes on, and nothing that waits begins: the executors are about to sleep
    held: dict[int, Request] = field(default_factory=dict)  # by id: requests that came since, in mode wait


@dataclass(slots=True, eq=False)
class StepState:
    """Steps between their plan and their result."""

    in_flight: deque[InFlightStep] = field(default_factory=deque)
    unmasked: deque[InFlightStep] = field(default_factory=deque)  # of those, steps whose mask work was not taken yet
    stopped: dict[int, SequenceEnd] = field(default_factory=dict)  # guided rows that end with the step last followed
    wanted: list[Guide] = field(default_factory=list)  # whose next masks are to be made beside the steps
    long_mask: float = 0.0  # seconds of making one, from which on rows do not wait for it
    pause: PauseState = field(default_factory=PauseState)
    planned: int = 0  # last planned step
    followed: int = 0  # last step whose tokens the guides have taken
    applied: int = 0  # last applied step
    weights: str = FIRST_VERSION  # version of those that steps are run with; no step is in flight when it changes


@dataclass(slots=True, eq=False)
class MicroBatchState:
    """The order of the micro-batches, and the executors' state of each."""

    decoding: npt.NDArray[np.bool_]  # [micro-batches, slots], the executors' decode sets as of the last plan
    sent: list[RunningBatch | None]  # [micro-batches], the batch of the last plan of each
    turns: list[int]  # the micro-batches, the one that has waited longest first


@dataclass(slots=True, eq=False)
class StatisticsState:
    """Counters and histograms, and the time that the caller gave last."""

    totals: Totals = field(default_factory=Totals)
    sequences: SequenceHistograms = field(default_factory=SequenceHistograms)
    now: float = 0.0
    arrivals: int = 0  # requests so far


@dataclass(slots=True, eq=False)
class SchedulerState:
    """All parts of the scheduler's state. Each is owned by its class."""

    options: SchedulingOptions
    epoch: int
    kv: KVState
    slots: Slots
    queue: RequestQueue
    forecast: Forecast
    stop_tokens: StopTokenCounts
    spec: SpeculationState
    microbatches: MicroBatchState
    poison_requests: PoisonRequests
    adapters: AdapterPlaces
    encoder_cache: EncoderCache
    traces: RequestTraces
    steps: StepState = field(default_factory=StepState)
    stats: StatisticsState = field(default_factory=StatisticsState)
    requests: dict[int, Request] = field(default_factory=dict)
    outboxes: Outboxes = field(default_factory=Outboxes)
    prefilling: list[Sequence] = field(default_factory=list)  # have a slot, known tokens left to plan; by rank
    quarantine: dict[Sequence, None] = field(default_factory=dict)  # suspects of executors' deaths, run one by one
    refused: Sequence | None = None  # head of the queue that did not fit, until blocks are freed


def new_state(options: SchedulingOptions) -> SchedulerState:
    """Nothing waits, nothing runs, every block is free."""
    return SchedulerState(
        options=options,
        epoch=options.epoch,
        kv=new_kv_state(options),
        slots=Slots(options.max_num_seqs, options.layout(), options.stages),
        queue=RequestQueue(fair=options.fairness),
        forecast=Forecast(options.expected_share),
        stop_tokens=StopTokenCounts(),
        spec=SpeculationState(
            DeviceDrafts(options.max_num_seqs, options.speculation.own_drafts),
            StepCost(measured=options.speculation.adaptive),
        ),
        microbatches=MicroBatchState(
            np.zeros((options.stages, options.max_num_seqs), bool), [None] * options.stages, list(range(options.stages))
        ),
        poison_requests=PoisonRequests(),
        adapters=AdapterPlaces(options.adapter_places, options.adapter_memory, options.executors),
        encoder_cache=EncoderCache(options.encoder_rows, options.encoders),
        traces=RequestTraces(options.max_num_seqs, options.trace_tokens),
    )


def new_kv_state(options: SchedulingOptions) -> KVState:
    """Every block is free, and every place for a state."""
    prefix = PrefixIndex(options.blocks)
    return KVState(
        BlockPool(options.blocks, prefix),
        prefix,
        {},
        options.layout(),
        np.zeros(options.blocks + 1, np.int64),
        recurrent=new_recurrent_states(options) if options.recurrent else None,
        host=new_host_copies(options) if options.host_blocks and options.prefix_caching else None,
    )


def new_host_copies(options: SchedulingOptions) -> HostCopies:
    """Every block of the host's memory is free."""
    two_steps = 2 * -(-options.max_num_batched_tokens // options.block_size) * len(options.windows)
    reserve = min(two_steps, options.blocks // 2)
    storage = StorageCopies(
        HostTier(options.disk_blocks, "the storage"), deque(maxlen=options.host_blocks), shared=options.kv_store
    )
    transfers = Transfers(options.role is ReplicaRole.PREFILL, addresses=options.addresses)
    return HostCopies(HostTier(options.host_blocks), reserve, storage, transfers, filled=deque(maxlen=max(reserve, 1)))


def new_recurrent_states(options: SchedulingOptions) -> RecurrentStates:
    """No snapshot is kept."""
    return RecurrentStates(
        snapshots=Snapshots(options.state_places, options.state_host_places),
        window=min(options.state_piece, keep_window(options.speculation.max_row_drafts)),
        unit=math.lcm(options.state_piece, options.block_size),
        stops=[[] for _ in range(options.max_num_seqs)],
        moving=[None] * options.max_num_seqs,
        due=np.full(options.max_num_seqs, NEVER),
        begins=[NO_STATE] * options.max_num_seqs,
    )
