"""How often predicted tokens are accepted, learned from every token, whether or not it was sent as a draft.

A proposer is on track or off it: a copy that was right so far mostly stays right, a new one is uncertain. So there are
four chances: of the first token of a new proposal, of the next token after one that was right, of a token that the
grammar forces, and of a likely one, which is forced but for whitespace. The chance of a whole draft is their product.
"""

from __future__ import annotations

import msgspec

WEIGHT = 2.0  # trials that a prior counts for
OWN = 15 / 16  # weight that one trial leaves to a sequence's earlier ones
ALL = 255 / 256  # the same over all sequences


class Odds:
    """One chance: a running mean of trials, which begins at a prior."""

    __slots__ = ("_hits", "_keep", "_prior", "_trials")

    def __init__(self, prior: float, keep: float = OWN) -> None:
        self._prior, self._keep = prior, keep
        self._hits = self._trials = 0.0

    @property
    def chance(self) -> float:
        return (self._hits + WEIGHT * self._prior) / (self._trials + WEIGHT)

    def observe(self, hit: bool) -> None:
        self._hits = self._hits * self._keep + hit
        self._trials = self._trials * self._keep + 1.0


class AcceptanceStatistics(msgspec.Struct, frozen=True):
    """Chances over all sequences, as of now."""

    first: float
    next: float
    forced: float
    likely: float


class Acceptance:
    """The chances of one sequence, or of all: those are the prior of a new sequence."""

    __slots__ = ("_all", "first", "forced", "likely", "next")

    def __init__(self, of_all: Acceptance | None = None) -> None:
        self._all = of_all
        if of_all is None:
            self.first, self.next = Odds(0.5, ALL), Odds(0.5, ALL)
            self.forced, self.likely = Odds(1.0, ALL), Odds(0.5, ALL)
        else:
            self.first, self.next = Odds(of_all.first.chance), Odds(of_all.next.chance)
            self.likely = Odds(of_all.likely.chance)
            self.forced = of_all.forced  # a matter of the model and its tokens, not of the text

    def observe(self, hit: bool, *, on_track: bool) -> None:
        """A token came where one was proposed."""
        (self.next if on_track else self.first).observe(hit)
        if self._all is not None:
            self._all.observe(hit, on_track=on_track)

    def observe_forced(self, hit: bool) -> None:
        self.forced.observe(hit)

    def observe_likely(self, hit: bool) -> None:
        self.likely.observe(hit)
        if self._all is not None:
            self._all.observe_likely(hit)

    def likelier(self, *, on_track: bool) -> bool:
        """Whether a likely token is accepted more often than one that is proposed now."""
        return self.likely.chance >= (self.next if on_track else self.first).chance

    def chances(self, forced: int, likely: int, first: int, end: int, *, on_track: bool) -> list[float]:
        """The chance that a path is accepted up to each of first .. end-1. It has `forced` forced tokens, then `likely`
        likely ones, then proposed ones."""
        known = forced + likely
        before = min(first, forced)
        chance = self.forced.chance**before * self.likely.chance ** (min(first, known) - before)
        found = []
        for place in range(first, end):
            if place < forced:
                chance *= self.forced.chance
            elif place < known:
                chance *= self.likely.chance
            elif place in (first, known):
                start = self.next.chance if on_track else self.first.chance
                following = self.next.chance
                chance *= start * following ** (place - known)
            else:
                chance *= following
            found.append(chance)
        return found

    def statistics(self) -> AcceptanceStatistics:
        return AcceptanceStatistics(self.first.chance, self.next.chance, self.forced.chance, self.likely.chance)
