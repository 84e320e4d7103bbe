"""The scheduler: requests in, plans out, results in, token batches out. Synchronous; time is passed in.

The caller decides how many plans are in flight: it may call `plan` again before `apply`. Depth 1 and depth 2 are the
same code and give the same tokens.
"""

from __future__ import annotations

from itertools import chain

import msgspec
import numpy as np

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.kv.block_pool import PoolReport
from penstock.engine_core.scheduling.admission import reasons, waiting_adapters
from penstock.engine_core.scheduling.disaggregation import expire_handovers, release_transfer, transfer_statistics
from penstock.engine_core.scheduling.host_tier import (
    blocks_copied,
    check_copies,
    clear_copies,
    copying_tables,
    host_statistics,
)
from penstock.engine_core.scheduling.lifecycle import (
    TOO_SMALL,
    add,
    cancel,
    end_aside,
    held_blocks,
    in_flight_sequences,
    preempt,
    suspect,
)
from penstock.engine_core.scheduling.options import SchedulingOptions
from penstock.engine_core.scheduling.plan_builder import MaskWork, mask_work, plan
from penstock.engine_core.scheduling.recurrent_state import check_states, clear_states
from penstock.engine_core.scheduling.request import PromptLogprobs
from penstock.engine_core.scheduling.state import new_state
from penstock.engine_core.scheduling.statistics import SchedulerStatistics
from penstock.engine_core.scheduling.storage_tier import (
    check_storage,
    forget_storage,
    list_storage,
    storage_answered,
    storage_statistics,
    store_ahead,
)
from penstock.engine_core.scheduling.tracing import PREEMPTED, RESTARTED, Stay, StepFacts
from penstock.engine_core.scheduling.update_from_output import apply, follow
from penstock.engine_core.scheduling.validation import (
    blocks_needed,
    expire,
    fail_adapter,
    fail_image,
    rows_needed,
    submit,
)
from penstock.protocol.control import PauseMode
from penstock.protocol.images import EncodeImage, ImageEncoded
from penstock.protocol.messages import Adapter, BlocksAddresses, Finish, Prefilled, Rejected, StopHit, SubmitTokens
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import (
    AdapterLoaded,
    BlocksCopied,
    CopyBlocks,
    DropAdapter,
    LoadAdapter,
    StepPlan,
    StepResult,
)
from penstock.protocol.storage_blocks import StorageAnswer, StorageMessage

UNLIMITED = 1 << 30
TOO_FEW_ROWS = "the server no longer has enough encoder cache for this request's images"


class Scheduler:
    """Owner of every request's tokens, of the slots and of the KV blocks."""

    def __init__(self, options: SchedulingOptions) -> None:
        self._state = new_state(options)
        list_storage(self._state)

    @property
    def in_flight(self) -> int:
        """Steps planned but not applied."""
        return len(self._state.steps.in_flight)

    @property
    def unfinished(self) -> int:
        return len(self._state.requests)

    @property
    def counts(self) -> tuple[int, int]:
        """Sequences that run and sequences that wait, as the statistics have them."""
        return self._state.slots.running, len(self._state.queue) + len(self._state.steps.pause.held)

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def traced(self) -> bool:
        return bool(self._state.traces.running)

    def submit(self, request: SubmitTokens, source: int, now: float, guide: Guide | None = None) -> None:
        """Queue a request that came from `source`. One that can never be served is answered with `Rejected`.

        `guide` walks the request's automaton, has taken nothing yet and is the scheduler's from now on: the request's
        one sequence follows it, or each of several a copy.
        """
        assert source >= 0
        assert (guide is None) == (request.automaton is None)
        self._state.stats.now = now
        submit(self._state, request, source, guide, now)

    def tick(self, now: float) -> None:
        """Set the time of events that carry none, such as aborts and stops."""
        self._state.stats.now = now

    def abort(self, request: int) -> None:
        """End every sequence of the request; its blocks are free within one step. Unknown ids are ignored."""
        found = self._state.requests.get(request)
        if found is not None:
            cancel(self._state, found, Finish.ABORT)

    def stop_hit(self, message: StopHit) -> None:
        """A stop string was found: the sequence ends as stopped.

        Ignored if it has ended already, or if it has not given the tokens in which the stop was found.
        """
        request = self._state.requests.get(message.id)
        sequence = None if request is None else request.sequences.get(message.choice)
        if sequence is not None and 0 < message.tokens <= sequence.outputs:
            end_aside(self._state, sequence, Finish.STOP)

    def forget(self, source: int) -> None:
        """The source is gone: abort its requests and drop what was not delivered to it."""
        for request in [found for found in self._state.requests.values() if found.source == source]:
            cancel(self._state, request, Finish.ABORT)
        expire_handovers(self._state, source)
        self._state.outboxes.pop(source, None)

    def expire(self, now: float) -> None:
        """Reject requests that have waited in the queue for too long, and sample the rate at which sequences end.
        Called several times a second."""
        self._state.stats.now = now
        self._state.stats.totals.tick(now)
        expire(self._state, now)
        expire_handovers(self._state)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run before a result or a request comes. With nothing in flight, None
        means that no sequence waits, but for its adapter, its images or blocks from the host's memory, or that there is
        a pause."""
        self._state.stats.now = now
        return plan(self._state)

    @property
    def pause_mode(self) -> PauseMode | None:
        """Of the operator's pause, whether it holds or has only begun."""
        return self._state.steps.pause.mode

    @property
    def paused(self) -> bool:
        """Whether the operator's pause holds: nothing runs, and nothing will before it is over."""
        pause = self._state.steps.pause
        if pause.mode is None or self._state.steps.in_flight:
            return False
        return pause.mode is not PauseMode.WAIT or len(self._state.requests) == len(pause.held)

    def pause(self, mode: PauseMode | None, now: float) -> None:
        """Begin a pause of this mode in place of any other one; None ends it. What was held apart waits from then on,
        unless the mode is wait."""
        self._state.stats.now = now
        self._state.steps.pause.mode = mode
        if mode is PauseMode.ABORT:
            self.abort_all(now)
        held = {} if mode is PauseMode.WAIT else self._state.steps.pause.held
        while held:
            request = held.pop(next(iter(held)))
            request.since = now
            add(self._state, request)

    def abort_all(self, now: float, rid: str = "") -> None:
        """End every request, or those that are called `rid`."""
        self._state.stats.now = now
        for request in list(self._state.requests.values()):
            if not rid or request.message.rid == rid:
                cancel(self._state, request, Finish.ABORT)

    @property
    def settled(self) -> bool:
        """Whether executors touch no block: no step and no copy between device and host is in flight."""
        host = self._state.kv.host
        return not (self._state.steps.in_flight or (host is not None and (host.fetches or host.spills)))

    def freeze(self, *, frozen: bool) -> None:
        """Plan no step while it is frozen, whatever the operator's pause is."""
        self._state.steps.pause.frozen = frozen

    def close(self, *, closed: bool) -> None:
        """Let nothing that waits begin; what runs goes on."""
        self._state.steps.pause.closed = closed

    def forget_computed(self, now: float, version: str | None = None) -> None:
        """Forget all that executors have computed: blocks and states of recurrent layers; images and log-probabilities
        of prompts too, where it was with other weights than those of this version, which they have now. What runs is
        computed again from its tokens. It is settled."""
        assert self.settled
        state = self._state
        state.stats.now = now
        for sequence in [sequence for sequence in state.slots.sequences if sequence is not None]:
            preempt(state, sequence, PREEMPTED)
        assert not state.kv.fence, "every step has been applied"
        clear_copies(state)
        forget_storage(state)
        state.kv.pool.clear(state.kv.pool.total)
        state.kv.owners[:] = 0
        state.refused = None
        if state.kv.recurrent is not None:
            clear_states(state.kv.recurrent, None)
        if version is None:
            return
        state.steps.weights = version
        state.encoder_cache.clear()
        for request in state.requests.values():
            for sequence in request.sequences.values():
                if not sequence.prompt_logprobs.delivered:
                    sequence.prompt_logprobs = PromptLogprobs()

    def begin_with(self, version: str) -> None:
        """A group that has computed nothing yet has the weights of this version."""
        assert not self._state.steps.in_flight
        self._state.steps.weights = version

    def follow(self, result: StepResult) -> None:
        """Advance the guides by the tokens of a result, which is all that masks of the next step wait for. `apply`
        takes the result next, and does this too if it was not done."""
        follow(self._state, result)

    def apply(self, result: StepResult, now: float) -> None:
        """Take the result of the oldest step in flight; results of another epoch are discarded."""
        self._state.stats.now = now
        apply(self._state, result)

    def mask_work(self) -> MaskWork | None:
        """What the next step's masks are made from, as soon as every token before it is known. Call it after each
        `plan` and each `follow` or `apply` until it gives None. Its guides are the caller's until the step's result is
        followed or applied."""
        return mask_work(self._state)

    def late_masks(self) -> list[Guide]:
        """Guides whose next masks are to be made beside the steps: rows sit out until they are there. Call it after
        each `plan`. The caller sets `lent` as long as it has a guide."""
        found, self._state.steps.wanted = self._state.steps.wanted, []
        return found

    def adapter_messages(self) -> list[LoadAdapter | DropAdapter]:
        """What executors are to read and to forget, behind the plans so far; the caller removes what it has sent."""
        return self._state.adapters.messages

    def adapter_loaded(self, message: AdapterLoaded, executor: int, now: float) -> Adapter | None:
        """An executor has read an adapter, or could not: then the requests that wait for it end with the reason. Which
        one that is."""
        self._state.stats.now = now
        failed = self._state.adapters.loaded(message.number, executor, message.error)
        if failed is not None:
            self._state.adapters.refuse(failed, message.error, now)
            fail_adapter(self._state, failed, message.error)
        return failed

    def image_messages(self) -> list[EncodeImage]:
        """What ranks of the first stage are to encode, behind the plans so far; the caller removes what it has sent."""
        return self._state.encoder_cache.messages

    def image_encoded(self, message: ImageEncoded, now: float) -> None:
        """An executor has encoded an image, or could not: then the requests that need it end with the reason."""
        self._state.stats.now = now
        failed = self._state.encoder_cache.encoded(message.number, message.error)
        fail_image(self._state, failed, message.error)

    def copy_messages(self) -> list[CopyBlocks | StorageMessage]:
        """What executors are to copy between the device, the host's memory and the disk, in this order; the caller
        removes what it has sent."""
        host = self._state.kv.host
        return [] if host is None else host.messages

    def blocks_copied(self, message: BlocksCopied | StorageAnswer, executor: int, now: float) -> None:
        """An executor has made copies, or has done something with its disk."""
        self._state.stats.now = now
        if isinstance(message, BlocksCopied):
            blocks_copied(self._state, message, executor)
            store_ahead(self._state)
        else:
            storage_answered(self._state, message, executor)

    def release_transfer(self, request: int) -> None:
        """The blocks that `Prefilled` named have been read, or nobody wants them. Unknown ids are ignored."""
        release_transfer(self._state, request)

    def undelivered(self) -> tuple[int, ...]:
        """Sources for which `outputs` has something."""
        return tuple([source for source, outbox in self._state.outboxes.items() if outbox])

    def outputs(self, source: int, limit: int = UNLIMITED) -> list[TokenBatch | Rejected | Prefilled]:
        """At most `limit` messages for the source, which count as delivered. Rows of several steps are merged."""
        outbox = self._state.outboxes.get(source)
        return [] if outbox is None else outbox.take(limit)

    def restart(
        self,
        epoch: int,
        now: float,
        blocks: int | None = None,
        state_places: tuple[int, int] | None = None,
        encoder_rows: int | None = None,
        host_blocks: int | None = None,
        disk_blocks: int | None = None,
        addresses: BlocksAddresses = (),
    ) -> None:
        """A new executor group with empty blocks, empty places for states (of both on the device and in the host's
        memory) and an empty encoder cache, so many of each if their numbers changed, and with whatever is on its disks:
        everything that ran is recomputed. addresses: as SchedulingOptions has them.
        Steps in flight are lost; their results, if they still come, are discarded. Their sequences, and those whose
        images were being encoded, are suspects of the last group's death: see lifecycle.py."""
        state = self._state
        assert epoch != state.epoch
        state.stats.now = now
        state.epoch = epoch
        suspects = in_flight_sequences(state)
        state.steps.in_flight.clear()
        state.steps.unmasked.clear()
        state.steps.wanted.clear()
        state.steps.followed = state.steps.applied = state.steps.planned
        state.steps.stopped.clear()
        for sequence in [sequence for sequence in state.slots.sequences if sequence is not None]:
            preempt(state, sequence, RESTARTED)
        state.kv.fence.clear()
        state.slots.clear()
        state.kv.pool.clear(state.kv.pool.total if blocks is None else blocks)
        state.kv.owners = np.zeros(state.kv.pool.total + 1, np.int64)
        if state.kv.recurrent is not None:
            clear_states(state.kv.recurrent, state_places)
        clear_copies(state, host_blocks, addresses)
        list_storage(state, disk_blocks)
        state.adapters.clear()
        state.encoder_cache.clear(encoder_rows)
        state.microbatches.decoding[:] = False
        state.microbatches.sent = [None] * state.options.stages
        state.refused = None
        room = state.kv.pool.capacity
        for request in list(state.requests.values()):
            if blocks_needed(request.message, state.options) > room:
                cancel(state, request, Finish.ERROR, TOO_SMALL)
            elif rows_needed(request.message) > state.encoder_cache.rows:
                cancel(state, request, Finish.ERROR, TOO_FEW_ROWS)
        suspect(state, suspects, now)

    def stays(self) -> list[Stay]:
        """Stays of traced requests that ended since the last call."""
        return self._state.traces.collect()

    def last_step(self) -> StepFacts:
        """The step that was planned last, which is in flight."""
        state = self._state
        inflight, chunks = state.steps.in_flight[-1], state.steps.in_flight[-1].chunks
        sequences = [*inflight.batch.sequences, *(chunk.sequence for chunk in chunks)]
        traced = {sequence.request: None for sequence in sequences if state.traces.traced(sequence)}
        drafts = 0 if inflight.drafts is None else inflight.drafts.total
        decoding = len(inflight.batch.sequences) - sum([chunk.sample for chunk in chunks])
        return StepFacts(
            step=inflight.step,
            epoch=state.epoch,
            rows=len(inflight.batch.sequences),
            chunks=len(chunks),
            tokens=decoding + drafts + sum([chunk.count for chunk in chunks]),
            drafts=drafts,
            masked=len(inflight.guided),
            running=len(state.slots.occupied()),
            waiting=len(state.queue),
            blocks=state.kv.pool.total,
            blocks_used=state.kv.pool.held,
            traced=tuple([request.message.trace for request in traced]),
        )

    def fail(self, error: str) -> None:
        """End every request with this error: no executor will come."""
        for request in list(self._state.requests.values()):
            cancel(self._state, request, Finish.UNAVAILABLE, error)

    def check(self, *, thorough: bool = False) -> PoolReport:
        """Compare the pool's accounts with every block table: sums alone, or block by block when idle or when a sum is
        wrong; and those of states and of the encoder cache with who has them. Contradictory blocks are quarantined and
        reported, never raised."""
        state = self._state
        tables = [held_blocks(state, sequence) for sequence in state.slots.sequences if sequence is not None]
        tables += copying_tables(state)
        tables += [fenced.blocks for fenced in chain(*state.kv.fence.values())]
        report = state.kv.pool.check(tables, thorough=thorough)
        faults = () if state.kv.recurrent is None else check_states(state, state.kv.recurrent)
        faults += state.encoder_cache.check() + (check_copies(state) + check_storage(state) if thorough else ())
        return msgspec.structs.replace(report, faults=report.faults + faults) if faults else report

    def statistics(self) -> SchedulerStatistics:
        """Counters as of now; what EngineStatus and the metrics read."""
        state, totals = self._state, self._state.stats.totals
        counters = msgspec.structs.asdict(totals) | {
            "finishes": totals.finishes.copy(), "accepted_at": totals.accepted_at.copy(), "ends": totals.ends.copy(),
        }  # fmt: skip
        return SchedulerStatistics(
            **counters,
            epoch=state.epoch,
            step=state.steps.applied,
            in_flight=len(state.steps.in_flight),
            running=len(state.slots.occupied()),
            waiting=len(state.queue) + len(state.steps.pause.held),
            reasons=reasons(state),
            slots=state.slots.count,
            pool=state.kv.pool.statistics(),
            evicted_blocks=state.kv.prefix.evicted,
            snapshots=None if state.kv.recurrent is None else state.kv.recurrent.snapshots.statistics(),
            host_tier=host_statistics(state),
            storage_tier=storage_statistics(state),
            transfers=transfer_statistics(state),
            adapters=state.adapters.statistics(waiting_adapters(state)),
            encoder=state.encoder_cache.statistics(),
            group_blocks=state.slots.group_blocks(),
            requests=len(state.requests),
            waiting_clients=state.queue.clients,
            sequences=state.stats.sequences.statistics(),
        )
