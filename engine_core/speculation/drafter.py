"""The predicted continuation of one sequence, and which part of it the next step might verify.

When a plan is made, the tokens of the steps in flight are not known yet. So a path is predicted from the last known
token. Each step in flight is assumed to move along it by the drafts that agree with it and by one token more; the next
drafts are what follows on the path. A wrong draft is rejected on the device and costs its positions alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine_core.speculation.acceptance import Acceptance

LONGEST_BACK_OFF = 16  # tokens
LONGEST = 8  # tokens of the output that are searched for in the prediction
SHORTEST = 2  # fewer occur in too many places


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a row may carry, with the chance that the draft is accepted up to each of them."""

    tokens: list[int]
    chances: list[float]


class Drafter:
    """Owner of one sequence's predicted path. The scheduler sets `forced` and `likely` as they change, and `in_flight`
    before each `draft`."""

    def __init__(self, proposers: tuple[Proposer, ...], ending: frozenset[int], acceptance: Acceptance) -> None:
        self.forced: list[int] = []  # the tokens that the grammar forces next
        self.likely: list[int] = []  # the tokens that mostly follow those
        self.in_flight: list[Sequence[int]] = []  # drafts of each step in flight that samples for it
        self.acceptance = acceptance
        self._came = 0  # tokens of the likely run that the output is in
        self._coming = 0  # of those, what steps in flight brought anyway when it was first seen
        self._proposers = proposers
        self._ending = ending
        self._path: list[int] = []  # as of the last draft
        self._path_forced = self._path_likely = 0  # how many of its tokens are forced, and how many likely
        self._seen = -1  # tokens at the last draft
        self._on_track = False  # the last proposed token was right
        self._back_off = 0  # tokens without a draft, behind the next useless one
        self._resume = 0  # tokens of the sequence from which on it may have drafts

    def is_due(self, length: int) -> bool:
        """Whether a `draft` behind so many tokens of the sequence will use `forced` and `likely`."""
        return length >= self._resume

    @property
    def is_idle(self) -> bool:
        """Whether `draft` would find nothing and change nothing."""
        return not (self.forced or self.likely or self._proposers)

    def draft(self, tokens: array[int], free: int, most: int) -> Draft | None:
        """A draft for the next step: at most `most` tokens, of which at most `free` are neither forced nor likely."""
        if self.is_idle or not self.is_due(len(tokens)):
            return None  # tokens are compared with the path at the next draft
        self._learn(tokens)
        flying = sum([len(drafts) + 1 for drafts in self.in_flight])
        path = self._predict(tokens, max(0, flying - len(self.forced)) + free if free else 0)
        if not path:
            return None
        forced, likely, place = self._path_forced, self._path_likely, 0
        for drafts in self.in_flight:
            place += (agreement(drafts, path, place) if drafts else 0) + 1
        if not self._came:
            self._coming = place - forced
        end = min(max(place, forced + likely) + free, place + most, len(path))
        if end <= place:
            return None
        chances = self.acceptance.chances(forced, likely, place, end, on_track=self._on_track)
        return Draft(path[place:end], chances)

    def sent(self, count: int) -> None:
        """`count` tokens of the last draft are sent. While none are worth it, drafts are made less and less often."""
        self._back_off = 0 if count else min(2 * self._back_off + 1, LONGEST_BACK_OFF)
        self._resume = self._seen + 1 + self._back_off if self._back_off else 0

    def _learn(self, tokens: array[int]) -> None:
        """Compare the tokens that came with the path."""
        new = tokens[self._seen :] if self._seen >= 0 else ()
        self._seen = len(tokens)
        likely_end = self._path_forced + self._path_likely
        for place, token in enumerate(new):
            if place >= len(self._path):
                self._on_track = False
                return
            hit = token == self._path[place]
            if place < self._path_forced:
                self.acceptance.forced.observe(hit)
            elif place < likely_end:
                self.acceptance.likely.observe(hit)
                self._came += hit
                if not hit or place == likely_end - 1:
                    self.acceptance.gain.observe(max(0, self._came - max(0, self._coming)))
                    self._came = 0
            else:
                self.acceptance.proposed(on_track=self._on_track).observe(hit)
                self._on_track = hit
            if not hit:
                return

    def _predict(self, tokens: array[int], most: int) -> list[int]:
        """The forced tokens, then the likely ones and at most `most` tokens of the first proposal; the proposal alone
        where proposals are accepted more often. The path stops before a token that nothing is drafted behind."""
        proposers = self._proposers if most else ()
        known = self.forced
        if self.likely and (not proposers or self.acceptance.likelier(on_track=self._on_track)):
            known = self.forced + self.likely
        path = known
        for proposer in proposers:
            if more := proposer.propose(tokens, known, most):
                path = known + more if known else more
                break
        if path is self.forced and self.likely:
            path = known = self.forced + self.likely
        if not self._ending.isdisjoint(path):
            path = path[: next(place for place, token in enumerate(path) if token in self._ending)]
        self._path, self._path_forced = path, min(len(self.forced), len(path))
        self._path_likely = min(len(known), len(path)) - self._path_forced
        return path


def agreement(drafts: Sequence[int], path: Sequence[int], start: int) -> int:
    """How many leading drafts are on the path from `start` on."""
    count = 0
    for draft, token in zip(drafts, path[start : start + len(drafts)], strict=False):
        if draft != token:
            break
        count += 1
    return count


class Proposer(Protocol):
    """One way to propose tokens for one sequence. It may keep state of that sequence."""

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        """At most `most` token ids that may follow `tokens` and then `ahead`; fewer, or none, where nothing is known.

        `tokens` are the prompt and the output: from call to call they only grow.
        """
        ...


class Prediction:
    """Owner of the place in one sequence's prediction. `start`: where the output begins among its tokens."""

    def __init__(self, predicted: bytes, start: int) -> None:
        self._bytes = predicted  # int32 [tokens]
        self._tokens = array("i", predicted)
        self._start = self._seen = start
        self._place = 0  # of the token that is expected next
        self._lost = False

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        """What follows `tokens` and `ahead` in the prediction."""
        for token in tokens[self._seen :]:
            self._place, self._lost = self._step(self._place, self._lost, token)
        self._seen = len(tokens)
        tail = tokens[max(self._start, len(tokens) - LONGEST) :]
        if self._lost:
            self._place, self._lost = self._find(tail)
        place, lost = self._place, self._lost
        for token in ahead:
            place, lost = self._step(place, lost, token)
        if lost and ahead:
            place, lost = self._find((tail + array("i", ahead))[-LONGEST:])
        return [] if lost else self._tokens[place : place + most].tolist()

    def _step(self, place: int, lost: bool, token: int) -> tuple[int, bool]:
        """The place after one more token of the output; it stays where the output left the prediction."""
        if not lost and place < len(self._tokens) and self._tokens[place] == token:
            return place + 1, False
        return place, True

    def _find(self, tail: array[int]) -> tuple[int, bool]:
        """The place behind the longest end of `tail` that occurs in the prediction, and whether none does."""
        for length in range(len(tail), SHORTEST - 1, -1):
            wanted = tail[len(tail) - length :].tobytes()
            for low, high in ((self._place, len(self._tokens)), (0, self._place)):
                found = aligned(self._bytes, wanted, max(0, low - length + 1) * 4, high * 4)
                if found >= 0:
                    return found // 4 + length, False
        return self._place, True


def aligned(data: bytes, wanted: bytes, low: int, high: int) -> int:
    """Where `wanted` is between two places of an int32 array, -1 if nowhere. All in bytes."""
    found = data.find(wanted, low, high)
    while found >= 0 and found % 4:
        found = data.find(wanted, found + 1, high)
    return found
