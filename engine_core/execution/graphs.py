"""CUDA graphs of the two halves of a step, a few sizes of each: a step is padded to the next size that there is.

A graph reads a step's columns from a packed buffer that stands still, and everything else from the slot tables, so one
copy up is all that replaying needs, and a step with the columns of the one before needs none. Padded rows have no
tokens and padded entries belong to the scratch slot. Graphs of one half share a memory pool: they are captured from the
largest down, each into what the one before has left, and never run at the same time. The halves have a pool each,
because what a sampling gave is still on its way to the host while the next forward pass runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from engine_core.execution.forward import Forward
from engine_core.execution.rows import (
    Column,
    HostRows,
    Packing,
    entry_columns,
    entry_padding,
    input_columns,
    input_padding,
    step_inputs,
)
from engine_core.execution.sampler import Sampled, Sampler
from engine_core.execution.transfer import Upload
from kernels.sampling_tables import NO_DRAFT, NO_MASK, Entries

Output = TypeVar("Output")

SMALL = (1, 2, 4, 8)  # decoding rows; from there on in steps that waste at most a third
COMMON = frozenset(1 << power for power in range(13))
LARGEST, USUAL, RARE = 0, 1, 2  # ranks of captures: a server starts with the first two
REHEARSED = frozenset((1, 2, 8, 16, 32, 64, 128, 512))  # sizes of which each may take kernels of its own
DRAFT_SHARE = 4  # a full house samples a draft for one row in four without leaving its graphs
DRAFTED_MOST = 512  # entries that are sampled in a graph where every row may have drafts: each takes a line of logits
MIXED_MOST = 2048  # tokens; beyond it no model is so small that the host would be the limit
HOST_LAYER = 900e-6  # seconds that the host of an H200 took to launch one layer's kernels: 0.5 to 0.9 ms
DEVICE_RATE = 600e12  # FLOP per second that a device reaches over a layer's products


@dataclass(frozen=True)
class GraphSizes:
    """Which graphs there shall be."""

    decode: tuple[int, ...]  # rows, one token each
    mixed: tuple[int, ...]  # tokens of rows of any length
    entries: tuple[int, ...]  # entries that are sampled
    rows: int  # most rows of a step
    max_context: int


def graph_sizes(
    layers: int, weights: int, max_num_seqs: int, step_tokens: int, max_context: int, drafts: int = 0
) -> GraphSizes:
    """For a model of so many layers and weights: steps with chunks or drafts have graphs as far as an eager one would
    wait for the host. drafts: that a draft model makes for a row."""
    few, all_drafted = max_num_seqs + max_num_seqs // DRAFT_SHARE, max_num_seqs * (1 + drafts)
    tokens = int(layers * HOST_LAYER * DEVICE_RATE / (2 * weights))
    return GraphSizes(
        decode=decode_sizes(max_num_seqs),
        mixed=mixed_sizes(min(tokens, MIXED_MOST, step_tokens)),
        entries=decode_sizes(max(few, min(all_drafted, DRAFTED_MOST))),
        rows=max_num_seqs,
        max_context=max_context,
    )


def kept_tokens(sizes: GraphSizes) -> int:
    """Tokens whose hidden states graphs keep for good beside those of the largest."""
    return sum(sizes.decode[:-1]) + sum(sizes.mixed[:-1])


def decode_sizes(most: int) -> tuple[int, ...]:
    """Rows of decode graphs, ascending, the last holding `most`: 1 2 4 8 16 24 32 48 64 96 128 160 192 224 256 .."""
    sizes = [size for size in SMALL if size < most]
    size = 16
    while size < most:
        sizes.append(size)
        size += 8 if size < 32 else 16 if size < 64 else 32 if size < 256 else 64
    return (*sizes, most)


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Tokens of graphs for steps with chunks or drafts, ascending, up to `most`: none when that is 0."""
    sizes, size = [], 16
    while size <= most:
        sizes.append(size)
        size += max(16, 1 << (size.bit_length() - 3))
    return tuple(sizes)


@dataclass(frozen=True)
class Shape:
    """One graph of the first half."""

    tokens: int
    rows: int
    entries: int  # lines that are laid out for the second half
    plain: bool  # one token a row

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the columns of `StepInputs`."""
        return self.rows + 1, self.rows, self.rows, self.tokens, self.entries


def shapes(sizes: GraphSizes) -> tuple[Shape, ...]:
    """Of all graphs of the first half, ascending."""
    most = max(sizes.entries)
    decode = [Shape(size, size, min(size, most), True) for size in sizes.decode]
    return (*decode, *(Shape(size, min(size, sizes.rows), min(size, most), False) for size in sizes.mixed))


def entry_lengths(entries: int) -> tuple[int, ...]:
    """Of the columns of `Entries`."""
    return entries + 1, entries, entries, entries, entries


class GraphStatistics(msgspec.Struct, frozen=True):
    """Captures and replays since the start."""

    captured: int
    waiting: int  # for their capture
    forward_replays: int
    sampling_replays: int


class Memory:
    """What the captures of one half share: a pool, and the stream they are made on."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Run `work` once, so that what it compiles and allocates for good is there, then record it."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            work()
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                output = work()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        return graph, output


class ForwardGraphs:
    """Graphs of the first half. Each lays the hidden states of the step's first entries out in `states`."""

    def __init__(
        self, forward: Forward, wanted: Sequence[Shape], states: Tensor, max_context: int, scratch: int, upload: Upload
    ) -> None:
        self._forward = forward
        self._states = states  # [entries, hidden]
        self._max_context = max_context
        self._scratch = scratch
        self._upload = upload
        self._packing = Packing([max(lengths) for lengths in zip(*(shape.lengths for shape in wanted), strict=True)])
        self._packed = torch.zeros(self._packing.size, dtype=torch.int32, device=upload.device)
        self._captured: dict[bool, list[Shape]] = {True: [], False: []}  # by `plain`, ascending
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sent: tuple[HostRows, Shape] | None = None  # what stands in `_packed`
        self.replays = 0

    def capture(self, shape: Shape, memory: Memory) -> None:
        """Make the graph of one shape, behind whatever runs; `states` are not kept."""
        self._graphs[shape] = memory.capture(self.work(shape))
        insort(self._captured[shape.plain], shape, key=size_of)

    def work(self, shape: Shape) -> Callable[[], Tensor]:
        """What the graph of a shape holds, over rows without tokens; it returns the hidden states of all tokens."""
        self._sent = None
        inputs = step_inputs(self._packing.views(self._packed, shape.lengths))
        self._packed.zero_()
        inputs.rows.slots.fill_(self._scratch)
        forward, states = self._forward, self._states[: shape.entries]
        max_query, max_context = 1 if shape.plain else shape.tokens, self._max_context

        def run() -> Tensor:
            hidden = forward.run(inputs.rows, max_query, max_context)
            torch.index_select(hidden, 0, inputs.last, out=states)
            return hidden

        return run

    def fitting(self, rows: HostRows) -> Shape | None:
        """The smallest captured shape that holds these rows."""
        captured = self._captured[rows.plain]
        at = bisect_left(captured, rows.tokens, key=size_of)
        return captured[at] if at < len(captured) else None

    def replay(self, rows: HostRows, shape: Shape) -> Tensor:
        """Enqueue the forward pass: hidden states `[shape.tokens, hidden]`, good until the next one."""
        if self._sent is None or self._sent[0] is not rows or self._sent[1] is not shape:
            *columns, last = input_columns(rows)
            columns.append(last[: shape.entries])
            packed = self._packing.pack(columns, shape.lengths, input_padding(rows, self._scratch))
            self._upload.put(packed, self._packed)
            self._sent = rows, shape
        graph, hidden = self._graphs[shape]
        graph.replay()
        self.replays += 1
        return hidden


class SamplingGraphs:
    """Graphs of the second half, over the first lines of `states`."""

    def __init__(self, sampler: Sampler, most: int, states: Tensor, scratch: int, upload: Upload) -> None:
        self._sampler = sampler
        self._states = states  # [entries, hidden]
        self._scratch = scratch
        self._upload = upload
        self._packing = Packing(entry_lengths(most))
        self._packed = torch.zeros(self._packing.size, dtype=torch.int32, device=upload.device)
        self._captured: list[int] = []  # entries, ascending
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Sampled]] = {}
        self._sent: tuple[HostRows, int] | None = None  # what stands in `_packed`
        self.replays = 0

    def capture(self, size: int, memory: Memory) -> None:
        """Make the graph of one size, behind whatever runs."""
        self._graphs[size] = memory.capture(self.work(size))
        insort(self._captured, size)

    def work(self, size: int) -> Callable[[], Sampled]:
        """What the graph of a size holds, over entries of the scratch slot."""
        self._sent = None
        entries = Entries(*self._packing.views(self._packed, entry_lengths(size)))
        self._packed.zero_()
        entries.slots.fill_(self._scratch)
        entries.drafts.fill_(NO_DRAFT)
        entries.masks.fill_(NO_MASK)
        sampler, states = self._sampler, self._states[:size]

        def run() -> Sampled:
            return sampler.run(states, entries, scored=True)

        return run

    def fitting(self, rows: HostRows) -> int:
        """The smallest captured size that holds the entries, 0 if there is none."""
        at = bisect_left(self._captured, rows.entries)
        return self._captured[at] if at < len(self._captured) else 0

    def replay(self, rows: HostRows, size: int, masks: Column | None) -> Sampled:
        """Enqueue the sampling: tensors of `size` lines, good until the next one."""
        if masks is not None or self._sent is None or self._sent[0] is not rows or self._sent[1] != size:
            columns = entry_columns(rows, masks)
            packed = self._packing.pack(columns, entry_lengths(size), entry_padding(rows, self._scratch))
            self._upload.put(packed, self._packed)
            self._sent = None if masks is not None else (rows, size)
        graph, sampled = self._graphs[size]
        graph.replay()
        self.replays += 1
        return sampled


class Graphs:
    """The graphs of one executor and the order of their captures: the largest of each kind, common sizes, the rest.
    A stage of a pipeline before the last has none of the second half: it never `samples`."""

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        sizes: GraphSizes,
        states: Tensor,
        scratch: int,
        upload: Upload,
        *,
        samples: bool = True,
    ) -> None:
        wanted = shapes(sizes)
        most = max(sizes.entries)
        self.sizes = sizes
        self.states = states
        self.forward = ForwardGraphs(forward, wanted, states, sizes.max_context, scratch, upload)
        self.sampling = SamplingGraphs(sampler, most, states, scratch, upload)
        self._memory, self._sampling_memory = Memory(upload.device), Memory(upload.device)
        self._captured = 0
        self._waiting = capture_order(wanted, sizes.entries if samples else ())

    @property
    def next_rank(self) -> int:
        """Rank of the next to be captured, beyond all ranks if there is none."""
        return self._waiting[0][0] if self._waiting else RARE + 1

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def capture(self) -> None:
        """Make the next graph. No step may stand between its halves."""
        _, what = self._waiting.popleft()
        if isinstance(what, Shape):
            self.forward.capture(what, self._memory)
        else:
            self.sampling.capture(what, self._sampling_memory)
        self._captured += 1

    def rehearse(self) -> None:
        """Run once what graphs of each kind and of very different sizes hold."""
        for rank, what in tuple(self._waiting):
            if rank == LARGEST or size_of(what) in REHEARSED:
                work = self.forward.work(what) if isinstance(what, Shape) else self.sampling.work(what)
                work()

    def statistics(self) -> GraphStatistics:
        return GraphStatistics(self._captured, len(self._waiting), self.forward.replays, self.sampling.replays)


def capture_order(wanted: Sequence[Shape], entries: Sequence[int]) -> deque[tuple[int, Shape | int]]:
    """Graphs with their rank: the LARGEST of each kind, USUAL sizes, RARE ones. Largest first in each.

    A small one is captured into memory that the large ones have left; and once the largest stand, every step has one.
    """
    kinds: list[list[Shape | int]] = [
        [shape for shape in wanted if shape.plain],
        [shape for shape in wanted if not shape.plain],
        list(entries),
    ]
    ranked = []
    for kind in kinds:
        for what in kind:
            rank = LARGEST if what is kind[-1] else USUAL if size_of(what) in COMMON else RARE
            ranked.append((rank, what))
    ranked.sort(key=lambda pair: (pair[0], -size_of(pair[1])))
    return deque(ranked)


def size_of(what: Shape | int) -> int:
    return what if isinstance(what, int) else what.tokens
