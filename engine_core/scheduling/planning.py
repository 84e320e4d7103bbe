"""plan(): the work of the next step within the token budget. Running rows first, then whoever may enter.

Nothing here frees what a step in flight touches: a preempted choice leaves through the fence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.scheduling.admission import Admissions
from engine_core.scheduling.lifecycle import add_others, announce, retract, seal
from engine_core.scheduling.ration import ration
from engine_core.scheduling.request import Choice
from engine_core.scheduling.slots import Ints, Lane, joined
from engine_core.scheduling.state import Chunk, Flight, State
from protocol.steps import SlotStart, StepPlan, choice_seed


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    pairs: list[npt.NDArray[np.int32]] = field(default_factory=list)  # each [new blocks, 2]
    starts: list[SlotStart] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


def plan(state: State) -> StepPlan | None:
    """The next step, or None when nothing can run before a result or a request comes."""
    slots, draft = state.slots, Draft()
    lane = slots.decoding()
    budget = state.options.max_num_batched_tokens - len(lane.slots)
    claims: list[tuple[Choice, int]] = []
    for choice in state.prefilling:
        if count := min(len(choice.tokens) - int(slots.planned[choice.slot]), budget):
            claims.append((choice, count))
            budget -= count
    short = crossing(state, lane)
    needs = [blocks_needed(state, choice, count) for choice, count in claims]
    tight = len(short) + sum(needs) > state.pool.available
    if tight:
        lane, claims = ration(state, short, claims, needs)
        short = crossing(state, lane)
    if len(short):
        grow_rows(state, draft, short)
    for choice, count in claims:
        extend_chunk(state, draft, choice, count)
    stuck = not (len(lane.slots) or draft.chunks or state.flights)  # no result will come to call us again
    if len(state.queue) and (stuck or not tight):
        for choice, count in Admissions(state).admit(budget):
            start_chunk(state, draft, choice, count)
    if not len(lane.slots) and not draft.chunks:
        return None
    return close(state, draft, lane)


def crossing(state: State, lane: Lane) -> Ints:
    """Decoding slots whose next position needs a new block."""
    rows = lane.slots
    return rows[state.slots.planned[rows] >= state.slots.room[rows]]


def blocks_needed(state: State, choice: Choice, count: int) -> int:
    """New blocks for the next `count` positions of a prefilling choice."""
    positions = int(state.slots.planned[choice.slot]) + count
    return max(0, -(-positions // state.options.block_size) - len(choice.blocks))


def grow_rows(state: State, draft: Draft, rows: Ints) -> None:
    """One new block for each of these slots."""
    slots = state.slots
    taken = state.pool.take(len(rows))
    for slot, block in zip(rows.tolist(), taken, strict=True):
        slots.tables[slot].append(block)
    slots.held[rows] += 1
    slots.room[rows] += state.options.block_size
    blocks = np.array(taken)
    state.owners[blocks] = slots.life[rows]
    draft.pairs.append(paired(rows, blocks))


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


def extend_chunk(state: State, draft: Draft, choice: Choice, count: int) -> None:
    """A further chunk of a choice that is in its slot already."""
    taken = take_blocks(state, choice, count)
    if taken:
        draft.pairs.append(paired(choice.slot, np.array(taken)))
    append_chunk(state, draft, choice, count)


def start_chunk(state: State, draft: Draft, choice: Choice, count: int) -> None:
    """The first chunk of a choice that has just entered its slot: everything about it crosses here, once."""
    take_blocks(state, choice, count)
    sampling = choice.request.message.sampling
    if choice.request.wants_scores and not choice.wants_scores:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    draft.starts.append(
        SlotStart(
            slot=choice.slot,
            token_ids=choice.tokens.tobytes(),
            prompt_tokens=choice.request.prompt_tokens,
            computed=int(state.slots.planned[choice.slot]),
            blocks=np.array(choice.blocks, np.int32).tobytes(),
            sampling=sampling,
            seed=choice_seed(sampling.seed, choice.index),
        )
    )
    append_chunk(state, draft, choice, count)


def append_chunk(state: State, draft: Draft, choice: Choice, count: int) -> None:
    start = int(state.slots.planned[choice.slot])
    draft.chunks.append(Chunk(choice, start, count, sample=start + count == len(choice.tokens)))


def close(state: State, draft: Draft, lane: Lane) -> StepPlan:
    """Number the step, move every planned position forward, remember what the result will answer."""
    slots, rows = state.slots, lane.slots
    state.planned += 1
    step = state.planned
    turned_on, turned_off = turn(state, lane)
    slots.planned[rows] += 1
    slots.last[rows] = step
    spent = rows[slots.planned[rows] + 1 >= slots.limit[rows]]
    if len(spent):
        slots.pause(spent)  # the step's token is their last: a length stop is known ahead
    columns = [close_chunk(state, chunk, step) for chunk in draft.chunks]
    sampled = [chunk.choice.slot for chunk in draft.chunks if chunk.sample]
    if sampled:
        lane = joined(lane, slots.lane(np.array(sampled)))
    state.flights.append(Flight(step, lane, tuple(draft.chunks)))
    state.totals.scheduled_tokens += len(rows) + sum([chunk.count for chunk in draft.chunks])
    return StepPlan(
        step=step,
        epoch=state.epoch,
        starts=tuple(draft.starts),
        blocks=b"".join([pairs.tobytes() for pairs in draft.pairs]),
        decode_on=turned_on,
        decode_off=turned_off,
        chunks=np.array(columns, np.int32).tobytes() if columns else b"",
    )


def turn(state: State, lane: Lane) -> tuple[bytes, bytes]:
    """Slots to add to and to take out of the executors' decode set."""
    if lane is state.sent:
        return b"", b""
    wanted = np.zeros(state.slots.count, bool)
    wanted[lane.slots] = True
    turned_on = (wanted & ~state.decoding).nonzero()[0].astype(np.int32).tobytes()
    turned_off = (state.decoding & ~wanted).nonzero()[0].astype(np.int32).tobytes()
    state.sent, state.decoding = lane, wanted
    return turned_on, turned_off


def close_chunk(state: State, chunk: Chunk, step: int) -> tuple[int, int, int, int]:
    """Account for one chunk; its full blocks can be found from the next plan on. Returns its row of the plan."""
    slots, choice = state.slots, chunk.choice
    slot = choice.slot
    retract(state, choice)
    slots.planned[slot] += chunk.count
    slots.last[slot] = step
    seal(state, choice)
    if chunk.sample:
        state.prefilling.remove(choice)
        slots.set_ready(slot, bool(slots.planned[slot] + 1 < slots.limit[slot]))
        if choice.index == 0:
            add_others(state, choice.request)
    else:
        announce(state, choice)
    return slot, chunk.start, chunk.count, int(chunk.sample)
