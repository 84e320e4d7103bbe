"""From a spec to a vision encoder, and what every one of them can do."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from penstock.engine_core.models.layers import Destination, Placement, held_bytes
from penstock.engine_core.models.vision_spec import VisionSpec


class Tower(ABC):
    """A vision encoder ready for its weights. Every rank has it whole and computes the same bits: an image is encoded
    by itself."""

    def __init__(self, spec: VisionSpec, placement: Placement) -> None:
        self.spec = spec
        self.placement = placement

    @abstractmethod
    def slices(self, pixels: Tensor) -> Iterator[Tensor | None]:
        """Encode an image, `pixels  # uint8 [height, width, 3]` on the device, whole cells on both sides.

        Gives None behind each piece of work of about a layer, which is begun and perhaps not done on the device, and
        the rows at last: `[rows, spec.row_width]` in the model's type.
        """

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


def tower(spec: VisionSpec, placement: Placement) -> Tower:
    """An encoder without its weights, whole whatever group the placement is in. The module of its kind has it as
    `TOWER`."""
    made: Tower = importlib.import_module(f"penstock.engine_core.models.vision.{spec.kind}").TOWER(
        spec, placement.alone
    )
    return made
