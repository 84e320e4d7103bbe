"""Preemption policy: which sequences give up blocks or slots, and to which.

Under KV pressure the senior rows get their blocks and the junior ones are preempted. A row that must wait for blocks
behind the fence skips this step. The most senior sequence is never preempted and every other one is before it goes
short, so a pool that holds one request of full length always makes progress. A starved client gets a slot of whichever
client has most.
"""

from __future__ import annotations

import functools
from itertools import chain

import numpy as np

from penstock.engine_core.scheduling.host_tier import copying_blocks, waits_for_blocks
from penstock.engine_core.scheduling.images import lacks_images
from penstock.engine_core.scheduling.lifecycle import TOO_SMALL, cancel, lacks_adapter, preempt
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.request_queue import rank
from penstock.engine_core.scheduling.running_batch import Ints, RunningBatch
from penstock.engine_core.scheduling.state import SchedulerState
from penstock.engine_core.scheduling.tracing import YIELDED
from penstock.protocol.messages import Finish


def preempt_for_blocks(
    state: SchedulerState, batch: RunningBatch, short: Ints, chunks: list[tuple[Sequence, int]], needs: list[int]
) -> tuple[RunningBatch, list[tuple[Sequence, int]]]:
    """Decide which claims to blocks are met: a slot of `short` needs one of each group, a chunk its number of `needs`.

    Returns the rows of the batch that decode in this step, and those of the chunks (sequence, positions) that run.
    """
    pool, slots = state.kv.pool, state.slots
    wanted = dict.fromkeys(slots.batch(short).sequences, state.kv.layout.groups)
    wanted.update({sequence: need for (sequence, _), need in zip(chunks, needs, strict=True)})
    running, expected = [], leaving_blocks(state)
    prefilling = set(state.prefilling)
    for sequence in slots.batch(slots.occupied()).sequences:
        if slots.ready[sequence.slot] or sequence in prefilling:
            running.append(sequence)
        else:
            expected += pool.lone_among(sequence.blocks)  # planned to its end: its result gives them back
    running.sort(key=rank)
    granted, still = 0, set()
    for sequence in sorted(wanted, key=rank):
        if sequence.slot < 0:
            continue
        need = wanted[sequence]
        while pool.available - granted + expected < need and running[-1] is not sequence:
            victim = running.pop()
            alone = pool.lone_among(victim.blocks)
            preempt(state, victim)
            state.forecast.preempted()
            if victim.last_step > state.steps.applied:
                expected += alone
        left = pool.available - granted
        if left >= need:
            granted += need
        elif running[0] is sequence and len(running) == 1 and not (state.steps.in_flight or copying_blocks(state)):
            cancel(state, sequence.request, Finish.ERROR, TOO_SMALL)
        else:
            still.add(sequence)
            granted += left  # what is left, and what is to come, is reserved: no junior row gets past
            expected = max(0, expected - (need - left))
    rows = batch.slots[slots.ready[batch.slots]]
    waiting = [sequence.slot for sequence in still if slots.ready[sequence.slot]]
    if waiting:
        rows = np.setdiff1d(rows, np.array(waiting))
    if len(rows) < len(batch.slots):
        batch = slots.batch(rows)
    return batch, [(sequence, count) for sequence, count in chunks if sequence.slot >= 0 and sequence not in still]


def make_way(state: SchedulerState) -> None:
    """Promise starved clients the next slots, and preempt running sequences for them. Called before the rows of a step
    are chosen. They get what waits behind the fence first, so nothing more is preempted meanwhile."""
    while (sequence := state.queue.starved(state.stats.now, functools.partial(is_blocked, state))) is not None:
        state.queue.promise(sequence)
    promised = state.queue.promised()
    if not promised or len(state.kv.fence):
        return
    short = len(promised) - state.slots.free
    if short <= 0 and state.refused is promised[0]:
        short = 1  # there is a slot, but too few blocks for it
    for sequence in promised[: max(0, short)]:
        victim = state.queue.victim(sequence)
        if victim is not None:
            preempt(state, victim, YIELDED)


def is_blocked(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a slot would be of no use to a waiting sequence."""
    return lacks_adapter(state, sequence) or lacks_images(state, sequence) or waits_for_blocks(state, sequence)


def leaving_blocks(state: SchedulerState) -> int:
    """Blocks that are freed when the fence opens."""
    return sum(state.kv.pool.lone_among(fenced.blocks) for fenced in chain(*state.kv.fence.values()))
