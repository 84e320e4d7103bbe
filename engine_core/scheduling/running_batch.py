"""The running choices as columns: what a step changes for every row is one array operation, not a loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.engine_core.scheduling.request import Choice

Ints = npt.NDArray[np.int64]
NEVER = 1 << 60


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """Rows of a step that sample, with what their results are addressed to. Shared by plans with the same rows."""

    slots: Ints
    lives: Ints
    ids: Ints
    numbers: npt.NDArray[np.uint16]
    sources: Ints
    choices: list[Choice]
    source: int  # the one source of all rows, -1 when they differ


def blocks_at_end(choice: Choice, block_size: int) -> int:
    """Blocks of the choice at its limit: its last token needs no KV."""
    return -(-(choice.request.limit - 1) // block_size)


def joined(first: Lane, second: Lane) -> Lane:
    """The rows of one lane, then those of another."""
    if not len(first.slots):
        return second
    return Lane(
        np.concatenate((first.slots, second.slots)),
        np.concatenate((first.lives, second.lives)),
        np.concatenate((first.ids, second.ids)),
        np.concatenate((first.numbers, second.numbers)),
        np.concatenate((first.sources, second.sources)),
        first.choices + second.choices,
        first.source if first.source == second.source else -1,
    )


class Slots:
    """Owner of the slot columns. A slot is free, occupied, or behind the fence; its columns count while occupied.

    `ready`: the slot decodes: all tokens the host knows are planned and the next one may be planned too.
    """

    def __init__(self, count: int, microbatches: int = 1) -> None:
        self.count = count
        self.microbatches = microbatches
        self.choices: list[Choice | None] = [None] * count
        self.tables: list[list[int]] = [[] for _ in range(count)]
        self.life = np.zeros(count, np.int64)  # 0: nobody
        self.known = np.zeros(count, np.int64)  # tokens that the host knows
        self.planned = np.zeros(count, np.int64)  # positions computed once all planned steps ran, at most
        self.limit = np.zeros(count, np.int64)  # most tokens, prompt included
        self.room = np.zeros(count, np.int64)  # positions that the table can hold
        self.held = np.zeros(count, np.int64)  # blocks in the table
        self.lent = np.zeros(count, np.int64)  # of those, blocks accounted to another sharer
        self.sealed = np.zeros(count, np.int64)  # leading blocks with an identity; NEVER: none wanted
        self.last = np.zeros(count, np.int64)  # last planned step
        self.ids = np.zeros(count, np.int64)
        self.numbers = np.zeros(count, np.uint16)
        self.sources = np.zeros(count, np.int64)
        self.mark = np.full(count, NEVER, np.int64)  # tokens at which the choice's trace has its next event
        self.ready = np.zeros(count, bool)
        self.microbatch = np.zeros(count, np.int64)  # that the slot decodes in
        self.sizes = [0] * microbatches  # ready slots of each
        self.guided = np.zeros(count, bool)  # the choice follows a grammar
        self.drafting = np.zeros(count, bool)  # the choice may have drafts
        self.guides = self.drafters = 0  # how many are set
        self.committed = 0  # blocks that all occupants would hold at their limits if they shared none
        self._free = list(range(count - 1, -1, -1))
        self._lives = 0
        self._lanes: list[Lane | None] = [None] * microbatches

    @property
    def free(self) -> int:
        return len(self._free)

    def occupied(self) -> Ints:
        return self.life.nonzero()[0]

    def enter(self, choice: Choice, block_size: int, seals: bool) -> int:
        """Give the choice a slot and a new life; its table is `choice.blocks`, all of them computed already."""
        slot = self._free.pop()
        self._lives += 1
        self.committed += blocks_at_end(choice, block_size)
        choice.slot = slot
        choice.life = self._lives * self.count + slot  # the slot can be read off a life
        self.choices[slot] = choice
        self.tables[slot] = choice.blocks
        self.life[slot] = choice.life
        self.known[slot] = len(choice.tokens)
        self.held[slot] = len(choice.blocks)
        self.room[slot] = self.planned[slot] = len(choice.blocks) * block_size
        self.limit[slot] = choice.request.limit
        self.lent[slot] = 0
        self.sealed[slot] = choice.sealed if seals else NEVER
        self.last[slot] = 0
        self.ids[slot] = choice.request.message.id
        self.numbers[slot] = choice.index
        self.sources[slot] = choice.request.source
        self.guided[slot] = choice.guide is not None
        self.drafting[slot] = choice.drafter is not None
        self.guides += choice.guide is not None
        self.drafters += choice.drafter is not None
        return slot

    def leave(self, choice: Choice, block_size: int) -> int:
        """The choice gives its slot up; `give` makes it free for others, at once or when the fence opens."""
        slot = choice.slot
        self.committed -= blocks_at_end(choice, block_size)
        assert self.choices[slot] is choice
        self.set_ready(slot, False)
        self.choices[slot] = None
        self.tables[slot] = []
        self.life[slot] = 0
        self.guides -= choice.guide is not None
        self.drafters -= choice.drafter is not None
        choice.last_step = int(self.last[slot])
        choice.slot, choice.life = -1, 0
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def set_ready(self, slot: int, ready: bool) -> None:
        if self.ready[slot] != ready:
            self.ready[slot] = ready
            number = int(self.microbatch[slot])
            self.sizes[number] += 1 if ready else -1
            self._lanes[number] = None

    def pause(self, rows: Ints) -> None:
        """These slots have had their last position planned."""
        for slot in rows.tolist():
            self.set_ready(slot, False)

    def move(self, slot: int, number: int) -> None:
        """To another micro-batch."""
        ready = bool(self.ready[slot])
        self.set_ready(slot, False)
        self.microbatch[slot] = number
        self.set_ready(slot, ready)

    def decoding(self, number: int = 0) -> Lane:
        """The ready slots of a micro-batch in ascending order; the same object as long as they are the same."""
        lane = self._lanes[number]
        if lane is None:
            lane = self._lanes[number] = self.lane((self.ready & (self.microbatch == number)).nonzero()[0])
        return lane

    def lane(self, rows: Ints) -> Lane:
        """These slots as rows of a step, in this order."""
        choices = [choice for choice in map(self.choices.__getitem__, rows.tolist()) if choice is not None]
        assert len(choices) == len(rows)
        sources = self.sources[rows]
        single = len(rows) == 0 or bool((sources == sources[0]).all())
        return Lane(
            rows,
            self.life[rows],
            self.ids[rows],
            self.numbers[rows],
            sources,
            choices,
            int(sources[0]) if single and len(rows) else -1,
        )

    def clear(self) -> None:
        """Everybody has left and nothing is in flight."""
        assert not self.life.any()
        self._free = list(range(self.count - 1, -1, -1))
        self._lanes = [None] * self.microbatches


class Suspects:
    """Token ids that may end somebody, as a count per vocabulary entry: one gather finds the rows worth a look."""

    def __init__(self, vocab_size: int) -> None:
        self._count = np.zeros(vocab_size + 1, np.int32)  # the last entry answers for NON_FINITE, which is -1
        self._count[vocab_size] = 1

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._count[token] += 1

    def remove(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._count[token] -= 1

    def among(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """# [rows] → bool [rows]"""
        return self._count[tokens] > 0

    @property
    def clean(self) -> bool:
        """Whether everything added was removed again."""
        return int(self._count.sum()) == 1
