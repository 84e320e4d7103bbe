"""Notes what becomes of traced requests as it happens, and tells it when a choice leaves its slot or the queue.

Nothing here is done for requests that nobody traces, and nothing per token.
"""

from __future__ import annotations

from penstock.engine_core.scheduling.history import Passage, PrefillChunk, Stay, StepFacts
from penstock.engine_core.scheduling.request import Choice
from penstock.engine_core.scheduling.slots import NEVER, Ints
from penstock.engine_core.scheduling.state import Flight, State
from penstock.protocol.messages import Finish, SubmitTokens

MOST_CHOICES = 16  # of one request that are told one by one
PREEMPTED = "preempted"
YIELDED = "yielded"  # its slot went to a client that had none
RESTARTED = "restarted"  # the executors were lost


def traces(state: State, message: SubmitTokens) -> bool:
    """Whether a request's history is told."""
    return state.options.traced and message.trace.sampled


def wait(state: State, choice: Choice) -> None:
    """It is put into the queue."""
    if choice.request.traced and choice.index < MOST_CHOICES:
        choice.passage = Passage(
            state.durations.now, outputs=choice.outputs, accepted=choice.accepted, rejected=choice.rejected
        )


def enter(state: State, choice: Choice) -> None:
    """It has a slot, and so many blocks from the prefix cache."""
    passage = choice.passage
    if passage is not None:
        passage.entered = state.durations.now
        passage.reused = len(choice.blocks) * state.options.block_size
        state.history.traced[choice.slot] = choice


def note_chunks(state: State, flight: Flight) -> None:
    """A step's result has come. Called before its tokens are taken, which may end a choice."""
    for chunk in flight.chunks:
        choice, passage = chunk.choice, chunk.choice.passage
        if passage is None or passage.entered is None or passage.entered > flight.planned:
            continue  # planned in an earlier stay
        passage.chunks.append(PrefillChunk(flight.step, chunk.start, chunk.count, flight.planned, state.durations.now))
        if chunk.sample:
            passage.decoding, passage.first = state.durations.now, not choice.began
            if state.options.trace_tokens:
                state.slots.mark[choice.slot] = len(choice.tokens) + 1 + state.options.trace_tokens


def note_marks(state: State, settled: Ints) -> None:
    """Tokens have come to these slots: note the time of those that have so many more again."""
    slots = state.slots
    for slot in settled[slots.known[settled] >= slots.mark[settled]].tolist():
        choice = state.history.traced[slot]
        assert choice.passage is not None
        choice.passage.marks.append((state.durations.now, choice.outputs))
        slots.mark[slot] = len(choice.tokens) + state.options.trace_tokens


def tell(state: State, choice: Choice, end: Finish | str) -> None:
    """It leaves its slot, or the queue; called while it still stands there."""
    passage = choice.passage
    if passage is None:
        return
    request = choice.request
    if choice.slot >= 0:
        del state.history.traced[choice.slot]
        state.slots.mark[choice.slot] = NEVER
    choice.passage = None
    state.history.stays.append(
        Stay(
            trace=request.message.trace,
            request=request.message.id,
            choice=choice.index,
            queued=passage.queued,
            entered=passage.entered,
            left=state.durations.now,
            end=end.name.lower() if isinstance(end, Finish) else end,
            prompt_tokens=request.prompt_tokens,
            reused=passage.reused,
            chunks=tuple(passage.chunks),
            decoding=passage.decoding,
            first=passage.first,
            tokens=choice.outputs - passage.outputs,
            accepted=choice.accepted - passage.accepted,
            rejected=choice.rejected - passage.rejected,
            marks=tuple(passage.marks),
        )
    )


def last_step(state: State) -> StepFacts:
    """Of the step that was planned last, which is in flight."""
    flight, slots = state.flights[-1], state.slots
    decoding = len(flight.lane.choices) - sum([chunk.sample for chunk in flight.chunks])
    rows = {choice.request: None for choice in flight.lane.choices if choice.passage is not None}
    rows |= {chunk.choice.request: None for chunk in flight.chunks if chunk.choice.passage is not None}
    drafts = 0 if flight.drafts is None else flight.drafts.total
    return StepFacts(
        step=flight.step,
        epoch=state.epoch,
        rows=len(flight.lane.choices),
        chunks=len(flight.chunks),
        tokens=decoding + drafts + sum([chunk.count for chunk in flight.chunks]),
        drafts=drafts,
        masked=len(flight.guided),
        running=len(slots.occupied()),
        waiting=len(state.queue),
        blocks=state.pool.total,
        blocks_used=state.pool.held,
        traced=tuple([request.message.trace for request in rows]),
    )
