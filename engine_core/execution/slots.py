"""Slot tables: what the executor keeps of every running request, changed by the small diffs of a plan.

All that a step reads or moves on stands on the device: each slot's tokens and how many they are, its block table, its
sampling parameters and penalty counts. The host keeps which slots decode and how long their block tables are, both of
which follow from plans alone. Slot `max_num_seqs` and block 0 are scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine_core.execution.masks import mask_places
from penstock.engine_core.execution.parameters import NUMBER, SlotParameters
from penstock.engine_core.execution.rows import Column, HostRows, decode_rows, integers, mixed_rows
from penstock.engine_core.execution.transfer import Upload
from penstock.kernels.changes import COUNT_WORDS, COUNTS, HEAD, HEAD_WORDS, PAIR, SlotMemory, change_slots
from penstock.kernels.sampling_tables import PENALTIES, SlotHistory
from penstock.protocol.steps import NOBODY, SlotStart, StepPlan

IntArray = NDArray[np.int64]

PLACE = 1 << 14  # words of changes that a graph carries out: a prompt of 15,000 tokens, or ten short ones


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


class Placement:
    """Changes of the slots on their way to the device.

    On a GPU most go by a graph over a place that stands still: it is launched in a tenth of the time of a kernel.
    """

    def __init__(self, memory: SlotMemory, upload: Upload) -> None:
        self._memory = memory
        self._upload = upload
        self._place: Tensor | None = None  # int32 [PLACE]
        self._graph: torch.cuda.CUDAGraph | None = None  # of changes that stand there
        if upload.device.type == "cuda":
            self._place = torch.zeros(PLACE, dtype=torch.int32, device=upload.device)

    def carry_out(self, words: Column) -> None:
        """Enqueue packed changes, as `kernels.changes` has them."""
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
        self.parameters = SlotParameters(slots, sizes.vocabulary, upload, mask_places(sizes.vocabulary))
        self.history = SlotHistory(
            tokens=torch.zeros(slots, self.row_length, dtype=torch.int32, device=device),
            known=self.parameters.known,
            counts=torch.zeros(slots, sizes.vocabulary, dtype=torch.int32, device=device),
        )
        self.block_tables = torch.zeros(slots, sizes.max_blocks, dtype=torch.int32, device=device)
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
        """Forget every request: a new scheduler knows nothing of them."""
        self._decodes[:] = False
        self._decoding = [self._nobody] * self._microbatches

    def apply(self, plan: StepPlan) -> None:
        """The plan's diffs, in this order: slots that stop decoding, starts, blocks, slots that begin to decode."""
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
        decoding = self._nobody if plan.microbatch == NOBODY else self._decoding[plan.microbatch]
        if not (plan.chunks or plan.drafts):
            return decoding
        if plan.chunks:
            return mixed_rows(decoding.slots, plan)
        key = plan.drafts, plan.draft_ids
        if self._drafted is None or self._drafted[0] is not decoding or self._drafted[1] != key:
            self._drafted = decoding, key, mixed_rows(decoding.slots, plan)
        return self._drafted[2]

    def longest(self, rows: HostRows) -> int:
        """Keys that the longest row may have: what its blocks hold."""
        return int(self._block_counts[rows.slots].max(initial=1)) * self.sizes.block_size

    def _change(self, plan: StepPlan) -> None:
        """Send up what enters slots and what is appended to their tables, all at once."""
        starts = plan.starts
        for start in starts:
            self.prompt_tokens[start.slot] = start.prompt_tokens
            for number in self._decodes[:, start.slot].nonzero()[0].tolist():
                self._decodes[number, start.slot] = False
                self._decoding[number] = decode_rows(self._decodes[number].nonzero()[0].astype(np.int32))
            self._block_counts[start.slot] = len(start.blocks) // NUMBER
        numbers = self.parameters.start(starts)
        pairs = integers(plan.blocks).reshape(-1, 2)
        if starts and len(pairs) and np.isin(pairs[:, 0], [start.slot for start in starts]).any():
            self._send(starts, numbers, pairs[:0])  # the start clears the table that it fills, so it goes first
            starts, numbers = (), []
        self._send(starts, numbers, pairs)
        for start in plan.starts:
            if self.parameters.uses[start.slot] & PENALTIES:
                self._count(start.slot, start.prompt_tokens, len(start.token_ids) // NUMBER)

    def _send(self, starts: Sequence[SlotStart], numbers: Sequence[tuple[float, ...]], pairs: Column) -> None:
        appended = self._append(pairs)
        end = COUNT_WORDS + len(starts) * HEAD_WORDS + appended.size
        heads, contents, longest = [], [], 0
        for start, own in zip(starts, numbers, strict=True):
            tokens, blocks = len(start.token_ids) // NUMBER, len(start.blocks) // NUMBER
            heads.append(HEAD.pack(start.slot, end, tokens, end + tokens, blocks, *own))
            contents += [start.token_ids, start.blocks]
            end += tokens + blocks
            longest = max(longest, tokens)
        counts = COUNTS.pack(len(starts), len(appended), longest, 0)
        words = np.frombuffer(bytearray().join((counts, *heads, appended.tobytes(), *contents)), "<i4")
        self._placement.carry_out(words)

    def _count(self, slot: int, prompt: int, length: int) -> None:
        counts, tokens = self.history.counts[slot].zero_(), self.history.tokens[slot, :length].long()
        counts.index_fill_(0, tokens[:prompt], 1)
        counts.index_add_(0, tokens[prompt:], torch.full_like(tokens[prompt:], 2, dtype=torch.int32))

    def _append(self, pairs: Column) -> Column:
        """Slot, column and block of each that is appended: [blocks, 3], in the order given for each slot."""
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
        appended = np.empty((len(pairs), PAIR), np.int32)
        appended[:, 0], appended[:, 1], appended[:, 2] = slots, columns, pairs[:, 1]
        return appended


def offsets(counts: IntArray) -> IntArray:
    """0 .. count - 1 for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
