"""Too few blocks for everybody who runs: the senior rows get theirs, the junior ones are preempted for them.

A row that must wait for blocks behind the fence stands still for this step. The most senior choice is never preempted
and everybody else is, before it goes short, so a pool that holds one longest request always makes progress.
"""

from __future__ import annotations

import numpy as np

from penstock.engine_core.scheduling.lifecycle import TOO_SMALL, cancel, preempt
from penstock.engine_core.scheduling.request import Choice
from penstock.engine_core.scheduling.request_queue import rank
from penstock.engine_core.scheduling.running_batch import Ints, Lane
from penstock.engine_core.scheduling.state import State
from penstock.engine_core.scheduling.tracing import YIELDED
from penstock.protocol.messages import Finish


def ration(
    state: State, lane: Lane, short: Ints, chunks: list[tuple[Choice, int]], needs: list[int]
) -> tuple[Lane, list[tuple[Choice, int]]]:
    """Decide who of the claimants gets blocks: `short` slots of `lane` want one each, each of `chunks` its number of
    `needs`.

    Returns the rows of the lane that decode in this step, and those of the chunks (choice, positions) that run.
    """
    pool, slots = state.pool, state.slots
    wanted = dict.fromkeys(slots.lane(short).choices, 1)
    wanted.update({choice: need for (choice, _), need in zip(chunks, needs, strict=True)})
    running, expected = [], leaving_blocks(state)
    prefilling = set(state.prefilling)
    for choice in slots.lane(slots.occupied()).choices:
        if slots.ready[choice.slot] or choice in prefilling:
            running.append(choice)
        else:
            expected += pool.lone_among(choice.blocks)  # planned to its end: its result gives them back
    running.sort(key=rank)
    granted, still = 0, set()
    for choice in sorted(wanted, key=rank):
        if choice.slot < 0:
            continue
        need = wanted[choice]
        while pool.available - granted + expected < need and running[-1] is not choice:
            victim = running.pop()
            alone = pool.lone_among(victim.blocks)
            preempt(state, victim)
            state.forecast.preempted()
            if victim.last_step > state.applied:
                expected += alone
        left = pool.available - granted
        if left >= need:
            granted += need
        elif running[0] is choice and len(running) == 1 and not state.flights:
            cancel(state, choice.request, Finish.ERROR, TOO_SMALL)
        else:
            still.add(choice)
            granted += left  # what is left and what comes is spoken for: no junior row gets past
            expected = max(0, expected - (need - left))
    rows = lane.slots[slots.ready[lane.slots]]
    standing = [choice.slot for choice in still if slots.ready[choice.slot]]
    if standing:
        rows = np.setdiff1d(rows, np.array(standing))
    if len(rows) < len(lane.slots):
        lane = slots.lane(rows)
    return lane, [(choice, count) for choice, count in chunks if choice.slot >= 0 and choice not in still]


def make_way(state: State) -> None:
    """Have starved clients go next, and running choices give their slots up to them. Called before the rows of a step
    are chosen. What waits behind the fence is given to them first, so nothing more is taken meanwhile."""
    while (choice := state.queue.starved(state.durations.now)) is not None:
        state.queue.promise(choice)
    promised = state.queue.promised()
    if not promised or len(state.fence):
        return
    short = len(promised) - state.slots.free
    if short <= 0 and state.refused is promised[0]:
        short = 1  # there are slots, and too few blocks for it
    for choice in promised[: max(0, short)]:
        victim = state.queue.victim(choice)
        if victim is not None:
            preempt(state, victim, YIELDED)


def leaving_blocks(state: State) -> int:
    """Blocks that come back when the fence opens."""
    return sum(state.pool.lone_among(table) for table in state.fence.tables())
