"""Which decoding rows carry drafts in the next step, and what became of those of the last one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_core.scheduling.request import Choice, Request
from engine_core.scheduling.slots import Ints, Lane
from engine_core.scheduling.state import Drafts, Flight, State
from engine_core.speculation.drafter import Drafter
from engine_core.speculation.lookup import PromptLookup
from engine_core.speculation.options import SpeculationOptions
from engine_core.speculation.prediction import Prediction
from engine_core.speculation.proposer import Proposer

Counts = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


def equip(choice: Choice, options: SpeculationOptions) -> None:
    """Give a new choice its copy of the request's guide, and a drafter if anything may be proposed for it."""
    request = choice.request
    if request.guide is not None:
        choice.guide = request.guide.copy()
    found = proposers(request, options) if request.message.speculate else ()
    if choice.guide is not None or found:
        choice.drafter = Drafter(found, request.ending)
    if choice.guide is not None and choice.drafter is not None:
        choice.drafter.forced = choice.guide.forced()


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
    left = min(budget, options.max_step_drafts)
    found: list[tuple[int, list[int]]] = []
    for row, most in zip(rows.tolist(), room.tolist(), strict=True):
        choice = lane.choices[row]
        if left <= 0 or most <= 0 or choice.drafter is None:
            continue
        drafts = choice.drafter.draft(choice.tokens, options.num_speculative_tokens, min(most, left))
        if drafts:
            found.append((row, drafts))
            left -= len(drafts)
    if not found:
        return None
    return Drafts(
        np.array([row for row, _ in found]),
        np.array([len(drafts) for _, drafts in found]),
        [drafts for _, drafts in found],
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


def count_drafts(state: State, flight: Flight, drafts: Drafts, kept: Flags, taken: Counts, given: Counts) -> None:
    """Book what became of the drafts of choices that had not ended before. # [rows]: whether a row's choice had not
    ended, its tokens that were not rejected, and those of them that count"""
    totals = state.totals
    for row, drafted in zip(drafts.rows.tolist(), drafts.counts.tolist(), strict=True):
        if not kept[row]:
            continue
        choice = flight.lane.choices[row]
        accepted = min(int(taken[row]) - 1, int(given[row]))  # the last token that was not rejected is no draft
        choice.accepted += accepted
        choice.rejected += drafted - accepted
        totals.count_drafts(drafted, accepted)


def land_drafts(flight: Flight) -> None:
    """The step's result is being applied: what it had in flight is known now."""
    for choice in flight.drafting:
        assert choice.drafter is not None
        choice.drafter.flying.popleft()
