"""Deficit round robin in tokens: whose turn it is among those that share the engine.

Source: Shreedhar and Varghese, "Efficient Fair Queuing using Deficit Round Robin", SIGCOMM 1995; counted in tokens, as
in Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

A turn is worth QUANTUM tokens. A share is served while its balance is positive and pays afterwards, because what a
sequence costs is known only when it has ended; one in debt sits out as many rounds as it takes to pay. Rounds have
numbers, so a share that sits out is not visited, and time spent without anything waiting pays a debt, too.

Between two shares that both wait, service differs by at most the most expensive sequence and three quanta. Newcomers
join the next round, so a share that waits is passed only by what stood before it: endless newcomers starve nobody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeVar

QUANTUM = 64  # tokens: a short turn costs nothing, and what is cheap waits for less
MOST = 2 * QUANTUM  # that refunds leave of a turn

Place = tuple[int, int]  # round, then the order of coming into it


class Share:
    """One of those that take turns."""

    __slots__ = ("balance", "place", "waits")

    def __init__(self) -> None:
        self.balance = 0  # tokens left of its turn, positive while it waits
        self.place: Place = (0, 0)
        self.waits = False


S = TypeVar("S", bound=Share)


class Ring(Generic[S]):
    """Owner of the places and balances of shares."""

    def __init__(self) -> None:
        self._turns: list[tuple[int, int, S]] = []
        self._round = 0  # in which a share was last served in its turn
        self._orders = 0

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, share: S) -> None:
        """It has something waiting now."""
        assert not share.waits
        round_ = share.place[0]
        if round_ <= self._round:
            round_, share.balance = self._round + 1, QUANTUM
        self._insert(share, round_)

    def leave(self, share: S) -> None:
        """Nothing of it waits any more. A debt is kept."""
        del self._turns[bisect_left(self._turns, share.place)]
        share.waits = False

    def next(self, place: Place) -> S | None:
        """The first share at this place or behind it."""
        index = bisect_left(self._turns, place)
        return self._turns[index][2] if index < len(self._turns) else None

    def serve(self, share: S, tokens: int) -> None:
        """Something of it, expected to cost so many tokens, is admitted."""
        if self._turns and self._turns[0][2] is share:
            self._round = max(self._round, share.place[0])
        self.charge(share, tokens)

    def charge(self, share: S, tokens: int) -> None:
        """It has cost so many tokens more than was thought, or fewer if negative. A refund buys no place before those
        that wait in the next round already."""
        share.balance -= tokens
        rounds = (QUANTUM - share.balance) // QUANTUM  # until the balance is positive again
        if not rounds:
            return
        before = share.place[0]
        share.balance += rounds * QUANTUM
        after, least = before + rounds, min(before, self._round + 1)
        if after < least:
            after, share.balance = least, min(share.balance + (least - after) * QUANTUM, MOST)
        if after == before:
            return
        if share.waits:
            self.leave(share)
            self._insert(share, after)
        else:
            share.place = (after, 0)

    def _insert(self, share: S, round_: int) -> None:
        self._orders += 1
        share.place, share.waits = (round_, self._orders), True
        insort(self._turns, (round_, self._orders, share))
