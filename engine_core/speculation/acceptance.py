"""How often predicted tokens are accepted, learned from every token, whether or not it was sent as a draft.

A proposer is on track or off it: a copy that was right so far mostly stays right, a new one is uncertain. So there are
four chances: of the first token of a new proposal, of the next token after one that was right, of a token that the
grammar forces, and of a likely one, which is forced but for whitespace. The chance of a whole draft is their product.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

WEIGHT = 2.0  # trials that a prior counts for
OWN = 15 / 16  # weight that one trial leaves to a sequence's earlier ones
ALL = 255 / 256  # the same over all sequences
HOPED = 2.0  # tokens of a run, before any is known


class Mean:
    """A running mean of trials over all sequences, or of one sequence: that begins at the one of all, and tells it."""

    __slots__ = ("_keep", "_of_all", "_prior", "_sum", "_trials", "value")

    def __init__(self, prior: Mean | float) -> None:
        self._of_all = prior if isinstance(prior, Mean) else None
        self._keep = OWN if isinstance(prior, Mean) else ALL
        self._sum = self._trials = 0.0
        self.value: float = prior.value if isinstance(prior, Mean) else prior
        self._prior = self.value

    def observe(self, trial: float) -> None:
        self._sum = self._sum * self._keep + trial
        self._trials = self._trials * self._keep + 1.0
        if self._of_all is not None:
            self._of_all.observe(trial)
            self._prior = self._of_all.value
        self.value = (self._sum + WEIGHT * self._prior) / (self._trials + WEIGHT)


class Acceptance:
    """The chances of one sequence, or of all. `gain`: how many tokens of a likely run are accepted."""

    __slots__ = ("first", "forced", "gain", "likely", "next")
    first: Mean
    next: Mean
    forced: Mean
    likely: Mean
    gain: Mean

    def __init__(self, of_all: Acceptance | None = None) -> None:
        self.first = Mean(0.5 if of_all is None else of_all.first)
        self.next = Mean(0.5 if of_all is None else of_all.next)
        self.forced = Mean(1.0) if of_all is None else of_all.forced  # a matter of the model, not of the text
        self.likely = Mean(0.5 if of_all is None else of_all.likely)
        self.gain = Mean(HOPED if of_all is None else of_all.gain)

    def proposed(self, *, on_track: bool) -> Mean:
        """Of a token that is proposed now."""
        return self.next if on_track else self.first

    def likelier(self, *, on_track: bool) -> bool:
        """Whether a likely token is accepted more often than one that is proposed now."""
        return self.likely.value >= self.proposed(on_track=on_track).value

    def chances(self, forced: int, likely: int, first: int, end: int, *, on_track: bool) -> list[float]:
        """The chance that a path is accepted up to each of first .. end-1. It has `forced` forced tokens, then `likely`
        likely ones, then proposed ones."""
        each = [self.forced.value] * forced + [self.likely.value] * likely
        if end > len(each):
            each.append(self.proposed(on_track=on_track).value)
            each += [self.next.value] * (end - len(each))
        return list(accumulate(each[:end], mul))[first:]
