"""The fence: what a planned step touches may be reused only after that step is applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec


class Fenced(msgspec.Struct, frozen=True):
    """A table and its slot, given up by their holder while a step may still write through them."""

    blocks: Sequence[int]
    slot: int


class Fence:
    """Owner of what is given up but still touched by a step in flight; each entry waits for one step."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Fenced]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def hold(self, step: int, fenced: Fenced) -> None:
        """`step` is the last planned step that touches it."""
        self._waiting.setdefault(step, []).append(fenced)

    def open(self, step: int) -> list[Fenced]:
        """What waited for this step. Steps are applied in order, so nothing older can be left."""
        return self._waiting.pop(step, [])

    def tables(self) -> Iterator[Sequence[int]]:
        for entries in self._waiting.values():
            for fenced in entries:
                yield fenced.blocks

    def clear(self) -> None:
        self._waiting.clear()
