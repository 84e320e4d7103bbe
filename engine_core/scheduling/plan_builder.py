"""plan(): the work of the next step within the token budget. Running rows first, then whoever may enter.

Drafts are guesses, so they yield: they leave half of the budget to prompts, and go before any row waits for a block.

Nothing here frees what a step in flight touches: a preempted choice leaves through the fence.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.scheduling.admission import Admissions
from penstock.engine_core.scheduling.drafting import NOTHING_ASKED, ask, draft_rows, launch_drafts, nobody, with_guesses
from penstock.engine_core.scheduling.lifecycle import acquit, add_others, announce, retract, seal
from penstock.engine_core.scheduling.preemption import make_way, ration
from penstock.engine_core.scheduling.request import Choice
from penstock.engine_core.scheduling.running_batch import Ints, Lane, joined
from penstock.engine_core.scheduling.state import Chunk, Drafts, Flight, GuidedRow, State
from penstock.protocol.messages import TraceContext
from penstock.protocol.steps import NOBODY, SlotStart, StepPlan, choice_seed

UNTRACED = TraceContext()


@dataclass(slots=True)
class Outline:
    """A plan in the making."""

    pairs: list[npt.NDArray[np.int32]] = field(default_factory=list)  # each [new blocks, 2]
    starts: list[SlotStart] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


def plan(state: State) -> StepPlan | None:
    """The next step, or None when nothing can run before a result or a request comes."""
    if state.accused:
        acquit(state)
    elif state.queue.waiting:
        make_way(state)
    for _ in range(state.slots.microbatches):
        microbatch, lane = next_turn(state)
        found = plan_turn(state, microbatch, lane)
        if found is not None or not len(lane.slots):
            return found
        end_turn(state, microbatch)  # its rows stand still for blocks of others, whose turn may give some back
    return None


def plan_turn(state: State, microbatch: int, lane: Lane) -> StepPlan | None:
    """The next step as one that runs these rows of a micro-batch, or None when neither they nor any prompt can run."""
    slots, outline = state.slots, Outline()
    budget = state.options.max_num_batched_tokens - len(lane.slots)
    drafts = None
    if (slots.drafters or state.guesses.most) and len(lane.slots):
        wanted = len(state.prefilling) or (state.queue.waiting and slots.free)
        drafts = draft(state, lane, budget // 2 if wanted else budget)
        budget -= drafts.total if drafts is not None else 0
    if state.options.stages > 1:
        budget = prompt_budget(state, budget)
    claims: list[tuple[Choice, int]] = []
    for choice in state.prefilling:
        if count := min(len(choice.tokens) - int(slots.planned[choice.slot]), budget):
            claims.append((choice, count))
            budget -= count
    needs = [blocks_needed(state, choice, count) for choice, count in claims]
    short = crossing(state, lane) if drafts is None else drafted_crossing(state, lane, drafts)
    if drafts is not None and len(short) + sum(needs) > state.pool.available:
        budget += drafts.total
        drafts = None  # before anybody waits for a block
        short = crossing(state, lane)
    tight = state.tight = len(short) + sum(needs) > state.pool.available
    if tight:
        lane, claims = ration(state, lane, short, claims, needs)
        short = crossing(state, lane)
    if len(short):
        grow_rows(state, outline, short)
    for choice, count in claims:
        extend_chunk(state, outline, choice, count)
    stuck = not (len(lane.slots) or outline.chunks or state.flights)  # no result will come to call us again
    if state.queue.waiting and (stuck or not tight):
        for choice, count in Admissions(state).admit(budget):
            start_chunk(state, outline, choice, count)
    if len(lane.slots) or outline.chunks:
        return close(state, outline, microbatch, lane, drafts)
    return None


def draft(state: State, lane: Lane, budget: int) -> Drafts | None:
    """What the lane's rows carry, at most `budget` tokens and no more than a step may: what is proposed here, then what
    executors have made."""
    drafts = draft_rows(state, lane, budget) if state.slots.drafters else None
    if not state.guesses.most:
        return drafts
    left = min(budget, state.options.speculation.max_step_drafts) - (0 if drafts is None else drafts.total)
    return with_guesses(state, lane, drafts, left)


def crossing(state: State, lane: Lane) -> Ints:
    """Decoding slots whose next position needs a new block."""
    rows = lane.slots
    return rows[state.slots.planned[rows] >= state.slots.room[rows]]


def drafted_crossing(state: State, lane: Lane, drafts: Drafts) -> Ints:
    """Decoding slots, each as often as it needs a new block for its next position and its drafts."""
    slots, rows = state.slots, lane.slots
    beyond = slots.planned[rows] + drafts.sizes(len(rows)) - slots.room[rows]
    return np.repeat(rows, np.maximum(-(-beyond // state.options.block_size), 0))


def blocks_needed(state: State, choice: Choice, count: int) -> int:
    """New blocks for the next `count` positions of a prefilling choice."""
    positions = int(state.slots.planned[choice.slot]) + count
    return max(0, -(-positions // state.options.block_size) - len(choice.blocks))


def grow_rows(state: State, outline: Outline, rows: Ints) -> None:
    """A new block for these slots, as often as each is named."""
    slots = state.slots
    taken = state.pool.take(len(rows))
    for slot, block in zip(rows.tolist(), taken, strict=True):
        slots.tables[slot].append(block)
    np.add.at(slots.held, rows, 1)
    np.add.at(slots.room, rows, state.options.block_size)
    blocks = np.array(taken)
    state.owners[blocks] = slots.life[rows]
    outline.pairs.append(paired(rows, blocks))


def paired(slots: Ints | int, blocks: Ints) -> npt.NDArray[np.int32]:
    """# [blocks, 2]: the slot and the block appended to its table, as the plan sends them"""
    pairs = np.empty((len(blocks), 2), np.int32)
    pairs[:, 0], pairs[:, 1] = slots, blocks
    return pairs


def take_blocks(state: State, choice: Choice, count: int) -> list[int]:
    """What the choice's next `count` positions need, appended to its table."""
    slots, slot = state.slots, choice.slot
    taken = state.pool.take(blocks_needed(state, choice, count))
    choice.blocks.extend(taken)
    slots.held[slot] = len(choice.blocks)
    slots.room[slot] = len(choice.blocks) * state.options.block_size
    state.owners[taken] = choice.life
    return taken


def extend_chunk(state: State, outline: Outline, choice: Choice, count: int) -> None:
    """A further chunk of a choice that is in its slot already."""
    taken = take_blocks(state, choice, count)
    if taken:
        outline.pairs.append(paired(choice.slot, np.array(taken)))
    append_chunk(state, outline, choice, count)


def start_chunk(state: State, outline: Outline, choice: Choice, count: int) -> None:
    """The first chunk of a choice that has just entered its slot: everything about it crosses here, once."""
    take_blocks(state, choice, count)
    sampling = choice.request.message.sampling
    if choice.request.wants_scores and not choice.wants_scores:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    outline.starts.append(
        SlotStart(
            slot=choice.slot,
            token_ids=choice.tokens.tobytes(),
            prompt_tokens=choice.request.prompt_tokens,
            computed=int(state.slots.planned[choice.slot]),
            blocks=np.array(choice.blocks, np.int32).tobytes(),
            sampling=sampling,
            seed=choice_seed(sampling.seed, choice.index),
            pooling=choice.request.message.pooling,
            trace=choice.request.message.trace if state.traces.traced(choice) else UNTRACED,
            choice=choice.index,
        )
    )
    append_chunk(state, outline, choice, count)


def append_chunk(state: State, outline: Outline, choice: Choice, count: int) -> None:
    start = int(state.slots.planned[choice.slot])
    ends, pools = start + count == len(choice.tokens), choice.request.pools
    outline.chunks.append(Chunk(choice, start, count, sample=ends and not pools, pool=ends and pools))


def close(state: State, outline: Outline, microbatch: int, lane: Lane, drafts: Drafts | None) -> StepPlan:
    """Number the step, move every planned position forward, remember what the result will answer."""
    slots, rows = state.slots, lane.slots
    state.planned += 1
    step = state.planned
    turned_on, turned_off = turn(state, microbatch, lane, outline.starts)
    sampled = [chunk.choice.slot for chunk in outline.chunks if chunk.sample]
    if sampled:
        lane = joined(lane, slots.lane(np.array(sampled)))
    guided, behind = guided_rows(state, lane, drafts) if slots.guides else ((), 0)
    slots.planned[rows] += 1
    slots.last[rows] = step
    table, ids = (b"", b"") if drafts is None else draft_columns(state, rows, drafts)
    spent = rows[slots.planned[rows] + 1 >= slots.limit[rows]]
    if len(spent):
        slots.pause(spent)  # the step's token may be their last: a length stop is known ahead
    chunks = [close_chunk(state, chunk, step, microbatch) for chunk in outline.chunks]
    drafting = launch_drafts(state, lane, drafts) if slots.drafters else ()
    made, asked = state.made, NOTHING_ASKED
    if state.guesses.most:
        asked = ask(state, lane, drafts, outline.chunks)
    if len(asked.short):
        grow_rows(state, outline, asked.short)
    flight = Flight(
        step, lane, tuple(outline.chunks), drafts, drafting, guided, asked.told, made, microbatch, behind,
        planned=state.durations.now,
    )  # fmt: skip
    state.flights.append(flight)
    if guided:
        state.unmasked.append(flight)
    state.totals.scheduled_tokens += len(rows) + sum([chunk.count for chunk in outline.chunks])
    return StepPlan(
        step=step,
        epoch=state.epoch,
        starts=tuple(outline.starts),
        blocks=b"".join([pairs.tobytes() for pairs in outline.pairs]),
        decode_on=turned_on,
        decode_off=turned_off,
        chunks=np.array(chunks, np.int32).tobytes() if chunks else b"",
        drafts=table,
        draft_ids=ids,
        masked=np.array([row.choice.slot for row in guided], np.int32).tobytes() if guided else b"",
        drafting=asked.columns,
        microbatch=microbatch,
    )


def draft_columns(state: State, rows: Ints, drafts: Drafts) -> tuple[bytes, bytes]:
    """Suppose that every draft is accepted; what the plan says of them."""
    drafted = rows[drafts.rows]
    state.slots.planned[drafted] += drafts.counts
    state.totals.scheduled_tokens += drafts.total
    table = np.stack((drafted, drafts.counts), axis=1).astype(np.int32)
    ids = np.fromiter(itertools.chain.from_iterable(drafts.ids), np.int32)
    return table.tobytes(), ids.tobytes()


def turn(state: State, microbatch: int, lane: Lane, starts: list[SlotStart]) -> tuple[bytes, bytes]:
    """Slots to add to and to take out of the executors' decode set of a micro-batch, whose turn it is."""
    turned_on = turned_off = b""
    if microbatch != NOBODY:
        end_turn(state, microbatch)
        if lane is not state.sent[microbatch]:
            wanted = np.zeros(state.slots.count, bool)
            wanted[lane.slots] = True
            decoding = state.decoding[microbatch]
            turned_on = (wanted & ~decoding).nonzero()[0].astype(np.int32).tobytes()
            turned_off = (decoding & ~wanted).nonzero()[0].astype(np.int32).tobytes()
            state.sent[microbatch], state.decoding[microbatch] = lane, wanted
    if starts:
        state.decoding[:, [start.slot for start in starts]] = False  # a start takes its slot out of every set
    return turned_on, turned_off


def close_chunk(state: State, chunk: Chunk, step: int, microbatch: int) -> tuple[int, int, int, int]:
    """Account for one chunk; its full blocks can be found from the next plan on. Returns its row of the plan."""
    slots, choice = state.slots, chunk.choice
    slot = choice.slot
    retract(state, choice)
    slots.planned[slot] += chunk.count
    slots.last[slot] = step
    seal(state, choice)
    if chunk.pool:
        state.prefilling.remove(choice)  # its slot waits for the result
    elif chunk.sample:
        state.prefilling.remove(choice)
        join(state, slot, microbatch)
        slots.set_ready(slot, bool(slots.planned[slot] + 1 < slots.limit[slot]))
        if choice.index == 0:
            add_others(state, choice.request)
    else:
        announce(state, choice)
    return slot, chunk.start, chunk.count, int(chunk.sample)


def next_turn(state: State) -> tuple[int, Lane]:
    """The micro-batch that the next step runs and its rows; NOBODY where only prompts should run, or nothing can."""
    slots = state.slots
    if slots.microbatches == 1 and len(state.flights) < state.options.ahead:
        return 0, slots.decoding()  # no row is early: behind the step that makes its token comes its next one
    flying = [flight.microbatch for flight in state.flights]
    free = [number for number in state.turns if flying.count(number) < state.options.ahead]
    if not free:
        return NOBODY, slots.lane(nobody())
    chosen = next((number for number in free if slots.sizes[number]), free[0])
    level(state, chosen)
    lane = slots.decoding(chosen)
    early = early_rows(state, lane.slots)
    if not early.any():
        return chosen, lane
    if not early.all():
        return chosen, slots.lane(lane.slots[~early])
    return (NOBODY, slots.lane(nobody())) if state.prefilling else (chosen, lane)


def end_turn(state: State, number: int) -> None:
    """A micro-batch has had its turn."""
    state.turns.remove(number)
    state.turns.append(number)


def early_rows(state: State, slots: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether the token that each slot's next position needs will be on its way still when the first stage is free."""
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = state.slots.last[slots] > max(
        state.applied, state.planned + 1 - state.options.stages
    )
    return found


def level(state: State, number: int) -> None:
    """Move rows of a micro-batch that has more than its share, as choices elsewhere have ended, to the smallest ones.
    They wait for a later turn, so none becomes too early; those that ran last move first, so none waits twice."""
    slots = state.slots
    excess = slots.sizes[number] - -(-sum(slots.sizes) // slots.microbatches)
    if excess <= 0:
        return
    rows = slots.decoding(number).slots
    for slot in rows[np.argsort(-slots.last[rows], kind="stable")][:excess].tolist():
        slots.move(slot, smallest(state))


def join(state: State, slot: int, number: int) -> None:
    """A slot begins to decode behind a step that ran micro-batch `number`: it joins that one, or a smaller one."""
    slots = state.slots
    least = smallest(state)
    if number == NOBODY or slots.sizes[number] > slots.sizes[least]:
        number = least
    if not slots.sizes[number]:
        end_turn(state, number)  # nobody of it has waited longer than this slot will have
    slots.move(slot, number)


def smallest(state: State) -> int:
    """The micro-batch with the fewest rows, the first of them."""
    return state.slots.sizes.index(min(state.slots.sizes))


def prompt_budget(state: State, budget: int) -> int:
    """Positions of prompts that the next step should run, at most `budget`.

    What waits is cut into pieces, so that several stages work on it at once, and no smaller than a step is worth.
    """
    options, planned = state.options, state.slots.planned
    waiting = state.queue.tokens
    waiting += sum([len(choice.tokens) - int(planned[choice.slot]) for choice in state.prefilling])
    return min(budget, max(options.piece, -(-waiting // (2 * options.stages))))


@dataclass(frozen=True, slots=True, eq=False)
class MaskWork:
    """What a step's masks are made from. Entries that no row of it covers are not masked."""

    step: int
    epoch: int
    rows: tuple[MaskRow, ...]


def guided_rows(state: State, lane: Lane, drafts: Drafts | None) -> tuple[tuple[GuidedRow, ...], int]:
    """The lane's rows that sample under a mask, and the last planned step that ran any of them."""
    slots = state.slots
    rows = slots.guided[lane.slots].nonzero()[0]
    if not len(rows):
        return (), 0
    behind = int(slots.last[lane.slots[rows]].max())
    if drafts is None:
        return tuple([GuidedRow(lane.choices[row], row, row, []) for row in rows.tolist()]), behind
    sizes = drafts.sizes(len(lane.slots))
    entries = (np.cumsum(sizes) - sizes)[rows]
    carried = dict(zip(drafts.rows.tolist(), drafts.ids, strict=True))
    return tuple(
        [
            GuidedRow(lane.choices[row], row, entry, carried.get(row, []))
            for row, entry in zip(rows.tolist(), entries.tolist(), strict=True)
        ]
    ), behind


def mask_work(state: State) -> MaskWork | None:
    """The work for the next step in order whose guides have taken every token before it; None if there is none."""
    if not state.unmasked or state.unmasked[0].behind > state.followed:
        return None
    flight = state.unmasked.popleft()
    ending = {id(found.choice) for found in state.judged.values()} if state.followed > state.applied else ()
    rows = []
    for guided in flight.guided:
        choice, guide = guided.choice, guided.choice.guide
        if guide is not None and not choice.ended and id(choice) not in ending:
            rows.append(MaskRow(guide, guided.drafts, guided.entry))
    return MaskWork(flight.step, state.epoch, tuple(rows))
