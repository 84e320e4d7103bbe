"""The vision encoder of Mistral 3: Pixtral's, over pictures of any size. Patches come cell by cell and are merged.
Source: modeling_pixtral.py and Mistral3MultiModalProjector of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.engine_core.models.layers import Destination, Linear, Norm, named
from penstock.engine_core.models.parts import Placement, whole
from penstock.engine_core.models.vision.layers import FeedForward, PatchEmbedding, VisionBlock, cells, one_segment
from penstock.engine_core.models.vision.tower import Tower, TowerInput
from penstock.engine_core.models.vision_kinds.pixtral import (
    DOWN,
    FIRST_NORM,
    LAYERS,
    MERGER,
    NAMES,
    PATCHES,
    PLACE,
    PROJECTION_NORM,
    PROJECTOR,
    UP,
)
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.kernels.records import Rotation


def alternating_rotation(lines: Tensor, columns: Tensor, head_dim: int, theta: float) -> Rotation:
    """Rotary positions of patches `[patches]`: a head's frequencies go to lines and columns in turn, and the first half
    of its pairs are those of lines."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    frequencies = frequencies.to(lines.device)
    angles = [places[:, None].float() * frequencies[first::2] for first, places in enumerate((lines, columns))]
    turned = torch.cat(angles, dim=1)
    cos, sin = turned.cos()[:, None], turned.sin()[:, None]  # [patches, 1, pairs]
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


class PixtralTower(Tower):
    """RMS norms, MLPs with a gate, no biases."""

    def __init__(self, spec: VisionSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        assert spec.projection is not None, "its reader makes one"
        joined = spec.hidden * spec.merge**2
        self.embedding = PatchEmbedding(PATCHES, spec, placement, bias=False)
        self.first_norm = Norm(spec.hidden, spec.norm, placement)
        self.blocks = tuple(VisionBlock(spec, NAMES, placement) for _ in range(spec.layers))
        self.projection_norm = Norm(spec.hidden, spec.projection.norm, placement)
        self.merger = Linear((whole(MERGER, spec.hidden),), joined, placement, bias=False)
        self.projection = FeedForward(
            (spec.hidden, spec.outputs, spec.outputs), (UP,), DOWN, placement,
            activation=spec.projection.activation, bias=spec.projection.bias,
        )  # fmt: skip

    def prepare(self, pixels: Tensor) -> TowerInput:
        spec = self.spec
        places = (torch.arange(side // spec.patch, device=pixels.device) for side in pixels.shape[:2])
        lines, columns = (cells(grid, spec.merge) for grid in torch.meshgrid(*places, indexing="ij"))  # [patches] each
        x = self.first_norm.forward(self.embedding.forward(pixels))
        segments = one_segment(len(x), pixels.device)
        return TowerInput(x, segments, segments, alternating_rotation(lines, columns, spec.head_dim, spec.theta))

    def layers(self, image: TowerInput) -> Iterator[Tensor | None]:
        x = image.x
        for block in self.blocks[: self.spec.taken or None]:
            x = block.forward(x, image.rotation, image.whole)
            yield None
        found = self.projection_norm.forward(x).view(-1, self.spec.merge**2, self.spec.hidden)
        joined = found.transpose(1, 2).flatten(1)  # [cells, hidden * patches of a cell]: as unfold has them
        yield self.projection.forward(self.merger.forward(joined))

    def destinations(self) -> dict[str, Destination]:
        """By names in a checkpoint."""
        return dict(
            named(
                (PLACE, self.embedding),
                (f"{PLACE}{FIRST_NORM}.", self.first_norm),
                *((f"{PLACE}{LAYERS}{layer}.", block) for layer, block in enumerate(self.blocks)),
                (f"{PROJECTOR}{PROJECTION_NORM}.", self.projection_norm),
                (PROJECTOR, self.merger),
                (PROJECTOR, self.projection),
            )
        )


TOWER = PixtralTower
