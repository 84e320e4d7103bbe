"""A step's rows as columns of int32: made from the plan alone, packed for the device.

How far each slot is stands on the device, so nothing here depends on results: while the same slots decode the columns
stay the same, and a steady step sends none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.gather import DECODING, InputRows
from penstock.kernels.sampling_tables import NO_DRAFT, NO_MASK
from penstock.protocol.steps import StepPlan

Column = NDArray[np.int32]

LINE = 4  # numbers; every column of a packed buffer starts at a multiple, which is 16 bytes


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
    def plain(self) -> bool:
        """Whether every row is one position that samples."""
        return self.longest == 1 and self.entries == self.rows


@dataclass(frozen=True)
class StepInputs:
    """What a forward pass reads of a step, on the device."""

    rows: InputRows
    last: Tensor  # int32 [entries]


def integers(column: bytes) -> Column:
    """A column of a plan."""
    return np.frombuffer(column, "<i4")


def decode_rows(decoding: Column) -> HostRows:
    """Every slot runs one position and samples."""
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
        decoding=count,
        longest=min(count, 1),
    )


def mixed_rows(decoding: Column, plan: StepPlan) -> HostRows:
    """Decoding slots, some with drafts, and chunks."""
    return drafted_rows(decoding, plan) if plan.drafts else chunked_rows(decoding, plan)


def chunked_rows(decoding: Column, plan: StepPlan) -> HostRows:
    """Decoding slots and chunks: whoever samples has one entry. The device waits for this with every prompt."""
    slot, start, size, sample = integers(plan.chunks).reshape(-1, 4).T
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
        decoding=count,
        longest=int(size.max(initial=min(count, 1))),
    )


def drafted_rows(decoding: Column, plan: StepPlan) -> HostRows:
    """Decoding slots, those that have drafts with an entry more for each, and chunks."""
    drafted = integers(plan.drafts).reshape(-1, 2)
    queries = np.ones(len(decoding), np.int32)
    queries[np.searchsorted(decoding, drafted[:, 0])] += drafted[:, 1]
    chunks = integers(plan.chunks).reshape(-1, 4)
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
        decoding=len(decoding),
        longest=int(np.diff(query_start).max(initial=0)),
    )


def cumulated(counts: Column) -> Column:
    """Where each begins, and where the last ends: [counts + 1]."""
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def input_columns(rows: HostRows) -> tuple[Column, ...]:
    """The columns of `StepInputs`."""
    return rows.query_start, rows.slots, rows.starts, rows.draft_ids, rows.last


def input_padding(rows: HostRows, scratch: int) -> tuple[int, ...]:
    """What fills those columns behind a step's own numbers: rows without tokens, tokens that are nobody's."""
    return rows.tokens, scratch, 0, NO_DRAFT, 0


def step_inputs(tensors: Iterable[Tensor]) -> StepInputs:
    """Of the device's copies of `input_columns`."""
    *rows, last = tensors
    return StepInputs(InputRows(*rows), last)


def entry_columns(rows: HostRows, masks: Column | None) -> tuple[Column, ...]:
    """The columns of `Entries`; `masks` is the place of each entry's mask."""
    if masks is None:
        masks = np.full(rows.entries, NO_MASK, np.int32)
    return rows.entry_start, rows.entry_slots, rows.depth, rows.drafts, masks


def entry_padding(rows: HostRows, scratch: int) -> tuple[int, ...]:
    """What fills those columns behind a step's own numbers: entries of the scratch slot that are no row's."""
    return rows.entries, scratch, 0, NO_DRAFT, NO_MASK


class Packing:
    """Where columns of at most some length each stand in one buffer of int32."""

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
