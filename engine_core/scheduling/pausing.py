"""Pauses: no step is planned for a while, and what becomes of requests meanwhile.

In mode wait the requests that are there run to their ends first, and those that come are held apart: they have no place
in the queue, so they can stand in nobody's way. The operator's mode and `frozen`, which lasts while the executors'
weights or what they have computed changes, are told apart: one does not end the other.
"""

from __future__ import annotations

from penstock.engine_core.scheduling.disk_tier import forget_disk
from penstock.engine_core.scheduling.host_tier import clear_copies
from penstock.engine_core.scheduling.lifecycle import add, cancel, preempt
from penstock.engine_core.scheduling.recurrent_state import clear_states
from penstock.engine_core.scheduling.request import PromptLogprobs
from penstock.engine_core.scheduling.state import SchedulerState
from penstock.engine_core.scheduling.tracing import PREEMPTED
from penstock.protocol.control import PauseMode
from penstock.protocol.messages import Finish


def pause(state: SchedulerState, mode: PauseMode | None) -> None:
    """Begin a pause of this mode in place of any other one; None: there is none."""
    state.steps.pause.mode = mode
    if mode is PauseMode.ABORT:
        abort_all(state)
    if mode is not PauseMode.WAIT:
        release(state)


def abort_all(state: SchedulerState, rid: str = "") -> None:
    """End every request, or those that are called `rid`."""
    for request in list(state.requests.values()):
        if not rid or request.message.rid == rid:
            cancel(state, request, Finish.ABORT)


def holds(state: SchedulerState) -> bool:
    """Whether there is a pause of the operator's and nothing runs, nor will before it is over."""
    pause = state.steps.pause
    if pause.mode is None or state.steps.in_flight:
        return False
    return pause.mode is not PauseMode.WAIT or len(state.requests) == len(pause.held)


def settled(state: SchedulerState) -> bool:
    """Whether executors touch no block: no step and no copy is in flight."""
    host = state.kv.host
    return not (state.steps.in_flight or (host is not None and (host.fetches or host.spills)))


def release(state: SchedulerState) -> None:
    """Queue the requests that were held apart; they wait from now on."""
    held = state.steps.pause.held
    while held:
        request = held.pop(next(iter(held)))
        request.since = state.stats.now
        add(state, request)


def forget_computed(state: SchedulerState, version: str | None) -> None:
    """Forget all that the executors have computed: blocks and states of recurrent layers; images and log-probabilities
    of prompts too, where it was with other weights than those of this version, which they have now. Running requests
    return to the queue, to be computed again from their tokens. No step and no copy is in flight."""
    assert settled(state)
    for sequence in [sequence for sequence in state.slots.sequences if sequence is not None]:
        preempt(state, sequence, PREEMPTED)
    assert not len(state.kv.fence), "every step has been applied"
    clear_copies(state)
    forget_disk(state)
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
