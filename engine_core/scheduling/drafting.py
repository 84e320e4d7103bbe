"""Which decoding rows carry drafts in the next step, and what became of those of the last one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.judging import look_ahead
from penstock.engine_core.scheduling.outbox import Note
from penstock.engine_core.scheduling.request import Choice, Request
from penstock.engine_core.scheduling.slots import Ints, Lane
from penstock.engine_core.scheduling.state import Drafts, Flight, State
from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.drafter import Draft, Drafter
from penstock.engine_core.speculation.lengths import draft_lengths
from penstock.engine_core.speculation.looks import Gain
from penstock.engine_core.speculation.lookup import PromptLookup
from penstock.engine_core.speculation.options import SpeculationOptions
from penstock.engine_core.speculation.prediction import Prediction
from penstock.engine_core.speculation.proposer import Proposer
from penstock.protocol.errors import EngineFailure, GrammarFailure

Counts = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


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
        choice.accepted += accepted
        choice.rejected += drafted - accepted
        if choice.request.message.stop_strings:
            notes.setdefault(row, Note()).drafted = choice.drafted
        totals.count_drafts(drafted, accepted)


def land_drafts(state: State, flight: Flight, seconds: float) -> None:
    """The step's result is being applied: what it had in flight is known now, and how long it took."""
    if (flight.drafting or state.guesses.most) and not flight.chunks and seconds > 0.0:
        rows = len(flight.lane.slots)
        state.cost.tell(rows, rows + (0 if flight.drafts is None else flight.drafts.total), seconds)
    for choice in flight.drafting:
        assert choice.drafter is not None
        choice.drafter.flying.popleft()
