"""What one choice is expected to say, and which of it the next step might verify.

Steps in flight are part of the expectation: when a plan is made, the tokens of the step before are not known yet. The
path is predicted from the last known token; each step in flight is taken to move along it by the drafts in which the
two agree and by one token more, and the next drafts are what the path says after that. A wrong guess is rejected on the
device and costs its positions alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine_core.speculation.acceptance import Acceptance
from penstock.engine_core.speculation.jump_forward import Gain

LONGEST_REST = 16  # plans
LONGEST = 8  # tokens of the output that are looked for
SHORTEST = 2  # fewer say too little about the place


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a row may carry, with the chance that the draft is accepted up to each of them."""

    tokens: list[int]
    chances: list[float]


class Drafter:
    """Owner of one choice's expectation. The scheduler sets `forced`, `likely` and `flying`, when they change."""

    def __init__(
        self, proposers: tuple[Proposer, ...], ending: frozenset[int], acceptance: Acceptance, gain: Gain
    ) -> None:
        self.forced: list[int] = []  # what must follow the known tokens
        self.likely: list[int] = []  # what mostly follows those
        self.in_flight: deque[Sequence[int]] = deque()  # drafts of each step in flight that samples for the choice
        self.gain = gain  # of likely runs
        self._brought = 0  # tokens, by the likely run that the output is in
        self._proposers = proposers
        self._ending = ending
        self._acceptance = acceptance
        self._path: list[int] = []  # as of the last look
        self._path_forced = self._path_likely = 0  # how many of it were forced, how many likely behind these
        self._seen = -1  # tokens at the last look
        self._on_track = False  # the last guess came true
        self._rest = self._pause = 0

    @property
    def is_due(self) -> bool:
        """Whether the next `draft` will look at what is expected; if not, nobody need say what is forced."""
        return self._pause == 0

    def draft(self, tokens: array[int], free: int, most: int) -> Draft | None:
        """A draft for the next step: at most `most` tokens, of which at most `free` are neither forced nor likely."""
        if self._pause:
            self._pause -= 1
            return None
        if not (self.forced or self.likely or self._proposers):
            return None  # what came is compared with the last expectation at the next look
        self._learn(tokens)
        flying = sum([len(drafts) + 1 for drafts in self.in_flight])
        path = self._predict(tokens, max(0, flying - len(self.forced)) + free if free else 0)
        if not path:
            return None
        forced, likely, place = self._path_forced, self._path_likely, 0
        for drafts in self.in_flight:
            place += (agreement(drafts, path, place) if drafts else 0) + 1
        end = min(max(place, forced + likely) + free, place + most, len(path))
        if end <= place:
            return None
        chances = self._acceptance.chances(forced, likely, place, end, on_track=self._on_track)
        return Draft(path[place:end], chances)

    def sent(self, count: int) -> None:
        """So many tokens of the last draft are sent. While none are worth it, it is looked at less and less often."""
        self._rest = 0 if count else min(2 * self._rest + 1, LONGEST_REST)
        self._pause = self._rest

    def _learn(self, tokens: array[int]) -> None:
        """Compare what came with what was expected."""
        new = tokens[self._seen :] if self._seen >= 0 else ()
        self._seen = len(tokens)
        likely_end = self._path_forced + self._path_likely
        for place, token in enumerate(new):
            if place >= len(self._path):
                self._on_track = False
                return
            hit = token == self._path[place]
            if place < self._path_forced:
                self._acceptance.observe_forced(hit)
            elif place < likely_end:
                self._acceptance.observe_likely(hit)
                self._brought += hit
                if not hit or place == likely_end - 1:
                    self.gain.observe(self._brought)
                    self._brought = 0
            else:
                self._acceptance.observe(hit, on_track=self._on_track)
                self._on_track = hit
            if not hit:
                return

    def _predict(self, tokens: array[int], most: int) -> list[int]:
        """The forced run, then the likely one and at most `most` tokens of the first proposal, or the proposal alone
        where such come true more often; nothing from an end on."""
        proposers = self._proposers if most else ()
        known = self.forced
        if self.likely and (not proposers or self._acceptance.likelier(on_track=self._on_track)):
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
    """How many leading drafts are what the path says from `start` on."""
    count = 0
    for draft, token in zip(drafts, path[start : start + len(drafts)], strict=False):
        if draft != token:
            break
        count += 1
    return count


class Proposer(Protocol):
    """One way to guess, for one choice; it may keep what it has learned of it."""

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        """At most `most` token ids that may follow `tokens` and then `ahead`; fewer, or none, where nothing is known.

        `tokens` are the choice's, prompt and output: from call to call they grow at their end and nothing else changes.
        """
        ...


class Prediction:
    """Owner of the place in one choice's prediction. `start`: where the output begins among the choice's tokens."""

    def __init__(self, predicted: bytes, start: int) -> None:
        self._bytes = predicted  # int32 [tokens]
        self._tokens = array("i", predicted)
        self._start = self._seen = start
        self._place = 0  # of the token that is expected next
        self._lost = False

    def propose(self, tokens: array[int], ahead: Sequence[int], most: int) -> list[int]:
        """What the prediction says after the place where `tokens` and `ahead` stand in it."""
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
        """The place after one more token of the output, which stays where the prediction was left."""
        if not lost and place < len(self._tokens) and self._tokens[place] == token:
            return place + 1, False
        return place, True

    def _find(self, tail: array[int]) -> tuple[int, bool]:
        """The place behind the longest end of `tail` that the prediction holds, and whether there is none."""
        for length in range(len(tail), SHORTEST - 1, -1):
            wanted = tail[len(tail) - length :].tobytes()
            for low, high in ((self._place, len(self._tokens)), (0, self._place)):
                found = aligned(self._bytes, wanted, max(0, low - length + 1) * 4, high * 4)
                if found >= 0:
                    return found // 4 + length, False
        return self._place, True


def aligned(data: bytes, wanted: bytes, low: int, high: int) -> int:
    """Where `wanted` stands between two places of an int32 array, -1 if nowhere. All in bytes."""
    found = data.find(wanted, low, high)
    while found >= 0 and found % 4:
        found = data.find(wanted, found + 1, high)
    return found
