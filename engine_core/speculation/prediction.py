"""A prediction that came with the request: the output is expected to repeat most of it.

The prediction is followed token by token. Where the output departs from it, the place to go on from is found again by
the output's last tokens: first behind the place where it was left, because edits replace and delete, then before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

LONGEST = 8  # tokens of the output that are looked for
SHORTEST = 2  # fewer say too little about the place


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
