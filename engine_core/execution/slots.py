"""Slot tables: what the executor keeps of every running request, changed by the small diffs of a plan.

On the device: each slot's tokens, block table, sampling columns and penalty counts. On the host: how far each slot is
computed and a mirror of the block tables, which advance the same way without being told, so that a step's rows are
arrays made without asking the device. Slot `max_num_seqs` and block 0 are scratch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine_core.execution.parameters import PENALTIES, IntArray, SlotParameters
from engine_core.execution.transfer import Upload
from kernels.sampling import History, Penalties
from protocol.steps import SlotStart, StepPlan


@dataclass(frozen=True)
class SlotSizes:
    """Bounds of the tables."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    vocabulary: int

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class StepRows:
    """One step's rows as host arrays: decoding slots ascending, then chunks in the plan's order."""

    slots: IntArray  # [rows]
    counts: IntArray  # [rows], tokens of each row
    context: IntArray  # [rows], positions known after the step
    positions: IntArray  # [tokens]
    token_places: IntArray  # [tokens], index into the flat token table
    cache_places: IntArray  # [tokens], block * block_size + offset
    sampled: IntArray  # [sampled rows], which rows sample
    decoding: int  # rows that decode; they come first

    @cached_property
    def ends(self) -> IntArray:
        """One past each row's last token: [rows]."""
        return np.cumsum(self.counts)


def integers(column: bytes) -> NDArray[np.int32]:
    """A column of a plan."""
    return np.frombuffer(column, "<i4")


class SlotTable:
    """The slots, on host and device."""

    def __init__(self, sizes: SlotSizes, upload: Upload) -> None:
        slots, device = sizes.max_num_seqs + 1, upload.device
        self.sizes = sizes
        self.row_length = sizes.max_model_len + 1  # the last entry takes what an over-scheduled step samples
        self.parameters = SlotParameters(slots, sizes.vocabulary, upload)
        self.tokens = torch.zeros(slots, self.row_length, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros(slots, sizes.max_blocks, dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, sizes.vocabulary, dtype=torch.int32, device=device)
        self.prompt_tokens = np.zeros(slots, np.int64)
        self.version = 0  # grows whenever a slot starts
        self._computed = np.zeros(slots, np.int64)  # positions whose KV stands
        self._blocks = np.zeros((slots, sizes.max_blocks), np.int32)  # mirror of block_tables
        self._block_counts = np.zeros(slots, np.int64)
        self._decodes = np.zeros(slots, bool)
        self._decoding = np.zeros(0, np.int64)  # slots that decode, ascending
        self._upload = upload

    @property
    def history(self) -> History:
        return History(self.tokens, self.parameters.integers[2], self.counts)

    def reset(self) -> None:
        """Forget every request: a new scheduler knows nothing of them."""
        self._decodes[:] = False
        self._decoding = np.zeros(0, np.int64)

    def apply(self, plan: StepPlan) -> None:
        """The plan's diffs, in this order: slots that stop decoding, starts, blocks, slots that begin to decode."""
        if plan.decode_off:
            self._decodes[integers(plan.decode_off)] = False
        if plan.starts:
            self._start(plan.starts)
        if plan.blocks:
            self._append_blocks(integers(plan.blocks).reshape(-1, 2).astype(np.int64))
        if plan.decode_on:
            self._decodes[integers(plan.decode_on)] = True
        if plan.decode_off or plan.decode_on or plan.starts:
            self._decoding = np.flatnonzero(self._decodes)

    def _start(self, starts: tuple[SlotStart, ...]) -> None:
        self.version += 1
        slots = np.array([start.slot for start in starts], np.int64)
        tokens = [integers(start.token_ids) for start in starts]
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        places = np.repeat(slots * self.row_length, lengths) + offsets(lengths)
        tables = np.zeros((len(starts), self.sizes.max_blocks), np.int32)  # what is not given points at scratch
        for at, start in enumerate(starts):
            blocks = integers(start.blocks)
            tables[at, : len(blocks)] = blocks
            self._block_counts[start.slot] = len(blocks)
            self._computed[start.slot] = start.computed
            self.prompt_tokens[start.slot] = start.prompt_tokens
            self._decodes[start.slot] = False
        self._blocks[slots] = tables
        new_slots, new_places, new_tokens, new_tables = self._upload.send(
            (slots, places, np.concatenate(tokens), tables)
        )
        self.tokens.view(-1).index_copy_(0, new_places, new_tokens)
        self.block_tables.index_copy_(0, new_slots, new_tables)
        self.parameters.start(starts)
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            if self.parameters.uses[slot] & PENALTIES:
                self._count(slot, int(self.prompt_tokens[slot]), length)

    def _count(self, slot: int, prompt: int, length: int) -> None:
        counts, tokens = self.counts[slot].zero_(), self.tokens[slot, :length].long()
        counts.index_fill_(0, tokens[:prompt], 1)
        counts.index_add_(0, tokens[prompt:], torch.full_like(tokens[prompt:], 2, dtype=torch.int32))

    def _append_blocks(self, pairs: IntArray) -> None:
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        slots, blocks = pairs[:, 0], pairs[:, 1]
        _, repeats = np.unique(slots, return_counts=True)
        columns = self._block_counts[slots] + offsets(repeats)
        self._blocks[slots, columns] = blocks
        self._block_counts[slots] = columns + 1  # the last of a slot's wins
        places, new_blocks = self._upload.send((slots * self.sizes.max_blocks + columns, blocks.astype(np.int32)))
        self.block_tables.view(-1).index_copy_(0, places, new_blocks)

    def rows(self, plan: StepPlan) -> StepRows:
        """The step's rows; the host's positions advance past them."""
        decoding = self._decoding
        slots, starts = decoding, self._computed[decoding]
        counts, sampled = np.ones(len(decoding), np.int64), np.arange(len(decoding))
        if plan.chunks:
            chunks = integers(plan.chunks).reshape(-1, 4).astype(np.int64)
            slots = np.concatenate((slots, chunks[:, 0]))
            starts = np.concatenate((starts, chunks[:, 1]))
            counts = np.concatenate((counts, chunks[:, 2]))
            sampled = np.concatenate((sampled, len(decoding) + np.flatnonzero(chunks[:, 3])))
        context = starts + counts
        positions, token_slots = starts, slots
        if plan.chunks:
            positions = np.repeat(starts, counts) + offsets(counts)
            token_slots = np.repeat(slots, counts)
        block_size = self.sizes.block_size
        blocks = self._blocks[token_slots, positions // block_size].astype(np.int64)
        self._computed[slots] = context
        return StepRows(
            slots=slots,
            counts=counts,
            context=context,
            positions=positions,
            token_places=token_slots * self.row_length + positions,
            cache_places=blocks * block_size + positions % block_size,
            sampled=sampled,
            decoding=len(decoding),
        )

    def write(self, places: Tensor, tokens: Tensor, penalties: Penalties | None) -> None:
        """Put sampled tokens (int32 [sampled rows], -1 where there is none) where the next step reads them.

        A row without a token gets token 0, harmless to a step that was already planned for it.
        """
        tokens = tokens.clamp(min=0)
        self.tokens.view(-1).index_copy_(0, places, tokens)
        if penalties is not None:
            chosen = tokens[penalties.rows]
            self.counts.index_put_((penalties.slots, chosen), torch.full_like(chosen, 2), accumulate=True)


def offsets(counts: IntArray) -> IntArray:
    """0 .. count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
