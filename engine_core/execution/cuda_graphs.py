"""CUDA graphs of the two halves of a step, in a few sizes each: a step is padded to the next captured size.

A graph reads a step's columns from a fixed packed buffer, and everything else from the slot tables, so a replay needs
one upload, and none where the columns are those of the previous step. Padded rows have no tokens, padded entries belong
to the scratch slot. Graphs of one half share a memory pool: they are captured from the largest down, each into the
memory that earlier ones have freed, and never run at the same time. Each half has its own pool, because samples are
still being downloaded while the next forward pass runs. After a wake only the largest, which decide the memory, are
captured before the first step; others are when a step first needs them, which takes that step some 50 ms longer.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from penstock.engine_core.execution.forward import Forward, Sampled, Sampler, StepImages
from penstock.engine_core.execution.image_slots import ImageSlots
from penstock.engine_core.execution.input_batch import (
    Column,
    HostRows,
    Packing,
    StepInputs,
    entry_columns,
    entry_padding,
    input_columns,
    input_padding,
    step_inputs,
)
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.models.spec import ModelSpec
from penstock.kernels.records import NO_DRAFT, NO_MASK, Entries
from penstock.protocol.steps import NO_STATE

Output = TypeVar("Output")
SMALL = (1, 2, 4, 8)  # decoding rows; larger sizes waste at most a third
FEWEST = 8  # tokens of a graph for steps with chunks or drafts: one row's drafts
PREWARMED_SIZES = frozenset((1, 2, 8, 16, 32, 64, 128, 512))  # each may take kernels of its own
DRAFT_SHARE = 4  # with all slots running, one row in four may have a draft within the graphs
DRAFTED_MOST = 512  # entries of a sampling graph where every row may have drafts: each takes a row of logits
SEEING = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)  # tokens of graphs where images change a step
MIXED_MOST = 2048  # tokens; no model is so small that larger steps would wait for the host
HOST_LAYER = 900e-6  # seconds that the host of an H200 took to launch one layer's kernels: 0.5 to 0.9 ms
HOST_RECURRENCE = 1400e-6  # and those of a recurrent layer
DEVICE_RATE = 700e12  # FLOP/s that a device reaches in a layer's products
ABSORBED_RATE = 100e12  # and in attention by absorbed queries: what a prompt of 8,192 on an H200 comes to


class Memory:
    """The memory pool and the capture stream of one half."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        urgent = torch.cuda.current_stream(device).priority  # kernels of a graph have that of its capture
        self.stream = torch.cuda.Stream(device, priority=urgent)  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], Output], *, run: bool) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Capture `work`, all of whose kernels are loaded; with `run` it runs once first, so that permanent allocations
        of the stream belong to no graph."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            if run:
                work()
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                output = work()
            finally:
                graph.capture_end()
        current.wait_stream(self.stream)
        return graph, output


class GraphColumns:
    """The packed buffer from which graphs read the columns of a step."""

    def __init__(self, room: Sequence[int], upload: Upload) -> None:
        self._packing = Packing(room)
        self._packed = torch.zeros(self._packing.size, dtype=torch.int32, device=upload.device)
        self._upload = upload
        self._held: tuple[HostRows | None, tuple[int, ...]] = None, ()  # with their padded lengths

    def clear(self, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Columns of these lengths, all zeros, for a capture."""
        self._held = None, ()
        self._packed.zero_()
        return tuple(self._packing.views(self._packed, lengths))

    def hold(self, rows: HostRows, lengths: tuple[int, ...]) -> bool:
        """Whether the buffer holds these rows already, padded to these lengths."""
        return self._held[0] is rows and self._held[1] == lengths

    def put(
        self, rows: HostRows | None, columns: Sequence[Column], lengths: tuple[int, ...], padding: Sequence[int]
    ) -> None:
        """Send the columns of a step. rows: None if no later step can have the same."""
        self._upload.put(self._packing.pack(columns, lengths, padding), self._packed)
        self._held = rows, lengths


class ForwardGraphs:
    """Graphs of the first half. Each gathers the hidden states of the step's first entries in `states`."""

    def __init__(
        self, forward: Forward, wanted: Sequence[Shape], states: Tensor, sizes: GraphSizes, scratch: int,
        upload: Upload, memory: Memory, images: ImageSlots | None = None,
    ) -> None:  # fmt: skip
        self._forward = forward
        self._memory = memory
        self._states = states  # [entries, hidden]
        self._sizes = sizes
        self._scratch = scratch
        room = [max(lengths) for lengths in zip(*map(self._lengths, wanted), strict=True)]
        self._columns = GraphColumns(room, upload)
        self._images: tuple[ImageSlots, GraphColumns] | None = None
        if images is not None and images.padding and sizes.seeing:
            self._images = images, GraphColumns([max(sizes.seeing)] * len(images.padding), upload)
        # By `plain`, `adapted` and `seeing`, ascending.
        self._wanted: defaultdict[tuple[bool, bool, bool], list[Shape]] = defaultdict(list)
        for shape in wanted:
            self._wanted[shape.plain, shape.adapted, shape.seeing].append(shape)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, shape: Shape, *, run: bool) -> None:
        """Capture the graph of one shape, in stream order; with `run` it overwrites `states`."""
        self._graphs[shape] = self._memory.capture(self.work(shape), run=run)

    def work(self, shape: Shape) -> Callable[[], Tensor]:
        """The work of a shape's graph, over rows without tokens; it returns the hidden states of all tokens."""
        inputs = nobodys_inputs(self._columns.clear(self._lengths(shape)), self._scratch)
        forward, states = self._forward, self._states[: shape.entries]
        max_query, max_context = 1 if shape.plain else shape.tokens, self._sizes.max_context
        images: StepImages | None = None
        if shape.seeing and self._images is not None:
            slots, columns = self._images
            images = slots.placed(columns.clear((shape.tokens,) * len(slots.padding)))

        def run() -> Tensor:
            chunks = 0 if shape.plain else shape.rows
            hidden = forward.run(inputs.rows, max_query, max_context, chunks, adapted=shape.adapted, images=images)
            torch.index_select(hidden, 0, inputs.last, out=states)
            return hidden

        return run

    def fitting(self, rows: HostRows, *, adapted: bool = False, seeing: bool = False) -> Shape | None:
        """The smallest shape that holds these rows; None, too, before any is captured. A recurrent layer does not take
        a chunk for a step. Graphs absorb all queries, so long rows that see many keys are faster without one.
        seeing: images change the step."""
        if not self._graphs or (self._sizes.long_pairs and rows.long_pairs > self._sizes.long_pairs):
            return None
        chunks = self._forward.states is not None and rows.decoding < rows.rows
        return smallest(self._wanted[rows.plain and not (chunks or seeing), adapted, seeing], rows.tokens)

    def replay(self, rows: HostRows, shape: Shape, images: Sequence[Column] = ()) -> Tensor:
        """Enqueue the forward pass: hidden states `[shape.tokens, hidden]`, valid until the next replay. images: as of
        `ImageSlots.step`, where the shape is for them."""
        if shape not in self._graphs:
            self.capture(shape, run=True)
        lengths = self._lengths(shape)
        if not self._columns.hold(rows, lengths):
            *columns, last = input_columns(rows)
            columns.append(last[: shape.entries])
            self._columns.put(rows, columns, lengths, input_padding(rows, self._scratch))
        if images and self._images is not None:
            slots, image_columns = self._images
            image_columns.put(None, images, (shape.tokens,) * len(images), slots.padding)
        graph, hidden = self._graphs[shape]
        graph.replay()
        self.replays += 1
        return hidden

    def _lengths(self, shape: Shape) -> tuple[int, ...]:
        return shape.lengths(recurrent=self._forward.states is not None)


class SamplingGraphs:
    """Graphs of the second half, over the first rows of `states`."""

    def __init__(
        self, sampler: Sampler, wanted: Sequence[SamplingShape], states: Tensor, scratch: int, upload: Upload
    ) -> None:
        self._sampler = sampler
        self._wanted = [[shape for shape in wanted if shape.adapted is adapted] for adapted in (False, True)]
        self._states = states  # [entries, hidden]
        self._scratch = scratch
        self._memory = Memory(upload.device)
        self._columns = GraphColumns(entry_lengths(max(map(size_of, wanted), default=0)), upload)
        self._graphs: dict[SamplingShape, tuple[torch.cuda.CUDAGraph, Sampled]] = {}
        self.replays = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(self, shape: SamplingShape, *, run: bool) -> None:
        """Capture the graph of one shape, in stream order."""
        self._graphs[shape] = self._memory.capture(self.work(shape), run=run)

    def work(self, shape: SamplingShape) -> Callable[[], Sampled]:
        """The work of a shape's graph, over entries of the scratch slot."""
        entries = nobodys_entries(self._columns.clear(entry_lengths(shape.entries)), self._scratch)
        sampler, states = self._sampler, self._states[: shape.entries]

        def run() -> Sampled:
            return sampler.run(states, entries, scored=True, adapted=shape.adapted)

        return run

    def fitting(self, rows: HostRows, *, adapted: bool = False) -> SamplingShape | None:
        """The smallest shape that holds the entries; None, too, before any is captured."""
        return smallest(self._wanted[adapted], rows.entries) if self._graphs else None

    def replay(self, rows: HostRows, shape: SamplingShape, masks: Column | None) -> Sampled:
        """Enqueue the sampling: tensors of `shape.entries` rows, valid until the next replay."""
        if shape not in self._graphs:
            self.capture(shape, run=True)
        lengths = entry_lengths(shape.entries)
        if masks is not None or not self._columns.hold(rows, lengths):
            lasting = rows if masks is None else None
            self._columns.put(lasting, entry_columns(rows, masks), lengths, entry_padding(rows, self._scratch))
        graph, sampled = self._graphs[shape]
        graph.replay()
        self.replays += 1
        return sampled


class Graphs:
    """The graphs of one executor. A stage of a pipeline before the last has none of the second half: it never
    `samples`."""

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
        images: ImageSlots | None = None,
    ) -> None:
        wanted, sampling = shapes(sizes), sampling_shapes(sizes) if samples else ()
        self.sizes = sizes
        self.states = states
        self.forward = ForwardGraphs(forward, wanted, states, sizes, scratch, upload, Memory(upload.device), images)
        self.sampling = SamplingGraphs(sampler, sampling, states, scratch, upload)
        self.order = CaptureOrder(wanted, sampling)

    def capture(self, what: Shape | SamplingShape, *, run: bool) -> None:
        """Capture a graph. No step may be between its halves."""
        if isinstance(what, Shape):
            self.forward.capture(what, run=run)
        else:
            self.sampling.capture(what, run=run)

    def dummy_run(self, graphs: Iterable[Shape | SamplingShape]) -> None:
        """Run the work of these graphs once, eagerly."""
        for what in graphs:
            work = self.forward.work(what) if isinstance(what, Shape) else self.sampling.work(what)
            work()


def nobodys_inputs(columns: Iterable[Tensor], scratch: int) -> StepInputs:
    """Rows without tokens over zeroed columns, for a capture."""
    inputs = step_inputs(columns)
    inputs.rows.slots.fill_(scratch)
    if inputs.rows.kept is not None:
        inputs.rows.kept.fill_(NO_STATE)
    return inputs


def nobodys_entries(columns: Iterable[Tensor], scratch: int) -> Entries:
    """Entries of the scratch slot over zeroed columns, for a capture."""
    entries = Entries(*columns)
    entries.slots.fill_(scratch)
    entries.drafts.fill_(NO_DRAFT)
    entries.masks.fill_(NO_MASK)
    return entries


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of graphs to capture."""

    decode: tuple[int, ...]  # rows, one token each
    mixed: tuple[int, ...]  # tokens of rows of any length
    entries: tuple[int, ...]  # entries that are sampled
    rows: int  # most rows of a step
    max_context: int
    adapters: bool = False  # each has a twin for steps in which a row has an adapter
    long_pairs: int = 0  # of queries of long rows and keys, in steps that have graphs; 0: any
    seeing: tuple[int, ...] = ()  # of `mixed`, those with a twin for steps that images change


def graph_sizes(
    layers: int, weights: int, max_num_seqs: int, step_tokens: int, max_context: int, drafts: int = 0, *,
    recurrent: int = 0, adapters: bool = False, long_pairs: int = 0, images: bool = False,
) -> GraphSizes:  # fmt: skip
    """For a model of so many layers, of which some are recurrent, and weights: steps with chunks or drafts have graphs
    up to the size at which an eager step no longer waits for the host. drafts: of a draft model for a row."""
    few, all_drafted = max_num_seqs + max_num_seqs // DRAFT_SHARE, max_num_seqs * (1 + drafts)
    launching = (layers - recurrent) * HOST_LAYER + recurrent * HOST_RECURRENCE
    tokens = int(launching * DEVICE_RATE / (2 * weights))
    mixed = mixed_sizes(min(tokens, MIXED_MOST, step_tokens))
    return GraphSizes(
        decode=decode_sizes(max_num_seqs),
        mixed=mixed,
        entries=decode_sizes(max(few, min(all_drafted, DRAFTED_MOST))),
        rows=max_num_seqs,
        max_context=max_context,
        adapters=adapters,
        long_pairs=long_pairs,
        seeing=tuple(size for size in mixed if size in SEEING or size == mixed[-1]) if images else (),
    )


def absorbed_pairs(spec: ModelSpec, ranks: int) -> int:
    """Pairs of a query and a key that take a layer of latent attention by absorbed queries as long on the device as the
    host takes to launch a layer; 0: there is no such layer. ranks: that share the heads."""
    found = [own for own in spec.attentions if own.latent is not None]
    flops = max((2 * own.heads // ranks * (own.head_dim + own.latent.rank) for own in found if own.latent), default=0)
    return int(HOST_LAYER * ABSORBED_RATE / flops) if flops else 0


def kept_tokens(sizes: GraphSizes) -> int:
    """Tokens whose hidden states graphs keep permanently, besides those of the largest graphs."""
    return (sum(sizes.decode[:-1]) + sum(sizes.mixed[:-1]) + sum(sizes.seeing[:-1])) * (1 + sizes.adapters)


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
    sizes, size = [FEWEST] if most >= FEWEST else [], 16
    while size <= most:
        sizes.append(size)
        size += max(16, 1 << (size.bit_length() - 3))
    return tuple(sizes)


@dataclass(frozen=True)
class Shape:
    """One graph of the first half."""

    tokens: int
    rows: int
    entries: int  # rows that are gathered for the second half
    plain: bool  # one token a row
    adapted: bool = False  # a row may have an adapter
    seeing: bool = False  # images change the step

    def lengths(self, *, recurrent: bool = False) -> tuple[int, ...]:
        """Of the columns of `StepInputs`. States of recurrent layers are kept within chunks."""
        kept = self.tokens if recurrent and not self.plain else 0
        return self.rows + 1, self.rows, self.rows, self.tokens, kept, self.entries


def shapes(sizes: GraphSizes) -> tuple[Shape, ...]:
    """Of all graphs of the first half, ascending."""
    most = max(sizes.entries)
    decode = [Shape(size, size, min(size, most), True) for size in sizes.decode]
    found = (*decode, *(Shape(size, min(size, sizes.rows), min(size, most), False) for size in sizes.mixed))
    seeing = [replace(shape, seeing=True) for shape in found[len(decode) :] if shape.tokens in sizes.seeing]
    found = (*found, *seeing)
    return *found, *(replace(shape, adapted=True) for shape in found if sizes.adapters)


@dataclass(frozen=True)
class SamplingShape:
    """One graph of the second half."""

    entries: int
    adapted: bool = False  # a row may have an adapter


def sampling_shapes(sizes: GraphSizes) -> tuple[SamplingShape, ...]:
    """Of all graphs of the second half, ascending."""
    twins = (False, True)[: 1 + sizes.adapters]
    return tuple(SamplingShape(entries, adapted) for adapted in twins for entries in sizes.entries)


def entry_lengths(entries: int) -> tuple[int, ...]:
    """Of the columns of `Entries`."""
    return entries + 1, entries, entries, entries, entries


class CaptureOrder:
    """The graphs of one model: the largest of each kind, and all others; largest first in both.

    Small graphs are captured into memory that large ones have freed, so the largest decide how much there is.
    """

    def __init__(self, wanted: Sequence[Shape], sampling: Sequence[SamplingShape]) -> None:
        kinds: list[list[Shape | SamplingShape]] = [
            [shape for shape in wanted if (shape.plain, shape.adapted, shape.seeing) == kind]
            for kind in itertools.product((True, False), (False, True), (False, True))
        ]
        kinds += [[shape for shape in sampling if shape.adapted is adapted] for adapted in (False, True)]
        self.largest = sorted((kind[-1] for kind in kinds if kind), key=size_of, reverse=True)
        self.others = sorted((what for kind in kinds for what in kind[:-1]), key=size_of, reverse=True)

    @property
    def all(self) -> list[Shape | SamplingShape]:
        return [*self.largest, *self.others]

    @property
    def prewarmed(self) -> list[Shape | SamplingShape]:
        """Graphs of each kind and of very different sizes: all that may take kernels of their own."""
        return [*self.largest, *(what for what in self.others if size_of(what) in PREWARMED_SIZES)]


def size_of(what: Shape | SamplingShape) -> int:
    return what.entries if isinstance(what, SamplingShape) else what.tokens


Sized = TypeVar("Sized", Shape, SamplingShape)


def smallest(ascending: Sequence[Sized], size: int) -> Sized | None:
    """The smallest that holds so much."""
    at = bisect_left(ascending, size, key=size_of)
    return ascending[at] if at < len(ascending) else None
