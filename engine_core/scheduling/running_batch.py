"""The running sequences as columns by slot, so that a step changes all rows by array operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.engine_core.grammar.guide import Guide
from penstock.engine_core.grammar.masks import MaskRow
from penstock.engine_core.kv.block_layout import NO_BLOCK, BlockLayout, first_column
from penstock.engine_core.scheduling.request import Sequence

Ints = npt.NDArray[np.int64]
NEVER = 1 << 60


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
    slots: bytes  # int32 [rows], as plans have it


@dataclass(frozen=True, slots=True, eq=False)
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
    _rows: dict[Sequence, int] = field(default_factory=dict)
    _appends: list[Callable[[int], None]] = field(default_factory=list)
    _guided_rows: list[GuidedRows] = field(default_factory=list)  # once they were asked for

    def row(self, sequence: Sequence) -> int:
        """Which row is a sequence's, -1 if none."""
        if not self._rows:
            self._rows.update({each: row for row, each in enumerate(self.sequences)})
        return self._rows.get(sequence, -1)

    @property
    def appends(self) -> list[Callable[[int], None]]:
        """What appends a token to each sequence."""
        if not self._appends:
            self._appends.extend([sequence.tokens.append for sequence in self.sequences])
        return self._appends

    @property
    def guided_rows(self) -> GuidedRows:
        if not self._guided_rows:
            rows = tuple([GuidedRow(self.sequences[row], row, row, []) for row in self.guided.tolist()])
            guides = [guide for each in rows if (guide := each.sequence.guide) is not None]
            masked = tuple([MaskRow(guide, [], each.row) for guide, each in zip(guides, rows, strict=True)])
            slots = self.slots[self.guided].astype(np.int32).tobytes()
            self._guided_rows.append(GuidedRows(rows, guides, masked, slots))
        return self._guided_rows[0]


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
        self.cached = np.zeros(count, np.int64)  # leading blocks in the prefix index; NEVER: they are not cached
        self.committed = 0  # blocks that all running sequences would hold at most, without sharing


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
        self.gain = np.zeros(count)  # tokens of its likely runs; infinite: it has something to draft
        self.guides = self.drafters = 0  # sequences that follow a grammar, and that may have drafts
        self._free = list(range(count - 1, -1, -1))
        self._lives = 0
        self._batches: list[RunningBatch | None] = [None] * microbatches

    @property
    def free(self) -> int:
        return len(self._free)

    def occupied(self) -> Ints:
        return self.life.nonzero()[0]

    def group_blocks(self) -> tuple[int, ...]:
        """Blocks in the tables of running sequences, of each KV group."""
        rows, layout = self.occupied(), self.blocks.layout
        columns = int(self.blocks.capacity[rows].sum()) // layout.block_size
        behind = {window: int(self.blocks.behind[kind, rows].sum()) for kind, (window, _) in enumerate(layout.kinds)}
        return tuple(columns - behind.get(window, 0) for window in layout.windows)

    def enter(self, sequence: Sequence, seals: bool) -> int:
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
        self.blocks.cached[slot] = sequence.cached if seals else NEVER
        self.last[slot] = 0
        self.addresses.ids[slot] = sequence.request.message.id
        self.addresses.numbers[slot] = sequence.index
        self.addresses.sources[slot] = sequence.request.source
        self.guided[slot] = sequence.guide is not None
        self.note_drafter(sequence)
        self.guides += sequence.guide is not None
        self.drafters += sequence.drafter is not None
        return slot

    def note_drafter(self, sequence: Sequence) -> None:
        """A sequence has its slot, or its drafter has changed since."""
        drafter = sequence.drafter
        gain = 0.0 if drafter is None else drafter.acceptance.gain.value if drafter.is_idle else np.inf
        self.gain[sequence.slot] = gain

    def leave(self, sequence: Sequence) -> int:
        """The sequence leaves its slot; `give` makes it available, at once or when the fence opens."""
        slot = sequence.slot
        self.blocks.committed -= blocks_at_end(sequence, self.blocks.layout)
        assert self.sequences[slot] is sequence
        self.set_ready(slot, False)
        self.sequences[slot] = None
        self.blocks.tables[slot] = []
        self.life[slot] = 0
        self.guides -= sequence.guide is not None
        self.drafters -= sequence.drafter is not None
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
        )

    def clear(self) -> None:
        """All sequences have left and nothing is in flight."""
        assert not self.life.any()
        self._free = list(range(self.count - 1, -1, -1))
        self._batches = [None] * self.microbatches


class StopTokenCounts:
    """How many sequences each token id may end: one gather finds the rows that need a closer look."""

    def __init__(self, vocab_size: int) -> None:
        self._count = np.zeros(vocab_size + 1, np.int32)  # the last entry is NON_FINITE's, which is -1
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
