"""Everything the scheduler knows, in one place; planning, applying and the life cycle are functions over it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.spacing import Habits
from penstock.engine_core.kv.block_pool import Fence, Pool
from penstock.engine_core.kv.prefix_index import Prefix
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.outbox import Outboxes
from penstock.engine_core.scheduling.peak_estimate import Forecast
from penstock.engine_core.scheduling.poison_requests import Condemned
from penstock.engine_core.scheduling.request import Choice, Request
from penstock.engine_core.scheduling.request_queue import Queue
from penstock.engine_core.scheduling.running_batch import Ints, Lane, Slots, Suspects
from penstock.engine_core.scheduling.statistics import Durations, Lengths, Totals
from penstock.engine_core.scheduling.tracing import RequestTraces
from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.draft_model import Guesses
from penstock.engine_core.speculation.jump_forward import Looks
from penstock.engine_core.speculation.step_cost import StepCost
from penstock.protocol.messages import Finish


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One row of a plan's chunks."""

    choice: Choice
    start: int
    count: int
    sample: bool
    pool: bool = False  # its choice's vector comes with the step's result


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The drafts of one step. Rows are counted in its lane, where decoding slots come first."""

    rows: Ints  # ascending
    counts: Ints  # at least 1
    ids: list[list[int]]
    own: npt.NDArray[np.bool_]  # whether a row's drafts are the executors' own

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def sizes(self, rows: int) -> Ints:
        """Entries of each of so many rows."""
        sizes = np.ones(rows, np.int64)
        sizes[self.rows] += self.counts
        return sizes


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """Drafts whose ids come with a step's result: as many as are still wanted of those that were asked for."""

    ids: list[int]
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """What executors draft behind a step, where they do nothing else there."""

    rows: int
    turns: int  # drafts of the row that has the most


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A planned step whose result has not come: its rows in the order of the result."""

    step: int
    lane: Lane
    chunks: tuple[Chunk, ...]
    drafts: Drafts | None = None
    drafting: tuple[Choice, ...] = ()  # those of its rows that have a drafter
    guided: tuple[GuidedRow, ...] = ()
    told: tuple[Told, ...] = ()
    made: Made | None = None  # the drafting behind the step before
    microbatch: int = 0  # whose decoding rows it runs
    behind: int = 0  # the last step before this one that ran a guided row: its masks depend on that one's tokens
    planned: float = 0.0  # when


class GuidedRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row that samples under a mask. There is one for each such row of each step, so it must cost little to make."""

    choice: Choice
    row: int  # in the step's lane
    entry: int  # its first
    drafts: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A row whose choice ends: how many of its tokens count, and why it does."""

    choice: Choice
    tokens: int
    finish: Finish
    stop_token: int | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class State:
    """Owner of nothing by itself: it names the parts that own."""

    options: SchedulingOptions
    pool: Pool
    prefix: Prefix
    fence: Fence
    slots: Slots
    queue: Queue
    forecast: Forecast
    suspects: Suspects
    acceptance: Acceptance  # of all choices' drafts
    cost: StepCost
    guesses: Guesses
    owners: npt.NDArray[np.int64]  # [blocks + 1], the life that a held block is accounted to
    decoding: npt.NDArray[np.bool_]  # [micro-batches, slots], the executors' decode sets as of the last plan
    epoch: int
    condemned: Condemned
    traces: RequestTraces
    sent: list[Lane | None]  # [micro-batches], the lane of the last plan of each
    turns: list[int]  # the micro-batches, the one that has waited longest first
    requests: dict[int, Request] = field(default_factory=dict)
    outboxes: Outboxes = field(default_factory=Outboxes)
    prefilling: list[Choice] = field(default_factory=list)  # have a slot, known tokens left to plan; by rank
    coming: dict[bytes, Choice] = field(default_factory=dict)  # next block to be sealed → the prefilling choice
    flights: deque[Flight] = field(default_factory=deque)
    unmasked: deque[Flight] = field(default_factory=deque)  # of those, the ones whose mask work nobody has taken
    accused: dict[Choice, None] = field(default_factory=dict)  # executors died of one of them: tried one by one
    judged: dict[int, Judged] = field(default_factory=dict)  # rows of the step last followed that end, by their guides
    totals: Totals = field(default_factory=Totals)
    durations: Durations = field(default_factory=Durations)
    lengths: Lengths = field(default_factory=Lengths)
    looks: Looks = field(default_factory=Looks)
    habits: Habits = field(default_factory=Habits)  # where outputs put whitespace between JSON tokens
    made: Made | None = None  # the drafting behind the last planned step
    planned: int = 0  # last planned step
    followed: int = 0  # last step whose tokens the guides have taken
    applied: int = 0  # last applied step
    orders: int = 0  # requests so far
    refused: Choice | None = None  # head of the queue that did not fit, until memory is given back
    tight: bool = False  # the last plan lacked blocks for what runs


def new_state(options: SchedulingOptions) -> State:
    """Nobody waits, nothing runs, every block is free."""
    prefix = Prefix(options.blocks)
    return State(
        options=options,
        pool=Pool(options.blocks, prefix),
        prefix=prefix,
        fence=Fence(),
        slots=Slots(options.max_num_seqs, options.stages),
        queue=Queue(fair=options.fairness),
        forecast=Forecast(options.expected_share),
        suspects=Suspects(options.vocab_size),
        acceptance=Acceptance(),
        cost=StepCost(measured=options.speculation.adaptive),
        guesses=Guesses(options.max_num_seqs, options.speculation.own_drafts),
        owners=np.zeros(options.blocks + 1, np.int64),
        decoding=np.zeros((options.stages, options.max_num_seqs), bool),
        epoch=options.epoch,
        condemned=Condemned(),
        traces=RequestTraces(options.trace_tokens),
        sent=[None] * options.stages,
        turns=list(range(options.stages)),
    )
