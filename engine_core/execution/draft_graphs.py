"""CUDA graphs of drafting: the draft model's first pass, the first draft of each row, and every further one.

The first pass has graphs by its number of tokens, as a step's forward pass has. After it all rows have one token per
iteration: one graph samples the drafts of the first pass; another runs the model on the previous drafts and samples,
and is replayed once for each further draft. They share a memory pool, since they never run at the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine_core.execution.cuda_graphs import (
    MIXED_MOST,
    CaptureOrder,
    ForwardGraphs,
    GraphColumns,
    GraphSizes,
    Memory,
    SamplingShape,
    Shape,
    decode_sizes,
    entry_lengths,
    graph_sizes,
    mixed_sizes,
    nobodys_entries,
    nobodys_inputs,
    sampling_shapes,
    shapes,
)
from penstock.engine_core.execution.forward import Forward, Sampler
from penstock.engine_core.execution.input_batch import (
    HostRows,
    entry_columns,
    entry_padding,
    input_columns,
    input_padding,
)
from penstock.engine_core.execution.transfer import Upload

LACKED = 2  # positions of a row that the draft model usually lacks: see `StepPlan.drafting`


@dataclass(frozen=True)
class Turns:
    """The graphs that sample the first draft of each row and make the next one."""

    begin: torch.cuda.CUDAGraph
    go_on: torch.cuda.CUDAGraph


def draft_sizes(layers: int, weights: int, sizes: GraphSizes, long_pairs: int = 0) -> GraphSizes:
    """For a draft model of so many layers and weights, beside a model with these graphs. The first pass has graphs at
    least up to `LACKED` positions of every row."""
    seqs = sizes.rows
    own = graph_sizes(layers, weights, seqs, MIXED_MOST, sizes.max_context).mixed
    most = max(LACKED * seqs, own[-1] if own else 0)
    mixed = mixed_sizes(2 * max(most, 16))
    return GraphSizes(
        decode=decode_sizes(seqs),
        mixed=mixed[: 1 + bisect_left(mixed, most)],
        entries=decode_sizes(seqs),
        rows=seqs,
        max_context=sizes.max_context,
        long_pairs=long_pairs,
    )


class DraftGraphs:
    """The graphs of one draft model."""

    def __init__(
        self, forward: Forward, sampler: Sampler, sizes: GraphSizes, states: Tensor, scratch: int, upload: Upload
    ) -> None:
        wanted = shapes(sizes)
        self._memory = Memory(upload.device)
        self.first = ForwardGraphs(forward, wanted, states, sizes, scratch, upload, self._memory)
        self.sizes = sizes
        self.states = states  # [entries, hidden]
        self.order = CaptureOrder(wanted, sampling_shapes(sizes))
        self.replays = 0  # of turns
        self._forward, self._sampler = forward, sampler
        self._max_context = sizes.max_context
        self._scratch = scratch
        self._columns = GraphColumns(turn_lengths(len(states)), upload)
        self._turns: dict[int, Turns] = {}

    def capture(self, what: Shape | SamplingShape, *, run: bool) -> None:
        """Capture a first pass, or the two graphs of its further drafts. No step may be between its halves."""
        if isinstance(what, Shape):
            self.first.capture(what, run=run)
        else:
            begin, go_on = (self._memory.capture(work, run=run)[0] for work in self._work(what.entries))
            self._turns[what.entries] = Turns(begin, go_on)

    def dummy_run(self, graphs: Iterable[Shape | SamplingShape]) -> None:
        """Run the work of these graphs once, eagerly."""
        for what in graphs:
            for work in (self.first.work(what),) if isinstance(what, Shape) else self._work(what.entries):
                work()

    def fitting(self, rows: HostRows) -> int:
        """The smallest size that holds the rows of an iteration, 0 if there is none, or none is captured yet."""
        at = bisect_left(self.sizes.entries, rows.rows)
        return self.sizes.entries[at] if self._turns and at < len(self.sizes.entries) else 0

    def replay(self, rows: HostRows, turns: int, size: int) -> None:
        """Enqueue so many drafts of each row, from `states` on."""
        if size not in self._turns:
            self.capture(SamplingShape(size), run=True)
        lengths = turn_lengths(size)
        if not self._columns.hold(rows, lengths):
            columns = *input_columns(rows), *entry_columns(rows, None)
            padding = *input_padding(rows, self._scratch), *entry_padding(rows, self._scratch)
            self._columns.put(rows, columns, lengths, padding)
        graphs = self._turns[size]
        graphs.begin.replay()
        for _ in range(turns - 1):
            graphs.go_on.replay()
        self.replays += turns

    def _work(self, size: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """The work of a size's two graphs, over rows of the scratch slot."""
        columns, split = self._columns.clear(turn_lengths(size)), len(turn_shape(size).lengths())
        inputs = nobodys_inputs(columns[:split], self._scratch)
        entries = nobodys_entries(columns[split:], self._scratch)
        forward, sampler, states, max_context = self._forward, self._sampler, self.states[:size], self._max_context

        def begin() -> object:
            return sampler.run(states, entries, scored=False)

        def go_on() -> object:
            return sampler.run(forward.run(inputs.rows, 1, max_context), entries, scored=False)

        return begin, go_on


def turn_shape(size: int) -> Shape:
    return Shape(size, size, size, True)


def turn_lengths(size: int) -> tuple[int, ...]:
    """Of the columns of a turn: those of its inputs and of its entries."""
    return *turn_shape(size).lengths(), *entry_lengths(size)
