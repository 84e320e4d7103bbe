"""Requests that may be what executors die of: each is run alone, and ends if it kills again.

Whoever had a row in a step that was never answered may have killed the executor, and most did not. A choice that was
there SUSPICIOUS times without getting further in between is tried: it runs alone until it has got further, or until the
executor dies once more. Then its request ends, and the like of it is refused for a while.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine_core.scheduling.condemned import signature
from penstock.engine_core.scheduling.lifecycle import cancel, preempt
from penstock.engine_core.scheduling.request import Choice
from penstock.engine_core.scheduling.state import State
from penstock.protocol.messages import Finish

SUSPICIOUS = 2  # deaths without progress before a choice is tried
AHEAD = 2  # tokens that were in flight at a death: as many more, and the choice has got past what killed
KILLER = f"the engine's executor died {SUSPICIOUS + 1} times while it ran this request, the last time with nothing else"


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
