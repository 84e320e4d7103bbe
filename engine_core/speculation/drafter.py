"""What one choice is expected to say, and which of it the next step should verify.

Steps in flight are part of the expectation: when a plan is made, the tokens of the step before are not known yet. The
path is predicted from the last known token; each step in flight is taken to move along it by the drafts in which the
two agree and by one token more, and the next drafts are what the path says after that. A wrong guess is rejected on the
device and costs its positions alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from engine_core.speculation.proposer import Proposer


class Drafter:
    """Owner of one choice's expectation. The scheduler sets `forced` and `flying`: it knows when they change."""

    def __init__(self, proposers: tuple[Proposer, ...], ending: frozenset[int]) -> None:
        self.forced: list[int] = []  # what must follow the known tokens
        self.flying: deque[Sequence[int]] = deque()  # drafts of each step in flight that samples for the choice
        self._proposers = proposers
        self._ending = ending

    def draft(self, tokens: array[int], free: int, most: int) -> list[int]:
        """Drafts for the next step: at most `most`, of which at most `free` are not forced."""
        drafted = sum(map(len, self.flying)) + len(self.flying)
        path = self._path(tokens, max(drafted, len(self.forced)) + free - len(self.forced) if free else 0)
        place = 0
        for drafts in self.flying:
            place += agreement(drafts, path, place) + 1
        return path[place : max(place, len(self.forced)) + free][:most]

    def _path(self, tokens: array[int], most: int) -> list[int]:
        """The forced run, then at most `most` tokens of the first proposal; nothing from an end on."""
        path = list(self.forced)
        for proposer in self._proposers if most else ():
            if more := proposer.propose(tokens, path, most):
                path += more
                break
        for place, token in enumerate(path):
            if token in self._ending:
                return path[:place]
        return path


def agreement(drafts: Sequence[int], path: Sequence[int], start: int) -> int:
    """How many leading drafts are what the path says from `start` on."""
    for count, (draft, token) in enumerate(zip(drafts, path[start : start + len(drafts)], strict=False)):
        if draft != token:
            return count
    return max(0, min(len(drafts), len(path) - start))
