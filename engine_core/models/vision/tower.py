"""From a spec to a vision encoder, and what every one of them can do."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine_core.models.layers import Destination, held_bytes
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.kernels.records import Rotation


class Segments(NamedTuple):
    """Patches that attend to one another: patches starts[i] .. starts[i + 1] - 1."""

    starts: Tensor  # int32 [segments + 1]
    longest: int


class TowerInput(NamedTuple):
    """An image in front of a tower's layers."""

    x: Tensor  # [patches, hidden], those of a cell together
    whole: Segments
    windows: Segments  # the same where no layer has windows
    rotation: Rotation | None = None
    order: Tensor | None = None  # int64 [cells], the cell of the image that stands at each place; None: line by line


class Tower(ABC):
    """A vision encoder ready for its weights. Every rank has it whole and computes the same bits: an image is encoded
    by itself."""

    def __init__(self, spec: VisionSpec, placement: Placement) -> None:
        self.spec = spec
        self.placement = placement

    @abstractmethod
    def prepare(self, pixels: Tensor) -> TowerInput:
        """What the layers read of an image, `pixels  # uint8 [height, width, 3]` on the device, whole cells on both
        sides."""

    @abstractmethod
    def layers(self, image: TowerInput) -> Iterator[Tensor | None]:
        """Gives None behind each layer, which is begun and perhaps not done on the device, and at last a row for each
        cell: `[cells, spec.row_width]` in the model's type. Nothing waits for the device, so CUDA graphs may hold it.
        """

    def slices(self, pixels: Tensor) -> Iterator[Tensor | None]:
        """Encode an image, as of `prepare`: None behind each piece of work of about a layer, and the rows at last,
        `[rows, spec.row_width]`, line by line."""
        image = self.prepare(pixels)
        yield None
        for rows in self.layers(image):
            yield None if rows is None else in_lines(rows, image)

    @abstractmethod
    def destinations(self) -> dict[str, Destination]:
        """Where each tensor of a checkpoint goes, by its name there without the `model.` that may stand before."""

    def encode(self, pixels: Tensor) -> Tensor:
        """The rows of an image at once."""
        *_, rows = self.slices(pixels)
        assert rows is not None, "the last slice"
        return rows

    @property
    def weight_bytes(self) -> int:
        return held_bytes(self.destinations().values())


def in_lines(rows: Tensor, image: TowerInput) -> Tensor:
    """Rows of an image's cells `[cells, width]`, perhaps with others behind them, line by line."""
    if image.order is None:
        return rows
    rows = rows[: len(image.order)]
    return torch.empty_like(rows).index_copy_(0, image.order, rows)


def tower(spec: VisionSpec, placement: Placement) -> Tower:
    """An encoder without its weights, whole whatever group the placement is in. The module of its kind has it as
    `TOWER`."""
    made: Tower = importlib.import_module(f"penstock.engine_core.models.vision.{spec.kind}").TOWER(
        spec, placement.alone
    )
    return made
