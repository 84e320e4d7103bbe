"""Blocks behind the windows of running sequences, given back when a step's result is applied.

Steps in flight begin at positions that are not settled yet, and read no key behind the window of the first of these. So
what is given back here is reusable at once: no planned step touches it. It stays in the prefix index.
"""

from __future__ import annotations

import numpy as np

from penstock.engine_core.kv.block_layout import NO_BLOCK
from penstock.engine_core.scheduling.lifecycle import cache_blocks
from penstock.engine_core.scheduling.running_batch import Ints
from penstock.engine_core.scheduling.state import InFlightStep, SchedulerState


def release_behind(state: SchedulerState, inflight: InFlightStep) -> None:
    """Give back blocks that no position which may still be computed sees, of the rows of a step that was applied."""
    slots, layout = state.slots, state.kv.layout
    rows, reach = settled(state, inflight)
    for kind, (window, groups) in enumerate(layout.kinds):
        until = np.maximum(reach + 1 - window, 0) // layout.block_size
        passed = (until > slots.blocks.behind[kind, rows]).nonzero()[0]
        for slot, column in zip(rows[passed].tolist(), until[passed].tolist(), strict=True):
            give_back(state, slot, groups, int(slots.blocks.behind[kind, slot]), column)
            slots.blocks.behind[kind, slot] = column


def settled(state: SchedulerState, inflight: InFlightStep) -> tuple[Ints, Ints]:
    """Slots of the step whose sequence is still there, and the first position of each that may still be computed."""
    slots, batch = state.slots, inflight.batch
    rows = batch.slots[slots.kept(batch)]
    reach = slots.num_tokens[rows] - 1
    parts = [chunk for chunk in inflight.chunks if not chunk.sample and chunk.sequence.slot >= 0]
    if not parts:
        return rows, reach
    return (
        np.concatenate((rows, [chunk.sequence.slot for chunk in parts])),
        np.concatenate((reach, [chunk.start + chunk.count for chunk in parts])),
    )


def give_back(state: SchedulerState, slot: int, groups: tuple[int, ...], first: int, until: int) -> None:
    """Columns first .. until - 1 of some groups of a slot's table."""
    slots, kv = state.slots, state.kv
    sequence = slots.sequences[slot]
    assert sequence is not None
    cache_blocks(state, sequence)  # what decoding has filled may not be in the index yet
    table, freed = sequence.blocks, []
    for column in range(first, until):
        for group in groups:
            place = column * kv.layout.groups + group
            freed.append(table[place])
            table[place] = NO_BLOCK
    assert NO_BLOCK not in freed, "a block is given back once"
    blocks = np.array(freed)
    mine = kv.owners[blocks] == sequence.life
    kv.owners[blocks[mine]] = 0  # those who share them account for them no more
    slots.blocks.lent[slot] -= int((~mine).sum())
    slots.blocks.held[slot] -= len(freed)
    kv.pool.release(freed)
    state.refused = None
