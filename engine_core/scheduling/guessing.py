"""Drafts that the executors make by themselves, as plans ask for them and as later plans have them verified.

A plan asks for the drafts of the step behind it: they are made once it has sampled, whatever it gives, and nobody waits
for them. They yield to everything: they are asked for last, with the blocks that nobody else wanted, and a step without
room for them leaves them where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.engine_core.scheduling.microbatches import stretch
from penstock.engine_core.scheduling.slots import Ints, Lane
from penstock.engine_core.scheduling.state import Chunk, Drafts, Flight, Made, State, Told
from penstock.protocol.steps import OWN_DRAFT, StepResult

Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int32]
LEAST_CATCH_UP = 2  # positions: what every row lacks whose drafts all came true


def with_guesses(state: State, lane: Lane, drafts: Drafts | None, budget: int) -> Drafts | None:
    """The step's drafts, with those that stand behind the tokens of other rows, at most `budget` tokens of them."""
    guesses, slots = state.guesses, lane.slots
    counts = np.minimum(guesses.standing[slots], (state.slots.limit - state.slots.planned)[slots] - 2)
    if drafts is not None:
        counts[drafts.rows] = 0  # what a grammar forces and what a request predicts is surer
    counts = np.maximum(counts, 0)
    counts -= np.clip(np.cumsum(counts) - max(0, budget), 0, counts)
    rows = counts.nonzero()[0]
    if not len(rows):
        return drafts
    pairs = zip(rows.tolist(), counts[rows].tolist(), strict=True)
    ids = [carried(lane.choices[row].guesses, count) for row, count in pairs]
    own = np.ones(len(rows), np.bool_)
    if drafts is None:
        return Drafts(rows, counts[rows], ids, own)
    every = np.concatenate((drafts.rows, rows))
    order = np.argsort(every)
    both = drafts.ids + ids
    return Drafts(
        every[order],
        np.concatenate((drafts.counts, counts[rows]))[order],
        [both[place] for place in order.tolist()],
        np.concatenate((np.zeros(len(drafts.rows), np.bool_), own))[order],
    )


def carried(told: list[int] | None, count: int) -> list[int]:
    """The ids of a row's drafts. Where they are told they may come later: the list is filled when they do."""
    if told is None:
        return [OWN_DRAFT] * count
    del told[count:]
    return told


def nobody() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a plan asks to be drafted behind its step."""

    columns: bytes = b""  # of `StepPlan.drafting`
    told: tuple[Told, ...] = ()
    short: Ints = field(default_factory=nobody)  # slots, each as often as it needs a new block for its drafts


def ask(state: State, lane: Lane, drafts: Drafts | None, chunks: list[Chunk]) -> Asked:
    """Close the accounts of the step's own drafts and ask for those of the next one.

    `lane` are the rows that sample, those of chunks last; planned positions count this step already.
    """
    guesses, slots = state.guesses, lane.slots
    room = (state.slots.limit - state.slots.planned)[slots] - 2
    guesses.lacking[slots] += 1
    if drafts is not None:
        carriers = slots[drafts.rows]
        whole = drafts.counts == guesses.standing[carriers]  # the last draft made was never an input
        seen = drafts.own & (not state.options.speculation.rereads)
        guesses.lacking[carriers] += np.where(seen, whole, drafts.counts)
        room[drafts.rows[~drafts.own]] = 0  # their drafts come from elsewhere
    guesses.standing[slots] = 0
    options = state.options
    most = min(options.speculation.max_step_drafts, options.max_num_batched_tokens - len(slots))
    forget_told(state, lane, room)
    lengths = guesses.ask(slots, room, most, state.cost, state.planned, stretch(state))
    short = claim_blocks(state, slots, lengths)
    state.made = None if chunks else Made(int(np.count_nonzero(lengths)), int(lengths.max(initial=0)))
    guesses.standing[slots] = lengths
    told = hear(state, lane, lengths)
    return Asked(drafting_columns(state, lane, lengths, chunks), told, short)


def forget_told(state: State, lane: Lane, room: Ints) -> None:
    """What was told of guided rows is used up. One whose grammar forces what comes after the steps in flight, this one
    among them, needs no drafts."""
    for row in guided(state, lane):
        choice = lane.choices[row]
        choice.guesses = None
        drafter = choice.drafter
        if drafter is not None and len(drafter.forced) > sum([1 + len(drafts) for drafts in drafter.flying]):
            room[row] = 0


def hear(state: State, lane: Lane, lengths: Ints) -> tuple[Told, ...]:
    """Drafts of guided rows are told by the step's result: masks behind them depend on what they say."""
    found = []
    for row in guided(state, lane):
        if length := int(lengths[row]):
            ids = lane.choices[row].guesses = [OWN_DRAFT] * length
            found.append(Told(ids, length))
    return tuple(found)


def guided(state: State, lane: Lane) -> list[int]:
    rows: list[int] = state.slots.guided[lane.slots].nonzero()[0].tolist() if state.slots.guides else []
    return rows


def claim_blocks(state: State, slots: Ints, lengths: Ints) -> Ints:
    """Slots, each as often as its drafts need a new block; `lengths` become 0 where the pool has none left."""
    columns, size = state.slots, state.options.block_size
    beyond = (columns.planned + 1)[slots] + lengths - columns.room[slots]
    needs = np.where(lengths > 0, np.maximum(-(-beyond // size), 0), 0)
    if not needs.any():
        return nobody()
    denied = np.cumsum(needs) > state.pool.available
    lengths[denied & (needs > 0)] = 0
    return np.repeat(slots, np.where(denied, 0, needs))


def drafting_columns(state: State, lane: Lane, lengths: Ints, chunks: list[Chunk]) -> bytes:
    """The plan's `drafting`: rows that get drafts, and every chunk, so that the draft model keeps up with prompts."""
    guesses, slots = state.guesses, lane.slots
    sampled = sum([chunk.sample for chunk in chunks])
    decoding = len(slots) - sampled
    rows = lengths[:decoding].nonzero()[0]
    asked = slots[rows]
    told = state.slots.guided[slots] & (lengths > 0)
    parts = []
    if len(rows):
        spare = state.options.max_num_batched_tokens - sum([chunk.count for chunk in chunks])
        most = max(LEAST_CATCH_UP, spare // len(rows))
        lacking = np.minimum(np.minimum(guesses.lacking[asked], state.slots.known[asked] + 1), most)
        parts.append(np.stack((asked, -lacking, lacking, lengths[rows], told[rows]), axis=1))
        guesses.lacking[asked] = 0
    row, lines = decoding, []
    for chunk in chunks:
        slot, length, heard = chunk.choice.slot, 0, False
        if chunk.sample:
            length, heard = int(lengths[row]), bool(told[row])
            guesses.lacking[slot] = 0 if length else 1
            row += 1
        lines.append((slot, chunk.start, chunk.count + (length > 0), length, heard))
    if lines:
        parts.append(np.array(lines, np.int64))
    return np.concatenate(parts).astype(np.int32).tobytes() if parts else b""


def fill_told(flight: Flight, result: StepResult) -> None:
    """The drafts that a step's result tells, for whoever waits for their ids."""
    ids: list[int] = np.frombuffer(result.drafts, np.int32).tolist()
    place = 0
    for told in flight.told:
        told.ids[:] = ids[place : place + len(told.ids)]
        place += told.count
    assert place == len(ids), "the drafts of every row that is told"


def land_drafting(state: State, flight: Flight, seconds: float) -> None:
    """How long the drafting behind the step before took is known with the step's result."""
    if flight.made is not None and flight.made.turns and seconds > 0.0:
        state.guesses.cost.tell(flight.made.rows, flight.made.turns, seconds)


def tell_guesses(state: State, flight: Flight, drafts: Drafts, kept: Flags, counts: Counts) -> None:
    """What became of the step's own drafts, of rows whose choice is still where the step met it.
    # kept, counts (entries that count): [rows]"""
    mine = drafts.own & kept[drafts.rows]
    if mine.any():
        rows = drafts.rows[mine]
        state.guesses.tell(flight.lane.slots[rows], drafts.counts[mine], counts[rows].astype(np.int64) - 1)
