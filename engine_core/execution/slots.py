"""Slot tables: what the executor keeps of every running request, changed by the small diffs of a plan.

All that a step reads or moves on stands on the device: each slot's tokens and how many they are, its block table, its
sampling parameters and penalty counts. The host keeps which slots decode and how long their block tables are, both of
which follow from plans alone. Slot `max_num_seqs` and block 0 are scratch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.execution.masks import mask_places
from engine_core.execution.parameters import SlotParameters
from engine_core.execution.rows import Column, HostRows, decode_rows, integers, mixed_rows
from engine_core.execution.transfer import Upload
from kernels.sampling_tables import PENALTIES, SlotHistory
from protocol.steps import SlotStart, StepPlan

IntArray = NDArray[np.int64]


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

    @property
    def scratch(self) -> int:
        """The slot of nobody."""
        return self.max_num_seqs


class SlotTable:
    """The slots, on device and host."""

    def __init__(self, sizes: SlotSizes, upload: Upload) -> None:
        slots, device = sizes.max_num_seqs + 1, upload.device
        self.sizes = sizes
        self.row_length = sizes.max_model_len + 1  # the last entry takes what an over-scheduled step samples
        self.parameters = SlotParameters(slots, sizes.vocabulary, upload, mask_places(sizes.vocabulary))
        self.history = SlotHistory(
            tokens=torch.zeros(slots, self.row_length, dtype=torch.int32, device=device),
            known=torch.zeros(slots, dtype=torch.int32, device=device),
            counts=torch.zeros(slots, sizes.vocabulary, dtype=torch.int32, device=device),
        )
        self.block_tables = torch.zeros(slots, sizes.max_blocks, dtype=torch.int32, device=device)
        self._flat_tables = self.block_tables.view(-1)
        self.prompt_tokens = np.zeros(slots, np.int64)
        self._block_counts = np.zeros(slots, np.int64)
        self._decodes = np.zeros(slots, bool)
        self._decoding = decode_rows(np.zeros(0, np.int32))
        self._upload = upload

    def reset(self) -> None:
        """Forget every request: a new scheduler knows nothing of them."""
        self._decodes[:] = False
        self._decoding = decode_rows(np.zeros(0, np.int32))

    def apply(self, plan: StepPlan) -> None:
        """The plan's diffs, in this order: slots that stop decoding, starts, blocks, slots that begin to decode."""
        if plan.decode_off:
            self._decodes[integers(plan.decode_off)] = False
        if plan.starts:
            self._start(plan.starts)
        if plan.blocks:
            pairs = integers(plan.blocks).reshape(-1, 2)
            self._append(pairs[:, 0].astype(np.int64), pairs[:, 1])
        if plan.decode_on:
            self._decodes[integers(plan.decode_on)] = True
        if plan.decode_off or plan.decode_on or plan.starts:
            self._decoding = decode_rows(self._decodes.nonzero()[0].astype(np.int32))

    def rows(self, plan: StepPlan) -> HostRows:
        """The step's rows: the same object while the same slots decode and nothing else runs."""
        if not (plan.chunks or plan.drafts):
            return self._decoding
        return mixed_rows(self._decoding.slots, plan)

    def longest(self, rows: HostRows) -> int:
        """Keys that the longest row may have: what its blocks hold."""
        return int(self._block_counts[rows.slots].max(initial=1)) * self.sizes.block_size

    def _start(self, starts: tuple[SlotStart, ...]) -> None:
        slots = np.array([start.slot for start in starts], np.int64)
        tokens = [integers(start.token_ids) for start in starts]
        blocks = [integers(start.blocks) for start in starts]
        lengths = np.array([len(ids) for ids in tokens], np.int64)
        held = np.array([len(given) for given in blocks], np.int64)
        self.prompt_tokens[slots] = [start.prompt_tokens for start in starts]
        self._decodes[slots] = False
        self._block_counts[slots] = held
        new_slots, places, new_tokens, known, block_places, new_blocks = self._upload.send((
            slots,
            np.repeat(slots * self.row_length, lengths) + offsets(lengths),
            np.concatenate(tokens),
            lengths.astype(np.int32),
            np.repeat(slots * self.sizes.max_blocks, held) + offsets(held),
            np.concatenate(blocks),
        ))  # fmt: skip
        self.history.tokens.view(-1).index_copy_(0, places, new_tokens)
        self.history.known.index_copy_(0, new_slots, known)
        self.block_tables.index_fill_(0, new_slots, 0)  # what is not given points at scratch
        self._flat_tables.index_copy_(0, block_places, new_blocks)
        self.parameters.start(starts)
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            if self.parameters.uses[slot] & PENALTIES:
                self._count(slot, int(self.prompt_tokens[slot]), length)

    def _count(self, slot: int, prompt: int, length: int) -> None:
        counts, tokens = self.history.counts[slot].zero_(), self.history.tokens[slot, :length].long()
        counts.index_fill_(0, tokens[:prompt], 1)
        counts.index_add_(0, tokens[prompt:], torch.full_like(tokens[prompt:], 2, dtype=torch.int32))

    def _append(self, slots: IntArray, blocks: Column) -> None:
        """Blocks at the ends of their slots' tables, in the order given for each slot."""
        columns = self._block_counts[slots]
        if len(slots) > 1 and (slots[1:] <= slots[:-1]).any():  # several of a slot, or slots in any order
            order = np.argsort(slots, kind="stable")
            slots, blocks = slots[order], blocks[order]
            _, repeats = np.unique(slots, return_counts=True)
            columns = self._block_counts[slots] + offsets(repeats)
        else:
            blocks = blocks.copy()  # a plan's bytes are read-only
        self._block_counts[slots] = columns + 1  # the last of a slot's wins
        places, new_blocks = self._upload.send((slots * self.sizes.max_blocks + columns, blocks))
        self._flat_tables.index_copy_(0, places, new_blocks)


def offsets(counts: IntArray) -> IntArray:
    """0 .. count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
