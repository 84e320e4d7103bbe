"""Gemma 3's vision encoder: SigLIP over a picture of one size, whose patches are averaged cell by cell and projected.
Source: modeling_siglip.py and Gemma3MultiModalProjector of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from penstock.engine_core.models.layers import Destination, Linear, Norm, named
from penstock.engine_core.models.parts import Placement, whole
from penstock.engine_core.models.vision.layers import PatchEmbedding, VisionBlock, cells, one_segment
from penstock.engine_core.models.vision.tower import Tower, TowerInput
from penstock.engine_core.models.vision_kinds.siglip import (
    LAST_NORM,
    LAYERS,
    NAMES,
    PATCHES,
    PLACE,
    POSITIONS,
    PROJECTION,
    PROJECTION_NORM,
    PROJECTOR,
)
from penstock.engine_core.models.vision_spec import VisionSpec


class SiglipTower(Tower):
    """Each patch of a picture has a learned position of its own."""

    def __init__(self, spec: VisionSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        assert spec.projection is not None, "its reader makes one"
        self.embedding = PatchEmbedding(PATCHES, spec, placement, bias=True)
        self.positions = placement.matrix(spec.positions**2, spec.hidden)  # line by line
        self.blocks = tuple(VisionBlock(spec, NAMES, placement) for _ in range(spec.layers))
        self.last_norm = Norm(spec.hidden, spec.norm, placement)
        self.projection_norm = Norm(spec.hidden, spec.projection.norm, placement)
        self.projection = Linear((whole(PROJECTION, spec.outputs),), spec.hidden, placement, bias=False)

    def prepare(self, pixels: Tensor) -> TowerInput:
        spec, side = self.spec, self.spec.positions
        assert pixels.shape[:2] == (side * spec.patch, side * spec.patch), "the processor's size"
        x = self.embedding.forward(pixels) + cells(self.positions.view(side, side, spec.hidden), spec.merge)
        segments = one_segment(len(x), pixels.device)
        return TowerInput(x, segments, segments)

    def layers(self, image: TowerInput) -> Iterator[Tensor | None]:
        x = image.x
        for block in self.blocks:
            x = block.forward(x, None, image.whole)
            yield None
        states = self.last_norm.forward(x).view(-1, self.spec.merge**2, self.spec.hidden).mean(dim=1)
        yield self.projection.forward(self.projection_norm.forward(states))

    def destinations(self) -> dict[str, Destination]:
        """See `Tower`. Of the projection the checkpoint has the transpose."""
        found = dict(
            named(
                (PLACE, self.embedding),
                *((f"{PLACE}{LAYERS}{layer}.", block) for layer, block in enumerate(self.blocks)),
                (f"{PLACE}{LAST_NORM}.", self.last_norm),
                (f"{PROJECTOR}{PROJECTION_NORM}.", self.projection_norm),
            )
        )
        shape = tuple(self.positions.shape)
        found[f"{PLACE}{POSITIONS}.weight"] = Destination(self.positions, shape, fan_in=shape[1])
        ((_, place),) = self.projection.destinations()
        assert place.tensor is not None, "no encoder is quantized"
        found[f"{PROJECTOR}{PROJECTION}"] = replace(place, tensor=place.tensor.t(), shape=place.shape[::-1])
        return found


TOWER = SiglipTower
