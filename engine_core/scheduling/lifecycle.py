"""How a sequence is queued, leaves its slot, is preempted and ends. What is still in flight leaves through the fence.

When executors die, every sequence with a row in an unanswered step is a suspect. One that was in such steps SUSPICIOUS
times without progress is quarantined: it runs alone until it makes progress, or until the executors die again. Then its
request ends, and requests like it are refused for a while.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from penstock.engine_core.kv.block_layout import NO_BLOCK
from penstock.engine_core.kv.prefix_index import extend
from penstock.engine_core.scheduling.disaggregation import hand_over
from penstock.engine_core.scheduling.drafting import equip
from penstock.engine_core.scheduling.host_tier import distrust_copies, forget_waiting, note_filled
from penstock.engine_core.scheduling.outbox import end_row
from penstock.engine_core.scheduling.poison_requests import signature
from penstock.engine_core.scheduling.recurrent_state import leave_slot
from penstock.engine_core.scheduling.request import Request, Sequence
from penstock.engine_core.scheduling.state import Fenced, SchedulerState
from penstock.engine_core.scheduling.statistics import FINISHED
from penstock.engine_core.scheduling.storage_tier import distrust_storage
from penstock.engine_core.scheduling.tracing import PREEMPTED, YIELDED
from penstock.protocol.messages import Finish

TOO_SMALL = "the server no longer has enough KV cache for this request"
SUSPICIOUS = 2  # deaths without progress before a sequence is quarantined
AHEAD = 2  # tokens that were in flight at a death: a sequence with more new ones has got past it
KILLER = f"the engine's executor died {SUSPICIOUS + 1} times while it ran this request, the last time with nothing else"


def cache_blocks(state: SchedulerState, sequence: Sequence) -> None:
    """Cache the full blocks whose tokens are known and whose positions are planned."""
    if sequence.request.root is not None:
        full = (
            min(int(state.slots.num_computed_tokens[sequence.slot]), len(sequence.tokens)) // state.options.block_size
        )
        if full > sequence.cached:
            cache_blocks_to(state, sequence, full)


def cache_blocks_to(state: SchedulerState, sequence: Sequence, full: int) -> None:
    """Cache the sequence's first `full` blocks. Owner of `sequence.cached`."""
    size = state.options.block_size
    root, images = sequence.request.root, sequence.request.message.images
    assert root is not None
    extend(sequence.block_hashes, root, sequence.tokens, full, size, images)
    groups, hashes = state.kv.layout.groups, sequence.block_hashes[sequence.cached : full]
    blocks = sequence.blocks[sequence.cached * groups : full * groups]
    for group in range(groups):
        state.kv.prefix.cache(hashes, blocks[group::groups] if groups > 1 else blocks, group)
    if state.kv.host is not None:
        note_filled(state.kv.host, state.steps.planned, blocks)
    sequence.cached = full


def announce_prefix(state: SchedulerState, sequence: Sequence) -> None:
    """Let waiting sequences with the same prefix know that its next block is being computed."""
    if sequence.request.root is not None and sequence.cached < len(sequence.block_hashes):
        state.kv.in_flight_prefixes.setdefault(sequence.block_hashes[sequence.cached], sequence)


def retract_prefix(state: SchedulerState, sequence: Sequence) -> None:
    """Undo `announce_prefix`: before the sequence caches more blocks, and when it leaves."""
    if sequence.cached < len(sequence.block_hashes):
        identity = sequence.block_hashes[sequence.cached]
        if state.kv.in_flight_prefixes.get(identity) is sequence:
            del state.kv.in_flight_prefixes[identity]


def vacate(state: SchedulerState, sequence: Sequence, *, trusted: bool = True) -> None:
    """Take a sequence out of its slot; slot and blocks are reusable once its last planned step is applied."""
    retract_prefix(state, sequence)
    if trusted:
        cache_blocks(state, sequence)
    else:
        distrust(state, sequence)
    if sequence in state.prefilling:
        state.prefilling.remove(sequence)
    if state.kv.recurrent is not None:
        leave_slot(state, state.kv.recurrent, sequence, trusted=trusted)
    slot = state.slots.leave(sequence)
    if sequence.request.adapter is not None:
        state.adapters.leave(sequence.request.adapter)
    if sequence.request.message.images:
        state.encoder_cache.leave(sequence, sequence.last_step, state.steps.applied)
    state.queue.leave(sequence, state.stats.now)
    blocks, sequence.blocks = held_blocks(state, sequence), []
    sequence.cached = sequence.borrowed = 0
    if sequence.last_step <= state.steps.applied:
        release(state, Fenced(blocks, slot))
    else:
        state.kv.fence.setdefault(sequence.last_step, []).append(Fenced(blocks, slot))


def lacks_adapter(state: SchedulerState, sequence: Sequence) -> bool:
    """Whether a waiting sequence cannot enter a slot for want of its adapter."""
    return sequence.request.adapter is not None and state.adapters.lacks(sequence.request.adapter)


def held_blocks(state: SchedulerState, sequence: Sequence) -> list[int]:
    """Its table without the places of blocks that it gave back."""
    if not state.kv.layout.kinds:
        return sequence.blocks
    return [block for block in sequence.blocks if block != NO_BLOCK]


def distrust(state: SchedulerState, sequence: Sequence) -> None:
    """Have nobody find what the sequence has computed, blocks that it gave back among it."""
    kv, layout = state.kv, state.kv.layout
    computed = sequence.blocks[sequence.borrowed * layout.groups :]
    for _, groups in layout.kinds:
        hashes = sequence.block_hashes[sequence.borrowed : sequence.cached]
        found = [kv.prefix.find(identity, group) for identity in hashes for group in groups]
        computed += [block for block in found if block is not None]
    kv.pool.distrust([block for block in computed if block != NO_BLOCK])
    doubtful = sequence.block_hashes[sequence.borrowed : sequence.cached]
    distrust_copies(state, doubtful)
    distrust_storage(state, doubtful)


def release(state: SchedulerState, fenced: Fenced) -> None:
    """Free a slot and its blocks, which no step in flight touches any more."""
    state.kv.pool.release(fenced.blocks)
    state.slots.give(fenced.slot)
    state.refused = None


def preempt(state: SchedulerState, sequence: Sequence, reason: str = PREEMPTED) -> None:
    """Return a sequence to the queue, to be recomputed. Its tokens in flight still count. One that yielded its slot to
    another client waits for its own client's turn."""
    state.traces.leave(sequence, reason, state.stats.now)
    vacate(state, sequence)
    state.queue.put(sequence, state.stats.now, preempted=reason != YIELDED)
    state.traces.queue(sequence, state.stats.now)
    if reason == YIELDED:
        state.stats.totals.yielded += 1
    else:
        state.stats.totals.preemptions += 1


def end(state: SchedulerState, sequence: Sequence, finish: Finish) -> None:
    """The sequence ends, whether it runs or waits. The caller delivers its terminal row."""
    assert not sequence.ended
    request = sequence.request
    state.traces.leave(sequence, finish, state.stats.now)
    state.queue.settle(sequence)
    if sequence.slot >= 0:
        vacate(state, sequence, trusted=finish != Finish.ERROR)
    else:
        state.queue.remove(sequence)
        forget_waiting(state, sequence)
        if sequence.request.message.images:
            state.encoder_cache.leave(sequence, sequence.last_step, state.steps.applied)
        if state.refused is sequence:
            state.refused = None
    sequence.ended = True
    sequence.waits_for = None
    state.quarantine.pop(sequence, None)
    state.stats.totals.finishes[finish] += 1
    state.stats.sequences.end(sequence, finish, state.stats.now)
    if finish in FINISHED and not request.pools:
        state.forecast.ended(sequence.outputs, request.limit - request.prompt_tokens)
    state.stop_tokens.remove(request.stop_token_ids)
    state.queue.forget(sequence)
    if finish == Finish.PREFILLED:
        request.prefilled = sequence
    del request.sequences[sequence.index]
    if not request.sequences:
        assert request.spawned == request.message.n
        del state.requests[request.message.id]
        if request.prefilled is not None:
            hand_over(state, request.prefilled)


def end_aside(state: SchedulerState, sequence: Sequence, finish: Finish, error: str | None = None) -> None:
    """End a sequence outside a step's result, with a terminal row of its own."""
    row = end_row(sequence.request.message.id, sequence.index, finish, error, sequence.drafted)
    state.outboxes[sequence.request.source].rows.append(row)
    end(state, sequence, finish)


def cancel(state: SchedulerState, request: Request, finish: Finish, error: str | None = None) -> None:
    """End every sequence of a request, those not begun included."""
    outbox = state.outboxes[request.source]
    while request.spawned < request.message.n:
        outbox.rows.append(end_row(request.message.id, request.spawned, finish, error))
        request.spawned += 1
        state.stats.totals.finishes[finish] += 1
    for sequence in tuple(request.sequences.values()):
        end_aside(state, sequence, finish, error)
    if state.steps.pause.held.pop(request.message.id, None) is not None:
        del state.requests[request.message.id]  # no sequence of it has begun


def add(state: SchedulerState, request: Request) -> Sequence:
    """Queue the request's next sequence."""
    index = request.spawned
    first = request.sequences.get(0)
    tokens = array("i")
    tokens.frombytes(request.message.token_ids)
    if written := request.message.written:
        tokens.frombytes(written[index].token_ids)
    chain = [] if first is None else first.block_hashes[: request.prompt_tokens // state.options.block_size]
    rank = (-request.message.priority if state.options.policy == "priority" else 0, request.order, index)
    sequence = Sequence(request, index, rank, tokens, chain)
    if sequence.outputs:  # an earlier scheduler delivered what comes with a first token
        sequence.weights = ""
        sequence.prompt_logprobs.delivered = True
        sequence.prompt_logprobs.positions = request.prompt_tokens
    equip(state, sequence)
    request.sequences[index] = sequence
    request.spawned += 1
    state.stop_tokens.add(request.stop_token_ids)
    state.queue.put(sequence, state.stats.now)
    state.traces.queue(sequence, state.stats.now)
    return sequence


def add_others(state: SchedulerState, request: Request) -> None:
    """Queue the sequences that waited for sequence 0's prompt: its full blocks are planned and in the prefix index."""
    while request.spawned < request.message.n:
        add(state, request)


def resume(state: SchedulerState, request: Request) -> None:
    """Queue all unfinished sequences of a request that began at another scheduler."""
    for written in request.message.written:
        if written.ended:
            request.spawned += 1
        else:
            add(state, request)


def in_flight_sequences(state: SchedulerState) -> list[Sequence]:
    """Sequences with work in a step whose result has not come, or with an image that is being encoded."""
    found: dict[Sequence, None] = {}
    for inflight in state.steps.in_flight:
        found.update(dict.fromkeys(inflight.batch.sequences))
        found.update((chunk.sequence, None) for chunk in inflight.chunks)
    found.update(dict.fromkeys(state.encoder_cache.in_flight_sequences()))
    return [sequence for sequence in found if not sequence.ended]


def suspect(state: SchedulerState, suspects: Iterable[Sequence], now: float) -> None:
    """The executor died with these sequences in flight, all of which are back in the queue."""
    for sequence in suspects:
        if sequence.ended:
            continue  # with a sibling
        deaths, tokens = sequence.deaths
        deaths = deaths + 1 if deaths and len(sequence.tokens) <= tokens + AHEAD else 1
        sequence.deaths = deaths, len(sequence.tokens)
        state.quarantine.pop(sequence, None)
        if deaths > SUSPICIOUS:
            state.poison_requests.add(signature(sequence.request.message), now)
            state.stats.totals.poisoned += 1
            cancel(state, sequence.request, Finish.ERROR, KILLER)
        elif deaths == SUSPICIOUS:
            state.quarantine[sequence] = None


def clear_suspects(state: SchedulerState) -> None:
    """Release sequences from quarantine that have got past the deaths, and make room for the next one to run alone."""
    for sequence in list(state.quarantine):
        if len(sequence.tokens) > sequence.deaths[1] + AHEAD:
            del state.quarantine[sequence]
            if sequence.slot >= 0 and state.quarantine:
                preempt(state, sequence)
