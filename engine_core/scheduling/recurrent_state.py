"""Recurrent states in the schedule: where sequences begin, which states are kept, and who waits for one.

A model with recurrent layers can go on behind a prefix only from a snapshot of its state there. So a prefix hit is the
longest position that has a snapshot and all KV blocks before it. Blocks known beyond it are computed again, into blocks
of the sequence's own: others read the known ones.

States are kept as of multiples of `unit`, at positions that later requests are likely to share:

- the last one inside the prompt;
- those before the ends of its system prompt and of its last turns, as the tokenizer found them;
- where its chain leaves a chain of known blocks: a prefix that is seen for the second time;
- the last one of what was written, in a place that moves up with the sequence while nothing begins from it.

A chunk may have several of them, so a prompt is not cut for its states. A snapshot can be found once the result of its
step is applied. Until then, and from when a sequence is admitted that will keep it, sequences behind the same prefix
wait for it.
"""

from __future__ import annotations

from bisect import insort

from penstock.engine_core.kv.prefix_index import extend
from penstock.engine_core.kv.snapshots import NO_PLACE, NO_SNAPSHOT
from penstock.engine_core.scheduling.request import Sequence
from penstock.engine_core.scheduling.running_batch import NEVER, Ints
from penstock.engine_core.scheduling.state import Chunk, KeptState, RecurrentStates, SchedulerState

MOST_DECODING = 4  # states of decoding rows that one step keeps; rows that began together reach a multiple together
MOST_TURNS = 4  # ends of turns of a prompt before which states are kept: each takes a place


def clear_states(states: RecurrentStates, places: tuple[int, int] | None) -> None:
    """New executors: every place is empty, and there are so many if their numbers changed. No sequence has a slot."""
    states.snapshots.clear(*((states.snapshots.total, states.snapshots.host) if places is None else places))
    states.coming.clear()


def check_states(state: SchedulerState, states: RecurrentStates) -> tuple[str, ...]:
    """What is wrong with the accounts of states, in words."""
    size = state.options.block_size
    wanted = {
        sequence.block_hashes[position // size - 1]
        for sequence in state.slots.sequences
        if sequence is not None
        for position in states.stops[sequence.slot]
    }
    wanted.update(found.identity for inflight in state.steps.in_flight for found in inflight.kept)
    faults = states.snapshots.check()
    return faults if wanted == states.coming.keys() else (*faults, "a state is awaited that nobody keeps")


def waits(states: RecurrentStates, sequence: Sequence, blocks: int) -> bool:
    """Whether the state behind a sequence's first `blocks` blocks is still to come."""
    return sequence.block_hashes[blocks - 1] in states.coming


def with_state(
    state: SchedulerState, states: RecurrentStates, sequence: Sequence, found: list[int], most: int
) -> list[int] | None:
    """The blocks of `found`, a known prefix, before the longest snapshot among them, whose place is noted.
    None: a longer one is coming, which the sequence waits for; it may begin behind at most `most` blocks."""
    unit = states.unit // state.options.block_size
    chain = sequence.block_hashes
    length, place = states.snapshots.longest(chain, len(found), unit)
    states.found = len(found), place
    for blocks in range(most // unit * unit, length, -unit):
        leader = states.coming.get(chain[blocks - 1])
        if leader is not None:
            sequence.waits_for = (leader, leader.life, blocks)
            return None
    return found[:length]


def ask_leader(state: SchedulerState, states: RecurrentStates, leader: Sequence, blocks: int) -> None:
    """Another sequence has the leader's first `blocks` blocks: have their state kept, if the leader is not past it."""
    position = blocks * state.options.block_size // states.unit * states.unit
    if position > int(state.slots.num_computed_tokens[leader.slot]):
        add_stop(state, states, leader, position)


def add_stop(state: SchedulerState, states: RecurrentStates, sequence: Sequence, position: int) -> None:
    """Have a prefilling sequence's state kept at this position, unless somebody else has kept or keeps it."""
    identity = sequence.block_hashes[position // state.options.block_size - 1]
    if states.snapshots.total and identity not in states.coming and states.snapshots.find(identity) == NO_PLACE:
        insort(states.stops[sequence.slot], position)
        states.coming[identity] = sequence


def enter_slot(state: SchedulerState, states: RecurrentStates, sequence: Sequence) -> None:
    """The sequence has a slot: choose which states of its prompt to keep, and hold the snapshot that it begins from."""
    slot, unit, request = sequence.slot, states.unit, sequence.request
    states.stops[slot], states.moving[slot], states.due[slot] = [], None, NEVER
    computed = int(state.slots.num_computed_tokens[slot])
    known, place = states.found
    assert (place != NO_PLACE) == (computed > 0), "a snapshot stands behind a prefix"
    states.begins[slot] = states.snapshots.number(place)
    if computed:
        states.snapshots.read(place, state.steps.planned + 1)
    if request.root is None:
        return
    last = (len(sequence.tokens) - 1) // unit * unit
    states.due[slot] = last + unit
    turns = [turn // unit * unit for turn in request.message.turns]
    forked = known * state.options.block_size // unit * unit
    for position in {last, forked, *turns[:1], *turns[1:][1 - MOST_TURNS :]}:
        if computed < position <= last:
            add_stop(state, states, sequence, position)


def leave_slot(state: SchedulerState, states: RecurrentStates, sequence: Sequence, *, trusted: bool) -> None:
    """The sequence leaves its slot: nobody waits for what it will not keep. One that failed takes its states along."""
    for position in states.stops[sequence.slot]:
        del states.coming[sequence.block_hashes[position // state.options.block_size - 1]]
    states.stops[sequence.slot] = []
    if not trusted:
        states.snapshots.distrust(sequence.block_hashes[sequence.borrowed :])


def keep_states(
    state: SchedulerState, states: RecurrentStates, step: int, rows: Ints, chunks: list[Chunk]
) -> tuple[KeptState, ...]:
    """The states that a step keeps, of its decoding rows and its chunks. Called before its positions are counted."""
    kept: list[KeptState] = []
    for chunk in chunks:
        stops, end, before = states.stops[chunk.sequence.slot], chunk.start + chunk.count, NO_SNAPSHOT
        while stops and stops[0] <= end:
            position = stops.pop(0)
            found = reserve(state, states, step, chunk.sequence, position, before=before)
            if found is None:
                del states.coming[chunk.sequence.block_hashes[position // state.options.block_size - 1]]
            else:
                kept.append(found)
                before = position // state.options.block_size, found.place
    slots, left = state.slots, MOST_DECODING
    for slot in rows[slots.num_computed_tokens[rows] >= states.due[rows]].tolist():
        sequence, computed = slots.sequences[slot], int(slots.num_computed_tokens[slot])
        position = computed // states.unit * states.unit
        if computed - position >= states.window:  # the state may be past it
            states.due[slot] = position + states.unit
            continue
        if int(slots.num_tokens[slot]) <= position:
            continue  # it may not have reached it, because drafts count as accepted
        if not left:
            break
        assert sequence is not None
        states.due[slot] = position + states.unit
        if (found := reserve(state, states, step, sequence, position, states.moving[slot])) is not None:
            states.moving[slot] = found.place, found.identity
            kept.append(found)
            left -= 1
    return tuple(kept)


def reserve(
    state: SchedulerState,
    states: RecurrentStates,
    step: int,
    sequence: Sequence,
    position: int,
    moving: tuple[int, bytes] | None = None,
    before: tuple[int, int] = NO_SNAPSHOT,
) -> KeptState | None:
    """A place for the sequence's state as of `position`, if there is one and no equal snapshot. before: the blocks and
    the place of a shorter one that the step keeps of it."""
    size, snapshots, chain = state.options.block_size, states.snapshots, sequence.block_hashes
    assert sequence.request.root is not None
    blocks = position // size
    extend(chain, sequence.request.root, sequence.tokens, blocks, size, sequence.request.message.images)
    identity = chain[blocks - 1]
    if snapshots.find(identity) != NO_PLACE or states.coming.get(identity, sequence) is not sequence:
        return None
    own = moving[0] if moving is not None and snapshots.moves(*moving) else NO_PLACE
    unit = states.unit // size
    length, parent = snapshots.longest(chain, blocks - unit, unit, before)
    if parent != NO_PLACE and parent == own:
        length, parent = snapshots.longest(chain, length - unit, unit)
    place = snapshots.reserve(identity, position - length * size, parent, step, state.steps.applied, own)
    if place == NO_PLACE:
        return None
    states.coming[identity] = sequence
    return KeptState(sequence.slot, position, place, identity, snapshots.spilled)


def publish_states(states: RecurrentStates, kept: tuple[KeptState, ...]) -> None:
    """The step that kept them was applied: they can be found, and nobody waits any longer."""
    for found in kept:
        states.coming.pop(found.identity, None)
        states.snapshots.publish(found.place, found.identity)
