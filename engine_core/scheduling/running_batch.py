"""The running sequences as columns by slot, so that a step changes all rows by array operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.kv.block_layout import NO_BLOCK, BlockLayout, first_column
from penstock.engine_core.scheduling.request import Sequence

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NEVER = 1 << 60
NON_FINITE = -1  # the token of a row whose logits were not finite


class GuidedRow(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A row whose sequence follows a grammar, with its entries in a step."""

    sequence: Sequence
    row: int  # in the step's batch
    entry: int  # its first
    drafts: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class GuidedRows:
    """A batch's rows whose sequences follow a grammar, in steps without drafts: what such steps make of them."""

    rows: tuple[GuidedRow, ...]
    guides: list[Guide]
    masked: tuple[MaskRow, ...]
    places: Ints  # their slots
    slots: bytes  # int32 [rows], as plans have it


@dataclass(frozen=True, eq=False)
class RunningBatch:
    """Rows of a step that sample, and where their results go. Plans with the same rows share it."""

    slots: Ints
    lives: Ints
    ids: Ints
    numbers: npt.NDArray[np.uint16]
    sources: Ints
    sequences: list[Sequence]
    source: int  # the one source of all rows, -1 when they differ
    guided: Ints  # rows whose sequences follow a grammar
    departures: int  # sequences that had left their slots when it was made

    @cached_property
    def single(self) -> npt.NDArray[np.int32]:
        """The counts of a result with one token for each row. # [rows]"""
        return np.ones(len(self.slots), np.int32)

    @cached_property
    def everyone(self) -> Flags:
        """Its rows where no sequence has left its slot. # [rows]"""
        return np.ones(len(self.slots), np.bool_)

    @cached_property
    def unfinished(self) -> npt.NDArray[np.uint8]:
        """The finishes of a result that ends none. # [rows]"""
        return np.zeros(len(self.slots), np.uint8)

    @cached_property
    def rows(self) -> dict[Sequence, int]:
        """Which row is each sequence's."""
        return {sequence: row for row, sequence in enumerate(self.sequences)}

    @cached_property
    def appends(self) -> list[Callable[[int], None]]:
        """What appends a token to each sequence."""
        return [sequence.tokens.append for sequence in self.sequences]

    @cached_property
    def guided_rows(self) -> GuidedRows:
        rows = tuple([GuidedRow(self.sequences[row], row, row, []) for row in self.guided.tolist()])
        guides = [guide for each in rows if (guide := each.sequence.guide) is not None]
        masked = tuple([MaskRow(guide, [], each.row) for guide, each in zip(guides, rows, strict=True)])
        places = self.slots[self.guided]
        return GuidedRows(rows, guides, masked, places, places.astype(np.int32).tobytes())


def blocks_at_end(sequence: Sequence, layout: BlockLayout) -> int:
    """Most blocks of the sequence until its limit: its last token needs no KV."""
    return layout.most(sequence.limit - 1)


def joined(first: RunningBatch, second: RunningBatch) -> RunningBatch:
    """The rows of one batch, then those of another."""
    if not len(first.slots):
        return second
    return RunningBatch(
        np.concatenate((first.slots, second.slots)),
        np.concatenate((first.lives, second.lives)),
        np.concatenate((first.ids, second.ids)),
        np.concatenate((first.numbers, second.numbers)),
        np.concatenate((first.sources, second.sources)),
        first.sequences + second.sequences,
        first.source if first.source == second.source else -1,
        np.concatenate((first.guided, second.guided + len(first.slots))),
        min(first.departures, second.departures),
    )


class BlockTables:
    """The blocks of each slot."""

    def __init__(self, count: int, layout: BlockLayout) -> None:
        self.layout = layout
        self.tables: list[list[int]] = [[] for _ in range(count)]
        self.capacity = np.zeros(count, np.int64)  # positions that the table can hold
        self.held = np.zeros(count, np.int64)  # blocks in the table
        # Of those, blocks accounted to another sequence: of groups that hold everything, and of those with a window.
        self.borrowed = np.zeros(count, np.int64)
        self.lent = np.zeros(count, np.int64)
        self.behind = np.zeros((len(layout.kinds), count), np.int64)  # columns given back, for each kind of window
        self.committed = 0  # blocks that all running sequences would hold at most, without sharing


class Drafters:
    """What each slot's sequence has to draft."""

    def __init__(self, count: int) -> None:
        self.count = 0  # sequences that may have drafts
        self.gain = np.zeros(count)  # tokens of its likely runs; infinite: it has something to draft
        self.drafting: set[int] = set()  # slots whose gain is infinite

    def note(self, sequence: Sequence) -> None:
        """A sequence has its slot, or its drafter has changed since."""
        drafter, slot = sequence.drafter, sequence.slot
        if drafter is not None and not drafter.is_idle:
            self.gain[slot] = np.inf
            self.drafting.add(slot)
        else:
            self.gain[slot] = 0.0 if drafter is None else drafter.acceptance.gain.value
            self.drafting.discard(slot)


class Addresses:
    """Where each slot's results go."""

    def __init__(self, count: int) -> None:
        self.ids = np.zeros(count, np.int64)
        self.numbers = np.zeros(count, np.uint16)
        self.sources = np.zeros(count, np.int64)


class Slots:
    """Owner of the slot columns. A slot is free, occupied, or behind the fence; its columns count while occupied.

    `ready`: the slot decodes: all tokens the host knows are planned and the next one may be planned too.
    """

    def __init__(self, count: int, layout: BlockLayout, microbatches: int = 1) -> None:
        self.count = count
        self.microbatches = microbatches
        self.sequences: list[Sequence | None] = [None] * count
        self.blocks = BlockTables(count, layout)
        self.addresses = Addresses(count)
        self.life = np.zeros(count, np.int64)  # 0: the slot is empty
        self.num_tokens = np.zeros(count, np.int64)  # tokens that the host knows
        self.num_computed_tokens = np.zeros(count, np.int64)  # positions computed once all planned steps ran, at most
        self.limit = np.zeros(count, np.int64)  # most tokens, prompt included
        self.last = np.zeros(count, np.int64)  # last planned step
        self.ready = np.zeros(count, bool)
        self.microbatch = np.zeros(count, np.int64)  # that the slot decodes in
        self.sizes = [0] * microbatches  # ready slots of each
        self.guided = np.zeros(count, bool)  # the sequence follows a grammar
        self.guides = 0  # sequences that follow a grammar
        self.drafters = Drafters(count)
        self.departures = 0  # sequences that have left
        self._free = list(range(count - 1, -1, -1))
        self._lives = 0
        self._batches: list[RunningBatch | None] = [None] * microbatches

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def running(self) -> int:
        """Slots that are occupied."""
        return self._lives - self.departures

    def occupied(self) -> Ints:
        return self.life.nonzero()[0]

    def group_blocks(self) -> tuple[int, ...]:
        """Blocks in the tables of running sequences, of each KV group."""
        rows, layout = self.occupied(), self.blocks.layout
        columns = int(self.blocks.capacity[rows].sum()) // layout.block_size
        behind = {window: int(self.blocks.behind[kind, rows].sum()) for kind, (window, _) in enumerate(layout.kinds)}
        return tuple(columns - behind.get(window, 0) for window in layout.windows)

    def enter(self, sequence: Sequence) -> int:
        """Give the sequence a slot and a new `life`; its table is `sequence.blocks`, all of them computed already."""
        slot, size = self._free.pop(), self.blocks.layout.block_size
        self._lives += 1
        self.blocks.committed += blocks_at_end(sequence, self.blocks.layout)
        sequence.slot = slot
        sequence.life = self._lives * self.count + slot  # modulo the count it is the slot
        self.sequences[slot] = sequence
        self.blocks.tables[slot] = sequence.blocks
        self.life[slot] = sequence.life
        self.num_tokens[slot] = len(sequence.tokens)
        computed = len(sequence.blocks) // self.blocks.layout.groups * size
        self.blocks.held[slot] = len(sequence.blocks) - sequence.blocks.count(NO_BLOCK)
        self.blocks.capacity[slot] = self.num_computed_tokens[slot] = computed
        for kind, (window, _) in enumerate(self.blocks.layout.kinds):
            self.blocks.behind[kind, slot] = first_column(computed, window, size)
        self.limit[slot] = sequence.limit
        self.blocks.borrowed[slot] = self.blocks.lent[slot] = 0
        self.last[slot] = 0
        self.addresses.ids[slot] = sequence.request.message.id
        self.addresses.numbers[slot] = sequence.index
        self.addresses.sources[slot] = sequence.request.source
        self.guided[slot] = sequence.guide is not None
        self.drafters.note(sequence)
        self.guides += sequence.guide is not None
        self.drafters.count += sequence.drafter is not None
        return slot

    def leave(self, sequence: Sequence) -> int:
        """The sequence leaves its slot; `give` makes it available, at once or when the fence opens."""
        slot = sequence.slot
        self.blocks.committed -= blocks_at_end(sequence, self.blocks.layout)
        assert self.sequences[slot] is sequence
        self.set_ready(slot, False)
        self.departures += 1
        self.drafters.drafting.discard(slot)
        self._batches = [None] * self.microbatches
        self.sequences[slot] = None
        self.blocks.tables[slot] = []
        self.life[slot] = 0
        self.guides -= sequence.guide is not None
        self.drafters.count -= sequence.drafter is not None
        sequence.last_step = int(self.last[slot])
        sequence.slot, sequence.life = -1, 0
        return slot

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def set_ready(self, slot: int, ready: bool) -> None:
        if self.ready[slot] != ready:
            self.ready[slot] = ready
            number = int(self.microbatch[slot])
            self.sizes[number] += 1 if ready else -1
            self._batches[number] = None

    def pause(self, rows: Ints) -> None:
        """These slots have had their last position planned."""
        for slot in rows.tolist():
            self.set_ready(slot, False)

    def move(self, slot: int, number: int) -> None:
        ready = bool(self.ready[slot])
        self.set_ready(slot, False)
        self.microbatch[slot] = number
        self.set_ready(slot, ready)

    def decoding(self, number: int = 0) -> RunningBatch:
        """The ready slots of a micro-batch in ascending order; the same object as long as they are the same."""
        batch = self._batches[number]
        if batch is None:
            batch = self._batches[number] = self.batch((self.ready & (self.microbatch == number)).nonzero()[0])
        return batch

    def batch(self, rows: Ints) -> RunningBatch:
        """These slots as rows of a step, in this order."""
        sequences = [sequence for sequence in map(self.sequences.__getitem__, rows.tolist()) if sequence is not None]
        assert len(sequences) == len(rows)
        sources = self.addresses.sources[rows]
        single = len(rows) == 0 or bool((sources == sources[0]).all())
        return RunningBatch(
            rows,
            self.life[rows],
            self.addresses.ids[rows],
            self.addresses.numbers[rows],
            sources,
            sequences,
            int(sources[0]) if single and len(rows) else -1,
            self.guided[rows].nonzero()[0],
            self.departures,
        )

    def kept(self, batch: RunningBatch) -> Flags:
        """Which rows' sequences are still where the batch met them. # [rows]"""
        return batch.everyone if batch.departures == self.departures else self.life[batch.slots] == batch.lives

    def clear(self) -> None:
        """All sequences have left and nothing is in flight."""
        assert not self.life.any()
        self._free = list(range(self.count - 1, -1, -1))
        self._batches = [None] * self.microbatches


class StopTokenCounts:
    """How many sequences each token id may end: few ids, so that a step's tokens are looked up among them."""

    def __init__(self) -> None:
        self._count = Counter((NON_FINITE,))  # by token id; none is below 1
        self.ids = self._count.keys()  # whatever ids these are now

    def add(self, tokens: Iterable[int]) -> None:
        self._count.update(tokens)

    def remove(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._count[token] -= 1
            if not self._count[token]:
                del self._count[token]

    def among(self, tokens: list[int]) -> bool:
        """Whether one of the tokens may end a sequence."""
        return not self.ids.isdisjoint(tokens)

    def each(self, tokens: list[int]) -> npt.NDArray[np.bool_]:
        """Which of the tokens may. # [tokens]"""
        count = self._count
        return np.array([token in count for token in tokens], np.bool_)
