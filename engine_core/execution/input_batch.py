"""Slot tables: the executor's state of every running request, changed by the small diffs of a plan.

All that a step reads or advances is on the device: each slot's tokens and their number, its block table, its sampling
parameters and penalty counts. The host knows which slots decode and how long their block tables are, both of which
follow from plans alone. Slot `max_num_seqs` and block 0 are scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.sampling_parameters import NUMBER, SlotParameters
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.changes import change_slots
from penstock.kernels.latent_expansion import LONG
from penstock.kernels.records import (
    COUNT_WORDS,
    COUNTS,
    DECODING,
    HEAD,
    HEAD_WORDS,
    NO_DRAFT,
    NO_MASK,
    PAIR,
    PENALTIES,
    InputRows,
    SlotHistory,
    SlotMemory,
)
from penstock.protocol.step_columns import block_table, chunk_table, draft_table, integers, keep_table
from penstock.protocol.steps import NO_MICROBATCH, NO_STATE, SlotStart, StepMasks, StepPlan

IntArray = NDArray[np.int64]
PLACE = 1 << 14  # words of changes that a graph carries out: a prompt of 15,000 tokens, or ten short ones
Column = NDArray[np.int32]
MAX_MASK_SLOTS = 4096
MOST_BYTES = 128 << 20  # of all slots: room for 4096 masks of a vocabulary of 262,144
BITS = 32  # of a word
LINE = 4  # numbers; every column of a packed buffer starts at a multiple, which is 16 bytes


@dataclass(frozen=True)
class SlotSizes:
    """Sizes of the tables."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocabulary: int
    groups: int = 1  # KV groups, each of which has a table of every slot

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def scratch(self) -> int:
        """The scratch slot, which belongs to no request."""
        return self.max_num_seqs


class Placement:
    """Sends changes of the slots to the device.

    On a GPU most go by a CUDA graph over a fixed buffer, which is launched in a tenth of a kernel's time.
    """

    def __init__(self, memory: SlotMemory, upload: Upload) -> None:
        self._memory = memory
        self._upload = upload
        self._place: Tensor | None = None  # int32 [PLACE]
        self._graph: torch.cuda.CUDAGraph | None = None  # of changes that stand there
        if upload.device.type == "cuda":
            self._place = torch.zeros(PLACE, dtype=torch.int32, device=upload.device)

    def carry_out(self, words: Column) -> None:
        """Enqueue changes, packed as `kernels.changes` describes."""
        if self._place is None or len(words) > PLACE:
            change_slots(self._upload.send((words,))[0], self._memory)
            return
        self._upload.put(words, self._place)
        if self._graph is not None:
            self._graph.replay()
        elif change_slots(self._place, self._memory):  # it is compiled and loaded now
            self._graph = self._capture(self._place)

    def _capture(self, place: Tensor) -> torch.cuda.CUDAGraph:
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(place.device)
        stream = torch.cuda.Stream(place.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                change_slots(place, self._memory)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph


class SlotTable:
    """The slots, on device and host."""

    def __init__(self, sizes: SlotSizes, upload: Upload, microbatches: int = 1) -> None:
        slots, device = sizes.max_num_seqs + 1, upload.device
        self.sizes = sizes
        self._microbatches = microbatches
        self.row_length = sizes.max_model_len + 1  # the last entry takes what an over-scheduled step samples
        self.parameters = SlotParameters(slots, sizes.vocabulary, upload, mask_slots(sizes.vocabulary))
        self.history = SlotHistory(
            tokens=torch.zeros(slots, self.row_length, dtype=torch.int32, device=device),
            known=self.parameters.known,
            counts=torch.zeros(slots, sizes.vocabulary, dtype=torch.int32, device=device),
        )
        # [slots, groups * max_blocks]: a slot's tables, one group's behind the other's.
        self.block_tables = torch.zeros(slots, sizes.groups * sizes.max_blocks, dtype=torch.int32, device=device)
        memory = SlotMemory(self.history.tokens, self.block_tables, self.parameters.numbers)
        self._placement = Placement(memory, upload)
        self.prompt_tokens = np.zeros(slots, np.int64)
        self._block_counts = np.zeros(slots, np.int64)
        self._decodes = np.zeros((microbatches, slots), bool)
        self._nobody = decode_rows(np.zeros(0, np.int32))
        self._decoding = [self._nobody] * microbatches
        # With the drafts of the last step that had some: where executors made them, every step names the same ids.
        self._drafted: tuple[HostRows, tuple[bytes, bytes], HostRows] | None = None
        self._upload = upload

    def reset(self) -> None:
        """Forget all requests: a new scheduler does not know them."""
        self._decodes[:] = False
        self._decoding = [self._nobody] * self._microbatches

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's diffs in order: slots that stop decoding, starts, blocks, slots that start to decode."""
        number = plan.microbatch
        if plan.decode_off:
            self._decodes[number, integers(plan.decode_off)] = False
        if plan.starts or plan.blocks:
            self._change(plan)
        if plan.decode_on:
            self._decodes[number, integers(plan.decode_on)] = True
        if plan.decode_off or plan.decode_on:
            self._decoding[number] = decode_rows(self._decodes[number].nonzero()[0].astype(np.int32))

    def rows(self, plan: StepPlan) -> HostRows:
        """The step's rows: the same object while the same slots decode, with the same drafts, and nothing else runs."""
        decoding = self._nobody if plan.microbatch == NO_MICROBATCH else self._decoding[plan.microbatch]
        if not (plan.chunks or plan.drafts):
            return decoding
        if plan.chunks:
            return mixed_rows(decoding.slots, plan)
        key = plan.drafts, plan.draft_ids
        if self._drafted is None or self._drafted[0] is not decoding or self._drafted[1] != key:
            self._drafted = decoding, key, mixed_rows(decoding.slots, plan)
        return self._drafted[2]

    @property
    def group_tables(self) -> tuple[Tensor, ...]:
        """Of each KV group: int32 [slots, max_blocks]."""
        width = self.sizes.max_blocks
        return tuple(self.block_tables[:, group * width : (group + 1) * width] for group in range(self.sizes.groups))

    def longest(self, rows: HostRows) -> int:
        """Keys that the longest row may have: what its blocks hold."""
        return int(self._block_counts[rows.slots].max(initial=1)) * self.sizes.block_size

    def _change(self, plan: StepPlan) -> None:
        """Upload starts and appended blocks in one transfer."""
        starts = plan.starts
        for start in starts:
            self.prompt_tokens[start.slot] = start.prompt_tokens
            for number in self._decodes[:, start.slot].nonzero()[0].tolist():
                self._decodes[number, start.slot] = False
                self._decoding[number] = decode_rows(self._decodes[number].nonzero()[0].astype(np.int32))
            self._block_counts[start.slot] = len(start.blocks) // NUMBER // self.sizes.groups
        numbers = self.parameters.start(starts)
        columns = block_table(plan.blocks, self.sizes.groups)
        appended = self._append(columns)
        again = len(columns) and np.isin(columns[:, 0], [start.slot for start in starts]).any()
        if starts and (again or self.sizes.groups > 1):
            self._send(starts, numbers, appended[:0])  # the start clears the tables that it fills, so it goes first
            appended = np.concatenate((*map(self._other_groups, starts), appended))
            starts, numbers = (), []
        if starts or len(appended):
            self._send(starts, numbers, appended)
        for start in plan.starts:
            if self.parameters.uses[start.slot] & PENALTIES:
                self._count(start.slot, start.prompt_tokens, len(start.token_ids) // NUMBER)

    def _send(self, starts: Sequence[SlotStart], numbers: Sequence[tuple[float, ...]], appended: Column) -> None:
        end = COUNT_WORDS + len(starts) * HEAD_WORDS + appended.size
        heads, contents, longest = [], [], 0
        for start, own in zip(starts, numbers, strict=True):
            first = self._table(start)[:, 0].tobytes() if self.sizes.groups > 1 else start.blocks
            tokens, blocks = len(start.token_ids) // NUMBER, len(first) // NUMBER
            heads.append(HEAD.pack(start.slot, end, tokens, end + tokens, blocks, *own))
            contents += [start.token_ids, first]
            end += tokens + blocks
            longest = max(longest, tokens)
        counts = COUNTS.pack(len(starts), len(appended), longest, 0)
        words = np.frombuffer(bytearray().join((counts, *heads, appended.tobytes(), *contents)), "<i4")
        self._placement.carry_out(words)

    def _count(self, slot: int, prompt: int, length: int) -> None:
        counts, tokens = self.history.counts[slot].zero_(), self.history.tokens[slot, :length].long()
        counts.index_fill_(0, tokens[:prompt], 1)
        counts.index_add_(0, tokens[prompt:], torch.full_like(tokens[prompt:], 2, dtype=torch.int32))

    def _table(self, start: SlotStart) -> Column:
        """# [columns, groups]"""
        return integers(start.blocks).reshape(-1, self.sizes.groups)

    def _other_groups(self, start: SlotStart) -> Column:
        """Slot, place in its line and block of what a start has beyond the first group: [blocks, 3]."""
        table = self._table(start)[:, 1:]
        columns, groups = table.nonzero()
        places = (groups + 1) * self.sizes.max_blocks + columns
        return np.stack((np.full_like(places, start.slot), places, table[columns, groups]), axis=1).astype(np.int32)

    def _append(self, pairs: Column) -> Column:
        """Slot, place in its line and block of each that is appended: [blocks, 3], in the order given for each slot.

        pairs: [columns, 1 + groups], the slot and its blocks.
        """
        if not len(pairs):
            return np.empty((0, PAIR), np.int32)
        slots = pairs[:, 0]
        columns = self._block_counts[slots]
        if len(slots) > 1 and (slots[1:] <= slots[:-1]).any():  # several of a slot, or slots in any order
            pairs = pairs[np.argsort(slots, kind="stable")]
            slots = pairs[:, 0]
            _, repeats = np.unique(slots, return_counts=True)
            columns = self._block_counts[slots] + offsets(repeats)
        self._block_counts[slots] = columns + 1  # the last of a slot's wins
        appended = np.empty((len(pairs), self.sizes.groups, PAIR), np.int32)
        appended[:, :, 0], appended[:, :, 2] = slots[:, None], pairs[:, 1:]
        appended[:, :, 1] = columns[:, None] + np.arange(self.sizes.groups) * self.sizes.max_blocks
        return appended.reshape(-1, PAIR)


def offsets(counts: IntArray) -> IntArray:
    """0 .. count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True)
class HostRows:
    """One step: decoding slots ascending, then chunks in the plan's order; entries in the order of rows."""

    query_start: Column  # [rows + 1], first token of each row
    slots: Column  # [rows]
    starts: Column  # [rows], first position of a chunk, DECODING for a decoding row
    last: Column  # [entries], the token whose logits each entry samples from
    draft_ids: Column  # [tokens], the id of a token that is a draft, else NO_DRAFT
    entry_start: Column  # [sampling rows + 1], first entry of each
    entry_slots: Column  # [entries]
    depth: Column  # [entries], drafts of its row that come before it
    drafts: Column  # [entries], the draft that its token must equal to count on, NO_DRAFT where none follows
    kept: Column  # [tokens], the place of the state behind a chunk's token, else NO_STATE; empty: no token has one
    decoding: int  # rows that decode; they come first
    longest: int  # tokens of the longest row

    @cached_property
    def tokens(self) -> int:
        return len(self.draft_ids)

    @cached_property
    def rows(self) -> int:
        return len(self.slots)

    @cached_property
    def entries(self) -> int:
        return len(self.last)

    @cached_property
    def long_pairs(self) -> int:
        """Pairs of a query of a long row and a key that it sees: see `execution.long_rows`."""
        counts = np.diff(self.query_start)
        long = (counts >= LONG) & (self.starts >= 0)
        size, start = counts[long].astype(np.int64), self.starts[long]
        return int((size * start + size * (size + 1) // 2).sum())

    @cached_property
    def plain(self) -> bool:
        """Whether every row is one position that samples."""
        return self.longest == 1 and self.entries == self.rows


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step's forward pass, on the device."""

    rows: InputRows
    last: Tensor  # int32 [entries]


def decode_rows(decoding: Column) -> HostRows:
    """Rows in which every slot computes one position and samples."""
    count = len(decoding)
    places = np.arange(count + 1, dtype=np.int32)
    nothing = np.full(count, -1, np.int32)
    return HostRows(
        query_start=places,
        slots=decoding,
        starts=nothing,
        last=places[:count],
        draft_ids=nothing,
        entry_start=places,
        entry_slots=decoding,
        depth=np.zeros(count, np.int32),
        drafts=nothing,
        kept=nothing[:0],
        decoding=count,
        longest=min(count, 1),
    )


def mixed_rows(decoding: Column, plan: StepPlan) -> HostRows:
    """Decoding slots, some with drafts, and chunks."""
    return drafted_rows(decoding, plan) if plan.drafts else chunked_rows(decoding, plan)


def chunked_rows(decoding: Column, plan: StepPlan) -> HostRows:
    """Decoding slots and chunks; a row that samples has one entry. The device waits for this with every prompt."""
    slot, start, size, sample = chunk_table(plan.chunks).T
    count = len(decoding)
    query_start = np.arange(count + len(slot) + 1, dtype=np.int32)
    np.cumsum(size, out=query_start[count + 1 :])
    query_start[count + 1 :] += count
    starts = np.full(count + len(slot), DECODING, np.int32)
    starts[count:] = start
    places = np.arange(count + int(sample.sum()) + 1, dtype=np.int32)
    sampling = np.concatenate((places[:count], count + sample.nonzero()[0]))
    slots = np.concatenate((decoding, slot))
    return HostRows(
        query_start=query_start,
        slots=slots,
        starts=starts,
        last=query_start[sampling + 1] - 1,
        draft_ids=np.full(query_start[-1], NO_DRAFT, np.int32),
        entry_start=places,
        entry_slots=slots[sampling],
        depth=np.zeros(len(sampling), np.int32),
        drafts=np.full(len(sampling), NO_DRAFT, np.int32),
        kept=kept_places(plan, query_start, count),
        decoding=count,
        longest=int(size.max(initial=min(count, 1))),
    )


def drafted_rows(decoding: Column, plan: StepPlan) -> HostRows:
    """Decoding slots, with an entry more for each of their drafts, and chunks."""
    drafted = draft_table(plan.drafts)
    queries = np.ones(len(decoding), np.int32)
    queries[np.searchsorted(decoding, drafted[:, 0])] += drafted[:, 1]
    chunks = chunk_table(plan.chunks)
    slots = np.concatenate((decoding, chunks[:, 0]))
    entries = np.concatenate((queries, chunks[:, 3]))  # of each row
    query_start = cumulated(np.concatenate((queries, chunks[:, 2])))
    sampling = entries.nonzero()[0]
    counts = entries[sampling]
    entry_start = cumulated(counts)
    depth = np.arange(entry_start[-1], dtype=np.int32) - np.repeat(entry_start[:-1], counts)
    last = np.repeat(query_start[1:][sampling] - counts, counts) + depth
    draft_ids = np.full(query_start[-1], NO_DRAFT, np.int32)
    drafts = np.full(len(depth), NO_DRAFT, np.int32)
    after = depth.nonzero()[0]
    drafts[after - 1] = draft_ids[last[after]] = integers(plan.draft_ids)
    return HostRows(
        query_start=query_start,
        slots=slots,
        starts=np.concatenate((np.full(len(decoding), DECODING, np.int32), chunks[:, 1])),
        last=last,
        draft_ids=draft_ids,
        entry_start=entry_start,
        entry_slots=np.repeat(slots[sampling], counts),
        depth=depth,
        drafts=drafts,
        kept=kept_places(plan, query_start, len(decoding)),
        decoding=len(decoding),
        longest=int(np.diff(query_start).max(initial=0)),
    )


def kept_places(plan: StepPlan, query_start: Column, decoding: int) -> Column:
    """`HostRows.kept` of a step whose first `decoding` rows decode: their states are kept behind it."""
    chunks = chunk_table(plan.chunks)
    if not (plan.keep and len(chunks)):
        return np.zeros(0, np.int32)
    found = np.full(query_start[-1], NO_STATE, np.int32)
    origins = dict(zip(chunks[:, 0].tolist(), (query_start[decoding:-1] - chunks[:, 1]).tolist(), strict=True))
    for slot, position, place, _ in keep_table(plan.keep).tolist():
        if slot in origins:
            found[origins[slot] + position - 1] = place
    return found


def cumulated(counts: Column) -> Column:
    """Prefix sums from zero: [counts + 1]."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def input_columns(rows: HostRows) -> tuple[Column, ...]:
    """The columns of `StepInputs`."""
    return rows.query_start, rows.slots, rows.starts, rows.draft_ids, rows.kept, rows.last


def input_padding(rows: HostRows, scratch: int) -> tuple[int, ...]:
    """The padding of those columns: rows without tokens, tokens of no request."""
    return rows.tokens, scratch, 0, NO_DRAFT, NO_STATE, 0


def step_inputs(tensors: Iterable[Tensor]) -> StepInputs:
    """Of the device's copies of `input_columns`."""
    *rows, last = tensors
    return StepInputs(InputRows(*rows), last)


def entry_columns(rows: HostRows, masks: Column | None) -> tuple[Column, ...]:
    """The columns of `Entries`; `masks` has the mask slot of each entry."""
    if masks is None:
        masks = np.full(rows.entries, NO_MASK, np.int32)
    return rows.entry_start, rows.entry_slots, rows.depth, rows.drafts, masks


def entry_padding(rows: HostRows, scratch: int) -> tuple[int, ...]:
    """The padding of those columns: entries of the scratch slot."""
    return rows.entries, scratch, 0, NO_DRAFT, NO_MASK


class Packing:
    """The layout of columns, each of a maximum length, in one int32 buffer."""

    def __init__(self, room: Sequence[int]) -> None:
        ends = np.cumsum([-(-length // LINE) * LINE for length in room]).tolist()
        self.size: int = ends[-1]  # numbers
        self._starts: tuple[int, ...] = (0, *ends[:-1])

    def views(self, packed: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        """The columns within int32 `[size]`, each of the length asked for."""
        return (packed[at : at + length] for at, length in zip(self._starts, lengths, strict=True))

    def pack(self, columns: Sequence[Column], lengths: Sequence[int], padding: Sequence[int]) -> Column:
        """The columns, each padded to its length: int32, up to the end of the last."""
        packed = np.empty(self._starts[-1] + lengths[-1], np.int32)
        for column, start, length, fill in zip(columns, self._starts, lengths, padding, strict=True):
            end = start + len(column)
            packed[start:end] = column
            packed[end : start + length] = fill
        return packed


def mask_slots(vocabulary: int) -> int:
    return min(MAX_MASK_SLOTS, MOST_BYTES * 8 // (BITS * -(-vocabulary // BITS)))


def store_masks(masks: StepMasks, store: Tensor, upload: Upload) -> None:
    """Put the new masks of a step into their slots of `store  # [slots, words]`."""
    if not masks.new_slots:
        return
    slots = integers(masks.new_slots).astype(np.int64)
    bits = integers(masks.bits).reshape(len(slots), store.shape[1]).copy()
    new_slots, new_bits = upload.send((slots, bits))
    store.index_copy_(0, new_slots, new_bits)


def entry_masks(masks: StepMasks, entries: int) -> Column:
    """The slot of each entry's mask: [entries]."""
    slots = np.full(entries, NO_MASK, np.int32)
    slots[integers(masks.entries)] = integers(masks.slots)
    return slots
