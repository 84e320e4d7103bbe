"""Micro-batches: the decoding rows of a pipeline take turns, so that each of its stages has a step of its own to run.

A row's next step needs the token of its last one, which comes from the last stage as many steps later as there are
stages. So the rows are spread evenly over one micro-batch for each stage, and the plan of a step runs the one that has
waited longest. A row whose token is not due is left out of its micro-batch's turn, or else the first stage, and
everybody behind it, would stand still for it; where all of them are too early and there is nothing else to run, they
are planned all the same, because the token reaches the first stage earlier than its result reaches the scheduler.

One stage has one micro-batch, whose turn it always is.
"""

from __future__ import annotations

import numpy as np

from penstock.engine_core.scheduling.slots import Ints, Lane
from penstock.engine_core.scheduling.state import State
from penstock.protocol.steps import NOBODY


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
    if options.stages == 1:
        return budget
    waiting = state.queue.tokens
    waiting += sum([len(choice.tokens) - int(planned[choice.slot]) for choice in state.prefilling])
    return min(budget, max(options.piece, -(-waiting // (2 * options.stages))))


def stretch(state: State) -> float:
    """How many times as long as its time on the last stage, which is measured, a step takes until that stage drafts
    behind the next one: 1 where every stage has a micro-batch to run, as many as there are stages for a single one."""
    return state.options.stages / max(1, sum([size > 0 for size in state.slots.sizes]))


def nobody() -> Ints:
    return np.zeros(0, np.int64)
