"""How a choice leaves its slot and how it ends. Whoever still has a step in flight leaves through the fence."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from penstock.engine_core.kv.block_pool import Fenced
from penstock.engine_core.kv.prefix_index import extend
from penstock.engine_core.scheduling.drafting import equip
from penstock.engine_core.scheduling.outbox import end_row
from penstock.engine_core.scheduling.poison_requests import signature
from penstock.engine_core.scheduling.request import Choice, Request
from penstock.engine_core.scheduling.state import State
from penstock.engine_core.scheduling.statistics import FINISHED
from penstock.engine_core.scheduling.tracing import PREEMPTED, YIELDED
from penstock.protocol.messages import Finish

TOO_SMALL = "the server no longer has enough KV cache for this request"
SUSPICIOUS = 2  # deaths without progress before a choice is tried
AHEAD = 2  # tokens that were in flight at a death: as many more, and the choice has got past what killed
KILLER = f"the engine's executor died {SUSPICIOUS + 1} times while it ran this request, the last time with nothing else"


def seal(state: State, choice: Choice) -> None:
    """Name the full blocks whose tokens are known and whose positions are planned."""
    if choice.request.root is not None:
        full = min(int(state.slots.planned[choice.slot]), len(choice.tokens)) // state.options.block_size
        if full > choice.sealed:
            seal_to(state, choice, full)


def seal_to(state: State, choice: Choice, full: int) -> None:
    """Name the choice's blocks up to the first `full`, which are full. Owner of `choice.sealed`."""
    size = state.options.block_size
    assert choice.request.root is not None
    extend(choice.chain, choice.request.root, choice.tokens, full, size)
    state.prefix.seal(choice.chain[choice.sealed : full], choice.blocks[choice.sealed : full])
    choice.sealed = full
    state.slots.sealed[choice.slot] = full


def announce(state: State, choice: Choice) -> None:
    """Tell newcomers with the same prefix that the next block of it is being computed: they wait for it."""
    if choice.request.root is not None and choice.sealed < len(choice.chain):
        state.coming.setdefault(choice.chain[choice.sealed], choice)


def retract(state: State, choice: Choice) -> None:
    """Take back what `announce` told. Called before `seal` moves on and when the choice leaves."""
    if choice.sealed < len(choice.chain):
        identity = choice.chain[choice.sealed]
        if state.coming.get(identity) is choice:
            del state.coming[identity]


def vacate(state: State, choice: Choice, *, trusted: bool = True) -> None:
    """Take a choice out of its slot; slot and blocks are reusable once its last planned step is applied."""
    retract(state, choice)
    if trusted:
        seal(state, choice)
    else:
        state.pool.distrust(choice.blocks[choice.borrowed :])
    if choice in state.prefilling:
        state.prefilling.remove(choice)
    slot = state.slots.leave(choice, state.options.block_size)
    state.queue.leave(choice, state.durations.now)
    blocks, choice.blocks = choice.blocks, []
    choice.sealed = choice.borrowed = 0
    if choice.last_step <= state.applied:
        release(state, Fenced(blocks, slot))
    else:
        state.fence.hold(choice.last_step, Fenced(blocks, slot))


def release(state: State, fenced: Fenced) -> None:
    """Nothing in flight touches these any more."""
    state.pool.release(fenced.blocks)
    state.slots.give(fenced.slot)
    state.refused = None


def preempt(state: State, choice: Choice, reason: str = PREEMPTED) -> None:
    """Back to the queue, to be recomputed. Tokens in flight are still taken. One that gave its slot up for another
    client waits for its own client's turn."""
    state.traces.leave(choice, reason, state.durations.now, state.slots)
    vacate(state, choice)
    state.queue.put(choice, state.durations.now, preempted=reason != YIELDED)
    state.traces.queue(choice, state.durations.now)
    if reason == YIELDED:
        state.totals.yielded += 1
    else:
        state.totals.preemptions += 1


def end(state: State, choice: Choice, finish: Finish) -> None:
    """The choice is over, wherever it stands. The terminal row is the caller's."""
    assert not choice.ended
    request = choice.request
    state.traces.leave(choice, finish, state.durations.now, state.slots)
    state.queue.settle(choice)
    if choice.slot >= 0:
        vacate(state, choice, trusted=finish != Finish.ERROR)
    else:
        state.queue.remove(choice)
        if state.refused is choice:
            state.refused = None
    choice.ended = True
    choice.behind = None
    state.accused.pop(choice, None)
    state.totals.finishes[finish] += 1
    state.durations.end(choice, finish)
    state.lengths.end(choice, finish)
    if finish in FINISHED and not request.pools:
        state.forecast.ended(choice.outputs, request.limit - request.prompt_tokens)
    state.suspects.remove(request.ending)
    state.queue.forget(choice)
    del request.choices[choice.index]
    if not request.choices:
        assert request.spawned == request.message.n
        del state.requests[request.message.id]


def end_aside(state: State, choice: Choice, finish: Finish, error: str | None = None) -> None:
    """End a choice outside a step's columns: its terminal row stands alone."""
    row = end_row(choice.request.message.id, choice.index, finish, error, choice.drafted)
    state.outboxes[choice.request.source].put(row)
    end(state, choice, finish)


def cancel(state: State, request: Request, finish: Finish, error: str | None = None) -> None:
    """End every choice of a request, those not begun included."""
    outbox = state.outboxes[request.source]
    while request.spawned < request.message.n:
        outbox.put(end_row(request.message.id, request.spawned, finish, error))
        request.spawned += 1
        state.totals.finishes[finish] += 1
    for choice in tuple(request.choices.values()):
        end_aside(state, choice, finish, error)


def add(state: State, request: Request) -> Choice:
    """Queue the request's next choice."""
    index = request.spawned
    first = request.choices.get(0)
    tokens = array("i")
    tokens.frombytes(request.message.token_ids)
    if written := request.message.written:
        tokens.frombytes(written[index].token_ids)
    chain = [] if first is None else first.chain[: request.prompt_tokens // state.options.block_size]
    rank = (-request.message.priority if state.options.policy == "priority" else 0, request.order, index)
    choice = Choice(request, index, rank, tokens, chain)
    if choice.outputs:  # what comes with a first token was told by the scheduler before this one
        choice.began = choice.told = True
        choice.scored = request.prompt_tokens
    equip(state, choice)
    request.choices[index] = choice
    request.spawned += 1
    state.suspects.add(request.ending)
    state.queue.put(choice, state.durations.now)
    state.traces.queue(choice, state.durations.now)
    return choice


def add_others(state: State, request: Request) -> None:
    """Queue the choices that waited for choice 0's prompt: it is planned and sealed, so they find its full blocks."""
    while request.spawned < request.message.n:
        add(state, request)


def resume(state: State, request: Request) -> None:
    """Queue the choices of a request that goes on, all at once; those that have ended are over."""
    for written in request.message.written:
        if written.ended:
            request.spawned += 1
        else:
            add(state, request)


def flown(state: State) -> list[Choice]:
    """Choices with work in a step that has not been answered."""
    found: dict[Choice, None] = {}
    for flight in state.flights:
        found.update(dict.fromkeys(flight.lane.choices))
        found.update((chunk.choice, None) for chunk in flight.chunks)
    return [choice for choice in found if not choice.ended]


def charge(state: State, suspects: Iterable[Choice], now: float) -> None:
    """The executor died with these choices in flight, all of which are back in the queue."""
    for choice in suspects:
        if choice.ended:
            continue  # with a sibling
        stuck = choice.deaths > 0 and len(choice.tokens) <= choice.mark + AHEAD
        choice.deaths = choice.deaths + 1 if stuck else 1
        choice.mark = len(choice.tokens)
        state.accused.pop(choice, None)
        if choice.deaths > SUSPICIOUS:
            state.condemned.add(signature(choice.request.message), now)
            state.totals.condemned += 1
            cancel(state, choice.request, Finish.ERROR, KILLER)
        elif choice.deaths == SUSPICIOUS:
            state.accused[choice] = None


def acquit(state: State) -> None:
    """Whoever has got past the place of the deaths is one of many again; it makes room for the next to be tried."""
    for choice in list(state.accused):
        if len(choice.tokens) > choice.mark + AHEAD:
            del state.accused[choice]
            if choice.slot >= 0 and state.accused:
                preempt(state, choice)
