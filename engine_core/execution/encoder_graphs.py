"""CUDA graphs of a vision encoder's layers, for images of any size up to MOST patches.

Patches stand in memory that graphs read, behind them zeros up to a multiple of STEP: a segment of its own, which no
patch of the image attends to. So there is one set of graphs for each multiple, whatever the image's sides, and an image
has the same bits in a graph and out of it. Graphs of some layers each, made when a multiple is met the second time:
between them steps go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine_core.models.memory_estimate import GRAPH_PATCHES
from penstock.engine_core.models.vision.tower import Segments, Tower, TowerInput, in_lines
from penstock.kernels.records import Rotation

STEP = 256  # patches
MOST = GRAPH_PATCHES  # what is beyond takes the device longer than the host takes to launch it
PIECE = 8192  # patches times layers of one graph: about a millisecond of an H200


class Captured(NamedTuple):
    """The graphs of one number of patches, in order, and the rows that the last one writes."""

    graphs: list[torch.cuda.CUDAGraph]
    rows: Tensor


class TowerGraphs:
    """A tower whose layers run on padded patches, and from graphs once those are there. On the stream of its caller,
    which is one and not the default one, and for one image at a time: all graphs share their memory."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self._met: set[int] = set()  # numbers of patches that have run once, so that nothing is loaded in a capture
        self._captured: dict[int, Captured] = {}
        self._pool: Any = None
        self._held: TowerInput | None = None

    def slices(self, pixels: Tensor, *, trial: bool = False) -> Iterator[Tensor | None]:
        """As of `Tower.slices`; a piece of graphs is about PIECE patches times layers. trial: neither from graphs nor
        into them."""
        image = self._tower.prepare(pixels)
        yield None
        count = len(image.x)
        if count > MOST:
            yield from (None if rows is None else in_lines(rows, image) for rows in self._tower.layers(image))
            return
        size = -(-count // STEP) * STEP
        if self._held is None:
            self._held = room(self._tower, image)
        held = padded(self._held, image, size)
        for rows in self._tower.layers(held) if trial else self._run(held, size):
            yield None if rows is None else in_lines(rows[: count // self._tower.spec.merge**2], image)

    def _run(self, held: TowerInput, size: int) -> Iterator[Tensor | None]:
        captured = self._captured.get(size)
        if captured is not None:
            for graph in captured.graphs[:-1]:
                graph.replay()
                yield None
            captured.graphs[-1].replay()
            yield captured.rows
        elif size in self._met and held.x.device.type == "cuda":
            yield from self._capture(held, size)
        else:
            for rows in self._tower.layers(held):
                if rows is not None:  # nobody asks for more behind the rows
                    self._met.add(size)
                yield rows

    def _capture(self, held: TowerInput, size: int) -> Iterator[Tensor | None]:
        """Make the graphs, and replay each as soon as it is made."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        work, graphs = self._tower.layers(held), []
        rows: Tensor | None = None
        while rows is None:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                for _ in range(max(1, PIECE // size)):
                    if (rows := next(work)) is not None:
                        break
            finally:
                graph.capture_end()
            graph.replay()
            graphs.append(graph)
            if rows is not None:
                self._captured[size] = Captured(graphs, rows)
            yield rows


def room(tower: Tower, image: TowerInput) -> TowerInput:
    """Memory for the largest image that graphs serve, like this one."""
    unit = tower.spec.merge**2

    def more(part: Tensor, count: int = MOST) -> Tensor:
        return torch.zeros(count, *part.shape[1:], dtype=part.dtype, device=part.device)

    rotation = None
    if image.rotation is not None:
        rotation = Rotation(more(image.rotation.cos), more(image.rotation.sin))
    whole = Segments(more(image.whole.starts, 3), MOST)
    windows = whole
    if image.windows is not image.whole:  # of one cell or more each
        windows = Segments(more(image.windows.starts, MOST // unit + 2), (tower.spec.window // tower.spec.patch) ** 2)
    return TowerInput(more(image.x), whole, windows, rotation)


def padded(held: TowerInput, image: TowerInput, size: int) -> TowerInput:
    """The image in the memory of `room`, and `size` patches of it."""
    count = len(image.x)
    held.x[:count].copy_(image.x)
    rotation = None
    if held.rotation is not None and image.rotation is not None:
        for own, given in zip(held.rotation[:2], image.rotation[:2], strict=True):
            own[:count].copy_(given)
        rotation = Rotation(held.rotation.cos[:size], held.rotation.sin[:size])
    whole = with_starts(held.whole, image.whole, size, size)
    windows = whole
    if held.windows is not held.whole:
        windows = with_starts(held.windows, image.windows, size, held.windows.longest)
    return TowerInput(held.x[:size], whole, windows, rotation)


def with_starts(held: Segments, given: Segments, size: int, longest: int) -> Segments:
    """The given segments, and what is behind them as one more; further ones are empty. One that is longer than
    `longest` is computed in part, and nobody reads it."""
    count = len(given.starts)
    held.starts[:count].copy_(given.starts)
    held.starts[count:].fill_(size)
    return Segments(held.starts, longest)
