"""plan(): the work of the next step within the token budget. Running rows first, then prompts, then new sequences.

Drafts are guesses, so they yield: they leave half of the budget to prompts, and go before any row waits for a block.
Nothing here frees what a step in flight touches: a preempted sequence leaves through the fence.

Micro-batches: the decoding rows of a pipeline take turns, so that each of its stages has a step to run. A row's next
step needs the token of its last one, which comes from the last stage as many steps later as there are stages. So rows
are spread evenly over one micro-batch per stage, and a step runs the one that has waited longest. A row whose token is
not due is left out of its turn, or else the first stage and everything behind it would wait; if all are early and there
is nothing else to run, they are planned anyway, since the token reaches the first stage before the scheduler.

Masks: every plan with masked rows gets exactly one `MaskWork`, in the order of the plans; executors sample none of the
masked rows before it has come. It leaves out rows whose sequence has ended since, so it may be empty. Rows whose
structure has not begun are included: their output may not end yet. While it is being filled, its guides are not called.
Rows for which others would wait sit the step out (`late_masks`).
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.kv.block_layout import columns_of
from penstock.engine_core.scheduling.admission import Admissions
from penstock.engine_core.scheduling.drafting import (
    NO_DRAFTS_REQUESTED,
    draft_rows,
    no_slots,
    request_drafts,
    with_device_drafts,
)
from penstock.engine_core.scheduling.images import cut_at_images, whole_ahead
from penstock.engine_core.scheduling.late_masks import NOBODY, Ready, short_of_end, sit_out
from penstock.engine_core.scheduling.lifecycle import (
    add_others,
    announce_prefix,
    cache_blocks,
    clear_suspects,
    retract_prefix,
)
from penstock.engine_core.scheduling.preemption import make_way, preempt_for_blocks
from penstock.engine_core.scheduling.recurrent_state import keep_states
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.running_batch import GuidedRow, Ints, RunningBatch, joined
from penstock.engine_core.scheduling.state import Chunk, Drafts, InFlightStep, KeptState, SchedulerState
from penstock.protocol.control import PauseMode
from penstock.protocol.messages import TraceContext
from penstock.protocol.steps import NO_MICROBATCH, NO_STATE, SlotStart, StepPlan, choice_seed

UNTRACED = TraceContext()


class PlanBuilder(msgspec.Struct, eq=False):
    """A plan that is being built."""

    columns: list[npt.NDArray[np.int32]] = []  # each [new columns, 1 + groups]
    starts: list[SlotStart] = []
    chunks: list[Chunk] = []


def plan(state: SchedulerState) -> StepPlan | None:
    """The next step, or None when nothing can run before a result or a request comes, or there is a pause."""
    pause = state.steps.pause
    if pause.frozen or pause.mode not in (None, PauseMode.WAIT):
        return None
    if state.quarantine:
        clear_suspects(state)
    elif state.queue.waiting:
        make_way(state)
    found = plan_rows(state, patient=False)
    if found is None and state.slots.guides and not state.steps.in_flight:
        return plan_rows(state, patient=True)  # those for whom others sit out wait for blocks
    return found


def plan_rows(state: SchedulerState, *, patient: bool) -> StepPlan | None:
    """The next step of the first micro-batch that has one. `patient`: it waits for all masks."""
    for _ in range(state.slots.microbatches):
        microbatch, batch = next_microbatch(state)
        found = plan_microbatch(state, microbatch, batch, patient=patient)
        if found is not None or not len(batch.slots):
            return found
        rotate(state, microbatch)  # its rows wait for blocks, which another micro-batch may free
    return None


def plan_microbatch(state: SchedulerState, microbatch: int, batch: RunningBatch, *, patient: bool) -> StepPlan | None:
    """The next step as one that runs these rows of a micro-batch, or None when neither they nor any prompt can run."""
    slots, builder, ready = state.slots, PlanBuilder(), NOBODY
    if slots.guides and not patient:
        batch, ready = sit_out(state, batch)
    budget = state.options.max_num_batched_tokens - len(batch.slots)
    drafts = None
    if (slots.drafters.count or state.spec.device_drafts.most) and len(batch.slots):
        wanted = len(state.prefilling) or (state.queue.waiting and slots.free)
        most = min(budget // 2, max(0, budget - whole_ahead(state))) if wanted else budget
        drafts = draft(state, batch, most, ready)
        budget -= drafts.total if drafts is not None else 0
    if state.options.stages > 1:
        budget = prompt_budget(state, budget)
    claims: list[tuple[Sequence, int]] = []
    for sequence in state.prefilling:
        start = int(slots.num_computed_tokens[sequence.slot])
        count = cut_at_images(state, sequence, start, min(len(sequence.tokens) - start, budget))
        if count and not patient:
            count = short_of_end(state, batch, sequence, start, count)
            count = cut_at_images(state, sequence, start, count)
        if count:
            claims.append((sequence, count))
            budget -= count
    needs = [blocks_needed(state, sequence, count) for sequence, count in claims]
    short = crossing(state, batch) if drafts is None else drafted_crossing(state, batch, drafts)
    groups = state.kv.layout.groups
    needed = groups * len(short) + sum(needs)
    if drafts is not None and needed > state.kv.pool.available:
        budget += drafts.total
        drafts = None  # they yield before any row waits for a block
        short = crossing(state, batch)
        needed = groups * len(short) + sum(needs)
    kv_pressure = state.kv.pressure = needed > 0 and needed > state.kv.pool.available
    if kv_pressure:
        batch, claims = preempt_for_blocks(state, batch, short, claims, needs)
        short = crossing(state, batch)
    if len(short):
        grow_rows(state, builder, short)
    for sequence, count in claims:
        extend_chunk(state, builder, sequence, count)
    stuck = not (len(batch.slots) or builder.chunks or state.steps.in_flight)  # no result will come to call us again
    if state.queue.waiting and (stuck or not kv_pressure):
        for sequence, count in Admissions(state, None if patient else batch).admit(budget):
            start_chunk(state, builder, sequence, count)
    if len(batch.slots) or builder.chunks:
        return finish_plan(state, builder, microbatch, batch, drafts)
    return None


def draft(state: SchedulerState, batch: RunningBatch, budget: int, ready: Ready) -> Drafts | None:
    """Drafts of the batch's rows, at most `budget` tokens and no more than a step may have: first those of the host,
    then device drafts. Others do not wait for masks of `ready`."""
    drafts = draft_rows(state, batch, budget, ready) if state.slots.drafters.count else None
    if not state.spec.device_drafts.most:
        return drafts
    left = min(budget, state.options.speculation.max_step_drafts) - (0 if drafts is None else drafts.total)
    return with_device_drafts(state, batch, drafts, left, ready)


def crossing(state: SchedulerState, batch: RunningBatch) -> Ints:
    """Decoding slots whose next position needs a new block."""
    rows = batch.slots
    return rows[state.slots.num_computed_tokens[rows] >= state.slots.blocks.capacity[rows]]


def drafted_crossing(state: SchedulerState, batch: RunningBatch, drafts: Drafts) -> Ints:
    """Decoding slots, each as often as it needs a new block for its next position and its drafts."""
    slots, rows = state.slots, batch.slots
    beyond = slots.num_computed_tokens[rows] + drafts.sizes(len(rows)) - slots.blocks.capacity[rows]
    return np.repeat(rows, np.maximum(-(-beyond // state.options.block_size), 0))


def blocks_needed(state: SchedulerState, sequence: Sequence, count: int) -> int:
    """New blocks for the next `count` positions of a prefilling sequence."""
    if state.options.encoder:
        return 0
    positions = int(state.slots.num_computed_tokens[sequence.slot]) + count
    groups = state.kv.layout.groups
    return max(0, groups * columns_of(positions, state.options.block_size) - len(sequence.blocks))


def grow_rows(state: SchedulerState, builder: PlanBuilder, rows: Ints) -> None:
    """A new block of each group for these slots, as often as each is named."""
    slots, groups = state.slots, state.kv.layout.groups
    taken = state.kv.pool.take(len(rows) * groups)
    for at, slot in enumerate(rows.tolist()):
        slots.blocks.tables[slot] += taken[at * groups : (at + 1) * groups]
    np.add.at(slots.blocks.held, rows, groups)
    np.add.at(slots.blocks.capacity, rows, state.options.block_size)
    state.kv.filled.extend(rows.tolist())
    blocks = np.array(taken).reshape(-1, groups)
    state.kv.owners[blocks] = slots.life[rows][:, None]
    builder.columns.append(appended(rows, blocks))


def appended(slots: Ints | int, blocks: Ints) -> npt.NDArray[np.int32]:
    """# [columns, 1 + groups]: the slot and the blocks appended to its tables, as the plan sends them"""
    columns = np.empty((len(blocks), 1 + blocks.shape[1]), np.int32)
    columns[:, 0], columns[:, 1:] = slots, blocks
    return columns


def take_blocks(state: SchedulerState, sequence: Sequence, count: int) -> list[int]:
    """What the sequence's next `count` positions need, appended to its table."""
    slots, slot = state.slots, sequence.slot
    taken = state.kv.pool.take(blocks_needed(state, sequence, count))
    sequence.blocks.extend(taken)
    slots.blocks.held[slot] += len(taken)
    slots.blocks.capacity[slot] = len(sequence.blocks) // state.kv.layout.groups * state.options.block_size
    state.kv.owners[taken] = sequence.life
    return taken


def extend_chunk(state: SchedulerState, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
    """A further chunk of a sequence that is in its slot already."""
    taken = take_blocks(state, sequence, count)
    if taken:
        builder.columns.append(appended(sequence.slot, np.array(taken).reshape(-1, state.kv.layout.groups)))
    append_chunk(state, builder, sequence, count)


def start_chunk(state: SchedulerState, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
    """The first chunk of a sequence that has just entered its slot: everything about it crosses here, once."""
    take_blocks(state, sequence, count)
    states, images = state.kv.recurrent, sequence.request.message.images
    sampling = sequence.request.message.sampling
    if sequence.request.needs_prompt_logprobs and not sequence.needs_prompt_logprobs:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    builder.starts.append(
        SlotStart(
            slot=sequence.slot,
            token_ids=sequence.tokens.tobytes(),
            prompt_tokens=sequence.request.prompt_tokens,
            computed=int(state.slots.num_computed_tokens[sequence.slot]),
            blocks=np.array(sequence.blocks, np.int32).tobytes(),
            sampling=sampling,
            seed=choice_seed(sampling.seed, sequence.index),
            pooling=sequence.request.message.pooling,
            trace=sequence.request.message.trace if state.traces.traced(sequence) else UNTRACED,
            choice=sequence.index,
            state=NO_STATE if states is None else states.begins[sequence.slot],
            adapter=state.adapters.place(sequence.request.adapter),
            images=state.encoder_cache.table(sequence, images) if images else b"",
        )
    )
    append_chunk(state, builder, sequence, count)


def append_chunk(state: SchedulerState, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
    start = int(state.slots.num_computed_tokens[sequence.slot])
    ends, pools = start + count == len(sequence.tokens), sequence.request.pools
    builder.chunks.append(Chunk(sequence, start, count, sample=ends and not pools, pool=ends and pools))


def finish_plan(
    state: SchedulerState, builder: PlanBuilder, microbatch: int, batch: RunningBatch, drafts: Drafts | None
) -> StepPlan:
    """Number the step, move every planned position forward, remember what the result will answer."""
    slots, rows = state.slots, batch.slots
    state.steps.planned += 1
    step = state.steps.planned
    turned_on, turned_off = switch_decoding(state, microbatch, batch, builder.starts)
    if builder.chunks and (sampled := [chunk.sequence.slot for chunk in builder.chunks if chunk.sample]):
        batch = joined(batch, slots.batch(np.array(sampled)))
    carried = {} if drafts is None else drafts.by_row()
    guided: tuple[GuidedRow, ...] = ()
    behind = 0
    if len(batch.guided):
        guided = guided_rows(batch, drafts, carried)
        behind = int(slots.last[batch.guided_rows.places].max())
    if state.steps.wanted and guided:
        planned = {row.sequence.guide for row in guided}
        state.steps.wanted = [guide for guide in state.steps.wanted if guide not in planned]
    kept = () if state.kv.recurrent is None else keep_states(state, state.kv.recurrent, step, rows, builder.chunks)
    reached = slots.num_computed_tokens[rows] + (1 if drafts is None else drafts.sizes(len(rows)))
    slots.num_computed_tokens[rows] = reached  # as if every draft were accepted
    slots.last[rows] = step
    table, ids = (b"", b"") if drafts is None else draft_columns(rows, drafts)
    spent = rows[reached + 1 >= slots.limit[rows]]
    if len(spent):
        slots.pause(spent)  # the step's token may be their last: a length stop is known ahead
    chunks = [finish_chunk(state, chunk, step, microbatch) for chunk in builder.chunks]
    made, asked = state.spec.drafted, NO_DRAFTS_REQUESTED
    if state.spec.device_drafts.most:
        asked = request_drafts(state, batch, drafts, carried, builder.chunks)
    if len(asked.short):
        grow_rows(state, builder, asked.short)
    inflight = InFlightStep(
        step, batch, tuple(builder.chunks), drafts, carried, guided, asked.told, made, microbatch, behind,
        state.stats.now, kept, last=bool(len(spent) or builder.chunks),
    )  # fmt: skip
    state.steps.in_flight.append(inflight)
    if guided:
        state.steps.unmasked.append(inflight)
    state.stats.totals.scheduled_tokens += len(rows) + sum([chunk[2] for chunk in chunks])
    state.stats.totals.scheduled_tokens += 0 if drafts is None else drafts.total
    return StepPlan(
        step=step,
        epoch=state.epoch,
        starts=tuple(builder.starts),
        blocks=b"".join([columns.tobytes() for columns in builder.columns]),
        decode_on=turned_on,
        decode_off=turned_off,
        chunks=np.array(chunks, np.int32).tobytes() if chunks else b"",
        drafts=table,
        draft_ids=ids,
        masked=batch.guided_rows.slots if guided else b"",
        drafting=asked.columns,
        microbatch=microbatch,
        keep=keep_columns(kept) if kept else b"",
        adapters=state.adapters.take_changes() if state.adapters.changes else b"",
        images=state.encoder_cache.take_shares() if state.encoder_cache.shares else b"",
    )


def keep_columns(kept: tuple[KeptState, ...]) -> bytes:
    """The plan's column of states that the step keeps."""
    return np.array([(one.slot, one.position, one.place, one.spilled) for one in kept], np.int32).tobytes()


def draft_columns(rows: Ints, drafts: Drafts) -> tuple[bytes, bytes]:
    """The plan's columns of drafts."""
    table = np.stack((rows[drafts.rows], drafts.counts), axis=1).astype(np.int32)
    ids = np.fromiter(itertools.chain.from_iterable(drafts.ids), np.int32)
    return table.tobytes(), ids.tobytes()


def switch_decoding(
    state: SchedulerState, microbatch: int, batch: RunningBatch, starts: list[SlotStart]
) -> tuple[bytes, bytes]:
    """Slots to add to and to remove from the executors' decode set of a micro-batch."""
    turned_on = turned_off = b""
    if microbatch != NO_MICROBATCH:
        if state.slots.microbatches > 1:
            rotate(state, microbatch)
        if batch is not state.microbatches.sent[microbatch]:
            wanted = np.zeros(state.slots.count, bool)
            wanted[batch.slots] = True
            decoding = state.microbatches.decoding[microbatch]
            turned_on = (wanted & ~decoding).nonzero()[0].astype(np.int32).tobytes()
            turned_off = (decoding & ~wanted).nonzero()[0].astype(np.int32).tobytes()
            state.microbatches.sent[microbatch], state.microbatches.decoding[microbatch] = batch, wanted
    if starts:
        state.microbatches.decoding[:, [start.slot for start in starts]] = (
            False  # a start takes its slot out of every set
        )
    return turned_on, turned_off


def finish_chunk(state: SchedulerState, chunk: Chunk, step: int, microbatch: int) -> tuple[int, int, int, int]:
    """Account for one chunk; its full blocks can be found from the next plan on. Returns its row of the plan."""
    slots, sequence = state.slots, chunk.sequence
    slot = sequence.slot
    retract_prefix(state, sequence)
    slots.num_computed_tokens[slot] += chunk.count
    slots.last[slot] = step
    cache_blocks(state, sequence)
    if sequence.request.message.images:
        state.encoder_cache.advance(sequence, chunk.start + chunk.count, step)
    if chunk.pool:
        state.prefilling.remove(sequence)  # its slot waits for the result
    elif chunk.sample:
        state.prefilling.remove(sequence)
        join(state, slot, microbatch)
        slots.set_ready(slot, bool(slots.num_computed_tokens[slot] + 1 < slots.limit[slot]))
        if sequence.index == 0:
            add_others(state, sequence.request)
    else:
        announce_prefix(state, sequence)
    return slot, chunk.start, chunk.count, int(chunk.sample)


def next_microbatch(state: SchedulerState) -> tuple[int, RunningBatch]:
    """The micro-batch that the next step runs, and its rows; NO_MICROBATCH where only prompts run, or nothing can."""
    slots = state.slots
    if slots.microbatches == 1 and len(state.steps.in_flight) < state.options.ahead:
        return 0, slots.decoding()  # no row is early: behind the step that makes its token comes its next one
    flying = [inflight.microbatch for inflight in state.steps.in_flight]
    free = [number for number in state.microbatches.turns if flying.count(number) < state.options.ahead]
    if not free:
        return NO_MICROBATCH, slots.batch(no_slots())
    chosen = next((number for number in free if slots.sizes[number]), free[0])
    balance(state, chosen)
    batch = slots.decoding(chosen)
    early = early_rows(state, batch.slots)
    if not early.any():
        return chosen, batch
    if not early.all():
        return chosen, slots.batch(batch.slots[~early])
    return (NO_MICROBATCH, slots.batch(no_slots())) if state.prefilling else (chosen, batch)


def rotate(state: SchedulerState, number: int) -> None:
    """A micro-batch has run: the others go first now."""
    state.microbatches.turns.remove(number)
    state.microbatches.turns.append(number)


def early_rows(state: SchedulerState, slots: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether the token that each slot's next position needs will still be in flight when the first stage is free."""
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = state.slots.last[slots] > max(
        state.steps.applied, state.steps.planned + 1 - state.options.stages
    )
    return found


def balance(state: SchedulerState, number: int) -> None:
    """Move rows of a micro-batch that has more than its share to the smallest ones, after sequences elsewhere ended.
    They wait for a later turn, so none becomes too early; those that ran last move first, so none waits twice."""
    slots = state.slots
    excess = slots.sizes[number] - -(-sum(slots.sizes) // slots.microbatches)
    if excess <= 0:
        return
    rows = slots.decoding(number).slots
    for slot in rows[np.argsort(-slots.last[rows], kind="stable")][:excess].tolist():
        slots.move(slot, smallest(state))


def join(state: SchedulerState, slot: int, number: int) -> None:
    """A slot begins to decode behind a step that ran micro-batch `number`: it joins that one, or a smaller one."""
    slots = state.slots
    least = smallest(state)
    if number == NO_MICROBATCH or slots.sizes[number] > slots.sizes[least]:
        number = least
    if not slots.sizes[number]:
        rotate(state, number)  # none of its rows has waited longer than this slot
    slots.move(slot, number)


def smallest(state: SchedulerState) -> int:
    return state.slots.sizes.index(min(state.slots.sizes))


def prompt_budget(state: SchedulerState, budget: int) -> int:
    """Positions of prompts that the next step should run, at most `budget`.

    Prompts are cut into chunks that several stages work on at once, but no smaller than a step is worth.
    """
    options, planned = state.options, state.slots.num_computed_tokens
    waiting = state.queue.tokens
    waiting += sum([len(sequence.tokens) - int(planned[sequence.slot]) for sequence in state.prefilling])
    return min(budget, max(options.piece, whole_ahead(state), -(-waiting // (2 * options.stages))))


class MaskWork(msgspec.Struct, frozen=True, eq=False):
    """What a step's masks are made from. Entries that none of its rows covers are not masked."""

    step: int
    epoch: int
    rows: tuple[MaskRow, ...]


def guided_rows(batch: RunningBatch, drafts: Drafts | None, carried: dict[int, list[int]]) -> tuple[GuidedRow, ...]:
    """The batch's rows that sample under a mask."""
    if drafts is None:
        return batch.guided_rows.rows
    sizes = drafts.sizes(len(batch.slots))
    entries = (np.cumsum(sizes) - sizes)[batch.guided]
    return tuple(
        [
            GuidedRow(batch.sequences[row], row, entry, carried.get(row, []))
            for row, entry in zip(batch.guided.tolist(), entries.tolist(), strict=True)
        ]
    )


def mask_work(state: SchedulerState) -> MaskWork | None:
    """The work for the next step in order whose guides have taken every token before it; None if there is none."""
    if not state.steps.unmasked or state.steps.unmasked[0].depends_on > state.steps.followed:
        return None
    inflight = state.steps.unmasked.popleft()
    batch, ahead = inflight.batch, state.steps.followed > state.steps.applied
    ending = {id(found.sequence) for found in state.steps.stopped.values()} if ahead else ()
    if inflight.drafts is None and not ending and batch.departures == state.slots.departures:
        return MaskWork(inflight.step, state.epoch, batch.guided_rows.masked)  # none of them has ended
    rows = []
    for guided in inflight.guided:
        sequence, guide = guided.sequence, guided.sequence.guide
        if guide is not None and not sequence.ended and id(sequence) not in ending:
            rows.append(MaskRow(guide, guided.drafts, guided.entry))
    return MaskWork(inflight.step, state.epoch, tuple(rows))
