"""The waiting choices in the order in which they may be admitted."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from engine_core.scheduling.request import Choice, Rank


class Queue:
    """Sorted by rank. A preempted choice is older than whatever waits behind it, so its rank puts it at the head."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._choices: list[Choice] = []
        self.tokens = 0  # of the prompts of those that wait

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    def put(self, choice: Choice) -> None:
        index = bisect.bisect_left(self._ranks, choice.rank)
        self._ranks.insert(index, choice.rank)
        self._choices.insert(index, choice)
        self.tokens += choice.request.prompt_tokens

    def remove(self, choice: Choice) -> None:
        index = bisect.bisect_left(self._ranks, choice.rank)
        assert self._choices[index] is choice
        self.remove_at(index)

    def remove_at(self, index: int) -> None:
        del self._ranks[index]
        self.tokens -= self._choices.pop(index).request.prompt_tokens

    def at(self, index: int) -> Choice:
        return self._choices[index]
