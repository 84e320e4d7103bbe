"""Which choices end with a step's tokens, and how.

Guides take their rows' tokens ahead of everything else that a result means: masks of the next step wait for them, and
are made while the rest is done.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.scheduling.guessing import fill_told
from penstock.engine_core.scheduling.request import Choice, Request
from penstock.engine_core.scheduling.state import Flight, Judged, State
from penstock.engine_core.scheduling.stops import NON_FINITE, verdict
from penstock.engine_core.speculation.drafter import Drafter
from penstock.engine_core.speculation.looks import Looks
from penstock.protocol.errors import EngineFailure, GrammarFailure
from penstock.protocol.messages import Finish
from penstock.protocol.steps import REJECTED, StepResult

NOT_FINITE = "the model produced non-finite logits for this request"
BROKEN_OFF = "the output ended inside its structure"


def follow(state: State, result: StepResult) -> None:
    """Have the guides of the oldest step in flight take its tokens, and note whom that ends for `apply`."""
    if result.epoch != state.epoch:
        return
    flight = state.flights[0]
    assert flight.step == result.step, "results come in the order of the plans"
    state.followed, state.judged = flight.step, {}
    if flight.told:
        fill_told(flight, result)
    if not flight.guided:
        return
    state.looks.meet(len(flight.lane.slots), state.cost)
    entries: list[int] = np.frombuffer(result.token_ids, np.int32).tolist()
    for guided in flight.guided:
        choice, entry = guided.choice, guided.entry
        if choice.ended:
            continue
        tokens = entries[entry : entry + len(guided.drafts) + 1]
        if guided.drafts:
            tokens = [token for token in tokens if token != REJECTED]
        found = judge(choice, len(choice.tokens), tokens)
        if found is not None:
            state.judged[guided.row] = found
        elif choice.drafter is not None and choice.guide is not None:
            look_ahead(choice.drafter, choice.guide, state.looks)


def look_ahead(drafter: Drafter, guide: Guide, looks: Looks) -> None:
    """Tell a drafter what its choice's grammar expects, if it will look at that."""
    drafter.forced = guide.forced() if drafter.awake else []
    drafter.likely = guide.likely(drafter.forced) if drafter.awake and looks.pays(drafter.gain) else []


def judge_rows(
    flight: Flight, rows: list[int], tokens: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
) -> dict[int, Judged]:
    """Which of these rows' choices end with the tokens that were appended to them, and how.

    tokens: of all rows. counts: how many of them are each row's. # [tokens], [rows]
    """
    judged: dict[int, Judged] = {}
    if not rows:
        return judged
    values: list[int] = tokens.tolist()
    ends: list[int] = np.cumsum(counts).tolist()
    sizes: list[int] = counts.tolist()
    for row in rows:
        choice, size = flight.lane.choices[row], sizes[row]
        found = judge(choice, len(choice.tokens) - size, values[ends[row] - size : ends[row]])
        if found is not None:
            judged[row] = found
    return judged


def judge(choice: Choice, before: int, tokens: list[int]) -> Judged | None:
    """Whether the choice, of so many tokens before, ends with one of these, and how; None if it goes on. Its guide
    takes them as long as it does. Token by token, so that how many came at once makes no difference."""
    request, guide = choice.request, choice.guide
    for count, token in enumerate(tokens, 1):
        if token == NON_FINITE:
            return Judged(choice, count - 1, Finish.ERROR, error=NOT_FINITE)
        if guide is not None and guide.failed:  # whatever was said under its last mask
            return Judged(choice, count - 1, Finish.GRAMMAR, error=guide.failure)
        finish = verdict(request, token, before + count)
        if finish != Finish.NONE:
            named = finish == Finish.STOP and token in request.message.sampling.stop_token_ids
            if guide is not None and finish == Finish.STOP and not (named or guide.may_end()):
                return Judged(choice, count - 1, Finish.GRAMMAR, error=BROKEN_OFF)
            return Judged(choice, count, finish, token if named else None)
        if guide is None:
            continue
        try:
            guide.advance([token])
        except GrammarFailure as error:  # guard: design 7, one request's automaton
            return Judged(choice, count - 1, Finish.GRAMMAR, error=error.message)
        except EngineFailure as error:  # guard: the same
            return Judged(choice, count - 1, Finish.ERROR, error=error.message)
        if guide.ended or (guide.finished and not can_end(request, before + count)):
            return Judged(choice, count, Finish.STOP)
    return None


def can_end(request: Request, length: int) -> bool:
    """Whether a choice of so many tokens, whose structure is complete, ends by an end-of-sequence token: for some
    requests that ends nothing, and min_tokens may keep it away."""
    sampling = request.message.sampling
    early = length - request.prompt_tokens < sampling.min_tokens
    return not early and not request.ending.isdisjoint(sampling.eos_token_ids)
