"""The vision encoder beside the steps: a picture at a time, a piece of about a layer at a time.

On a GPU pieces run on a stream of their own, beside the steps' kernels. Rows of the cache may be read by steps that are
enqueued once the last piece is seen to have ended. On a CPU a piece runs where it is launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.encoder_graphs import TowerGraphs
from penstock.engine_core.execution.forward import zeros
from penstock.engine_core.execution.input_batch import Column
from penstock.engine_core.execution.transfer import Upload
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.memory_estimate import GRAPH_PATCHES
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.vision_cost import tower_step_bytes
from penstock.engine_core.models.vision_spec import COLORS
from penstock.protocol.images import EncodeImage


@dataclass(frozen=True)
class Piece:
    """A part of a picture's work that is enqueued, or done on a CPU."""

    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None
    last: bool

    @property
    def finished(self) -> bool:
        return self.ended is None or bool(self.ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """That a finished piece took on the device; 0 on a CPU."""
        if self.began is None or self.ended is None:
            return 0.0
        return float(self.began.elapsed_time(self.ended)) / 1000


class Encoder:
    """A tower and the encoder cache: `cache  # [rows, spec.row_width]` in the model's type. On a GPU the tower runs
    from CUDA graphs unless it is `eager`."""

    def __init__(self, tower: Tower, rows: int, *, eager: bool = False) -> None:
        device, dtype = tower.placement.device, tower.placement.dtype
        self.tower = tower
        self._graphs = None if eager or device.type != "cuda" else TowerGraphs(tower)
        self.cache = zeros((rows, tower.spec.row_width), dtype, device)
        self._upload = Upload(device, buffers=1)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which makes weights and cache
        self._finite = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")
        self._pieces: Iterator[bool] | None = None  # of the picture at hand; True with the last
        self._trouble = ""

    def begin(self, image: EncodeImage) -> None:
        """Take a picture up, and leave the one at hand. Nothing is enqueued yet."""
        self._trouble = ""
        self._pieces = self._work(image, trial=False)

    @torch.inference_mode()
    def launch(self) -> Piece:
        """Enqueue the next piece of the picture. Raises torch.OutOfMemoryError, and what the tower does; it is left
        then, and `begin` must follow."""
        assert self._pieces is not None, "a picture has begun"
        with torch.cuda.stream(self._stream):  # of None: nothing happens
            began, pieces, self._pieces = self._mark(), self._pieces, None
            last = next(pieces)
            self._pieces = None if last else pieces
            return Piece(began, self._mark(), last)

    def share(self, group: Group, images: Column) -> None:
        """Give every rank what one has encoded, on the current stream: int32 [images, 3], rank, first row, rows."""
        for rank, first, count in images.tolist():
            group.broadcast(self.cache[first : first + count], rank)

    def trouble(self) -> str:
        """Once the last piece has finished: why its rows are not to be read, empty where they are."""
        return self._trouble or ("" if self._finite.item() else "its embeddings are not finite numbers")

    def leave(self) -> None:
        """Take nothing more of the picture up. What is enqueued ends before anything of the next begins."""
        self._pieces = None

    @property
    def graph_bytes(self) -> int:
        """What graphs will hold: an estimate."""
        spec, item_bytes = self.tower.spec, self.cache.itemsize
        return 0 if self._graphs is None else tower_step_bytes(spec, GRAPH_PATCHES, item_bytes)

    def dummy_run(self, size: Size) -> None:
        """Enqueue all of a black picture of this size. Its rows are not kept, nor is a graph made of it."""
        pixels = bytes(COLORS * size.width * size.height)
        blank = EncodeImage(number=0, first_row=0, rows=0, width=size.width, height=size.height, pixels=pixels)
        self._pieces = self._work(blank, trial=True)
        while not self.launch().last:
            pass
        self.leave()

    def _work(self, image: EncodeImage, *, trial: bool) -> Iterator[bool]:
        pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, COLORS)
        (sent,) = self._upload.send((pixels.copy(),))
        yield False
        graphs = self._graphs
        for rows in self.tower.slices(sent) if graphs is None else graphs.slices(sent, trial=trial):
            if rows is not None:
                self._store(rows, image)
            yield rows is not None

    def _store(self, rows: Tensor, image: EncodeImage) -> None:
        self._finite.copy_(rows.isfinite().all(), non_blocking=True)
        if len(rows) != image.rows:
            self._trouble = f"it has {len(rows)} rows of embeddings, not {image.rows}"
            return
        self.cache[image.first_row : image.first_row + image.rows].copy_(rows)

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
