"""Which decoding rows carry drafts in the next step, and what became of those of the last one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.outbox import Note
from penstock.engine_core.scheduling.request import Choice, Request
from penstock.engine_core.scheduling.running_batch import Ints, Lane
from penstock.engine_core.scheduling.state import Chunk, Drafts, Flight, Made, State, Told
from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.drafter import Draft, Drafter, Prediction, Proposer
from penstock.engine_core.speculation.jump_forward import Gain, Looks
from penstock.engine_core.speculation.ngram import PromptLookup
from penstock.engine_core.speculation.options import SpeculationOptions
from penstock.engine_core.speculation.step_cost import draft_lengths
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.steps import OWN_DRAFT, StepResult

Counts = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
LEAST_CATCH_UP = 2  # positions: what every row lacks whose drafts all came true


def equip(state: State, choice: Choice) -> None:
    """Give a new choice its copy of the request's guide, and a drafter if anything may be proposed for it."""
    request, options = choice.request, state.options.speculation
    if request.guide is not None:
        choice.guide = request.guide.copy()
        if request.message.speculate and not options.own_drafts:  # a draft model sees what is likely, and more
            choice.guide.learn(state.habits)
        catch_up(choice.guide, choice.tokens[request.prompt_tokens :].tolist())
    found = proposers(request, options) if request.message.speculate else ()
    if choice.guide is not None or found:
        acceptance, gain = Acceptance(state.acceptance), Gain(state.looks.gain)
        choice.drafter = Drafter(found, request.ending, acceptance, gain)
    if choice.guide is not None and choice.drafter is not None:
        state.looks.meet(min(len(state.requests) + 1, state.slots.count), state.cost)
        look_ahead(choice.drafter, choice.guide, state.looks)


def catch_up(guide: Guide, written: list[int]) -> None:
    """Have a guide take what its choice has written already. One that cannot has failed: so the choice will end."""
    try:
        guide.advance(written)
    except (GrammarFailure, EngineFailure) as error:  # guard: design 7, one request's automaton
        guide.fail(error.message)


def proposers(request: Request, options: SpeculationOptions) -> tuple[Proposer, ...]:
    """For one choice, in the order in which they are asked."""
    found: list[Proposer] = []
    if request.message.prediction:
        found.append(Prediction(request.message.prediction, request.prompt_tokens))
    if options.method == "ngram":
        found.append(PromptLookup(request.limit, options.prompt_lookup_min, options.prompt_lookup_max))
    return tuple(found)


def draft_rows(state: State, lane: Lane, budget: int) -> Drafts | None:
    """Drafts for the rows of the lane, at most `budget` tokens in all. No row is drafted past its limit."""
    slots, options = state.slots, state.options.speculation
    rows = slots.drafting[lane.slots].nonzero()[0]
    room = (slots.limit - slots.planned)[lane.slots[rows]] - 2  # the step's own token is one of those allowed
    found: list[tuple[int, Drafter, Draft]] = []
    for row, most in zip(rows.tolist(), room.tolist(), strict=True):
        choice = lane.choices[row]
        if most > 0 and choice.drafter is not None:
            draft = choice.drafter.draft(choice.tokens, options.num_speculative_tokens, most)
            if draft is not None:
                found.append((row, choice.drafter, draft))
    if not found:
        return None
    lengths = draft_lengths(
        len(lane.slots),
        [draft.chances for _, _, draft in found],
        state.cost,
        max(0, min(budget, options.max_step_drafts)),
    )
    for (_, drafter, _), length in zip(found, lengths, strict=True):
        drafter.taken(length)
    sent = [(row, draft.tokens[:length]) for (row, _, draft), length in zip(found, lengths, strict=True) if length]
    if not sent:
        return None
    return Drafts(
        np.array([row for row, _ in sent]),
        np.array([len(ids) for _, ids in sent]),
        [ids for _, ids in sent],
        np.zeros(len(sent), np.bool_),
    )


def launch_drafts(state: State, lane: Lane, drafts: Drafts | None) -> tuple[Choice, ...]:
    """The step leaves: each drafter learns what its choice has in flight. `lane` holds every row that samples; those
    with a drafter are returned, for `land_drafts`."""
    rows = state.slots.drafting[lane.slots].nonzero()[0]
    carried = {} if drafts is None else dict(zip(drafts.rows.tolist(), drafts.ids, strict=True))
    drafting = []
    for row in rows.tolist():
        choice = lane.choices[row]
        assert choice.drafter is not None
        choice.drafter.flying.append(carried.get(row, ()))
        drafting.append(choice)
    return tuple(drafting)


def settle_drafts(state: State, flight: Flight, drafts: Drafts, counts: Counts, kept: Ints) -> None:
    """Rejected positions were never taken: correct what the plan had to suppose. # counts: entries that count, [rows]

    `kept` are the rows whose choice is still where the step met it.
    """
    slots = state.slots
    surplus = drafts.sizes(len(counts)) - counts
    rows = kept[surplus[kept] > 0]
    places = flight.lane.slots[rows]
    slots.planned[places] -= surplus[rows]
    again = places[~slots.ready[places] & (slots.planned[places] + 1 < slots.limit[places])]
    for slot in again.tolist():
        slots.set_ready(slot, True)  # the limit was nearer than it had to be


def count_drafts(
    state: State,
    flight: Flight,
    drafts: Drafts,
    kept: Flags,
    taken: Counts,
    given: Counts,
    notes: dict[int, Note],
) -> None:
    """Book what became of the drafts of choices that had not ended before, and note it where a stop string may end the
    choice elsewhere. # [rows]: whether a row's choice had not ended, its tokens that were not rejected, and those of
    them that count"""
    totals = state.totals
    for row, drafted in zip(drafts.rows.tolist(), drafts.counts.tolist(), strict=True):
        if not kept[row]:
            continue
        choice = flight.lane.choices[row]
        accepted = min(int(taken[row]) - 1, int(given[row]))  # the last token that was not rejected is no draft
        before = choice.drafted or (0, 0)
        choice.drafted = before[0] + accepted, before[1] + drafted - accepted
        if choice.request.message.stop_strings:
            notes.setdefault(row, Note()).drafted = choice.drafted
        totals.count_drafts(drafted, accepted)


def land_drafts(state: State, flight: Flight, result: StepResult) -> None:
    """The step's result is being applied: what it had in flight is known now, and how long it took, and how long the
    drafting behind the step before."""
    if not flight.chunks and result.busy > 0.0:
        rows = len(flight.lane.slots)
        state.cost.tell(rows, rows + (0 if flight.drafts is None else flight.drafts.total), result.busy)
    if flight.made is not None and flight.made.turns and result.drafting > 0.0:
        state.guesses.cost.tell(flight.made.rows, flight.made.turns, result.drafting)
    for choice in flight.drafting:
        assert choice.drafter is not None
        choice.drafter.flying.popleft()


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


NOTHING_ASKED = Asked()


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


def tell_guesses(state: State, flight: Flight, drafts: Drafts, kept: Flags, counts: Counts) -> None:
    """What became of the step's own drafts, of rows whose choice is still where the step met it.
    # kept, counts (entries that count): [rows]"""
    mine = drafts.own & kept[drafts.rows]
    if mine.any():
        rows = drafts.rows[mine]
        state.guesses.tell(flight.lane.slots[rows], drafts.counts[mine], counts[rows].astype(np.int64) - 1)


def look_ahead(drafter: Drafter, guide: Guide, looks: Looks) -> None:
    """Tell a drafter what its choice's grammar expects, if it will look at that."""
    drafter.forced = guide.forced() if drafter.awake else []
    drafter.likely = guide.likely(drafter.forced) if drafter.awake and looks.pays(drafter.gain) else []


def stretch(state: State) -> float:
    """How many times as long as its time on the last stage, which is measured, a step takes until that stage drafts
    behind the next one: 1 where every stage has a micro-batch to run, as many as there are stages for a single one."""
    return state.options.stages / max(1, sum([size > 0 for size in state.slots.sizes]))
