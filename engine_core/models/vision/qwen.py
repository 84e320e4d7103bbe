"""The vision encoders of Qwen2.5-VL, Qwen3-VL and Qwen 3.5: ViTs over whole images of any size, whose patches come cell
by cell and become one row a cell (Qwen2.5-VL, 2025; Qwen3-VL, 2025)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.engine_core.models.layers import Destination, Destinations, Norm, named
from penstock.engine_core.models.parts import Placement
from penstock.engine_core.models.vision.layers import (
    FeedForward,
    PatchEmbedding,
    VisionBlock,
    axial_rotation,
    cells,
    one_segment,
)
from penstock.engine_core.models.vision.tower import Segments, Tower, TowerInput
from penstock.engine_core.models.vision_kinds.qwen import GATED, MERGED, MERGER, PATCHES, PLAIN, level_names
from penstock.engine_core.models.vision_spec import VisionSpec


class Merger:
    """Patches of a cell to an embedding: an MLP over their states side by side, behind a norm of each patch, or of the
    cell."""

    def __init__(self, spec: VisionSpec, names: tuple[str, str, str], placement: Placement, *, of_cell: bool) -> None:
        self.name = names[0]
        self.joined = spec.hidden * spec.merge**2
        self.of_cell = of_cell
        self.norm = Norm(self.joined if of_cell else spec.hidden, spec.norm, placement)
        sizes = self.joined, self.joined, spec.outputs
        self.mlp = FeedForward(sizes, names[1:2], names[2], placement, activation="gelu", bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """`[patches, hidden] -> [cells, outputs]`."""
        if self.of_cell:
            return self.mlp.forward(self.norm.forward(x.view(-1, self.joined)))
        return self.mlp.forward(self.norm.forward(x).view(-1, self.joined))

    def destinations(self) -> Destinations:
        return named((f"{self.name}.", self.norm), ("", self.mlp))


class PositionTable:
    """Learned positions of a square grid, from which those of an image's patches are interpolated, corner to corner."""

    def __init__(self, spec: VisionSpec, placement: Placement) -> None:
        self.side = spec.positions
        self.table = placement.matrix(self.side**2, spec.hidden)

    def forward(self, lines: Tensor, columns: Tensor, size: tuple[int, int]) -> Tensor:
        """Of the patches at `lines, columns  # int64 [patches]` of an image of so many of both: `[patches, hidden]`, in
        the table's type; interpolated in fp32."""
        found = torch.zeros(len(lines), self.table.shape[1], dtype=torch.float32, device=lines.device)
        ways = [self.neighbours(places, count) for places, count in zip((lines, columns), size, strict=True)]
        for line, line_weight in ways[0]:
            for column, column_weight in ways[1]:
                rows = self.table.index_select(0, line * self.side + column)
                found.addcmul_(rows.float(), (line_weight * column_weight)[:, None])
        return found.to(self.table.dtype)

    def neighbours(self, places: Tensor, count: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The places of the grid before and behind each of an axis of `count`, and their weights, fp32 `[patches]`."""
        exact = places.float() * (self.side - 1) / max(1, count - 1)
        low = exact.floor()
        first = low.long()
        return (first, 1 - (exact - low)), ((first + 1).clamp(max=self.side - 1), exact - low)

    def destinations(self) -> Destinations:
        yield "weight", Destination(self.table, tuple(self.table.shape), fan_in=self.table.shape[1])


class QwenTower(Tower):
    """Where `spec.gated`, Qwen2.5-VL's, else Qwen3-VL's and 3.5's."""

    def __init__(self, spec: VisionSpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self.embedding = PatchEmbedding(PATCHES, spec, placement, bias=not spec.gated)
        self.positions = PositionTable(spec, placement) if spec.positions else None
        names = GATED if spec.gated else PLAIN
        self.blocks = tuple(VisionBlock(spec, names, placement) for _ in range(spec.layers))
        self.merger = Merger(spec, MERGED if spec.gated else MERGER, placement, of_cell=False)
        self.levels = {
            layer: Merger(spec, level_names(level), placement, of_cell=True) for level, layer in enumerate(spec.levels)
        }

    def prepare(self, pixels: Tensor) -> TowerInput:
        """See `Tower`. With windows cells stand window by window."""
        spec = self.spec
        height, width = (side // spec.patch for side in pixels.shape[:2])
        lines = torch.arange(height, device=pixels.device)[:, None].expand(height, width)
        columns = torch.arange(width, device=pixels.device).expand(height, width)
        lines, columns = cells(lines, spec.merge), cells(columns, spec.merge)  # [patches] each
        x = self.embedding.forward(pixels)
        if self.positions is not None:
            x = x + self.positions.forward(lines, columns, (height, width))
        whole, order = one_segment(len(x), pixels.device), None
        windows = whole
        if spec.window:
            order, windows = self.windows(height, width, pixels.device)
            x, lines, columns = (self.reordered(part, order) for part in (x, lines, columns))
        return TowerInput(x, whole, windows, axial_rotation(lines, columns, spec.head_dim, spec.theta), order)

    def layers(self, image: TowerInput) -> Iterator[Tensor | None]:
        x, levels = image.x, []
        for layer, block in enumerate(self.blocks):
            x = block.forward(x, image.rotation, image.whole if layer in self.spec.full else image.windows)
            if layer in self.levels:
                levels.append(self.levels[layer].forward(x))
            yield None
        rows = self.merger.forward(x)
        yield torch.cat((rows, *levels), dim=1) if levels else rows

    def reordered(self, x: Tensor, order: Tensor) -> Tensor:
        """Patches `[patches, ...]` with their cells in this order."""
        return x.view(-1, self.spec.merge**2, *x.shape[1:]).index_select(0, order).flatten(0, 1)

    def windows(self, height: int, width: int, device: torch.device) -> tuple[Tensor, Segments]:
        """The cells of an image of so many patches window by window, int64 `[cells]`, and the windows."""
        side, unit = self.spec.window // self.spec.cell, self.spec.merge**2
        lines, columns = height // self.spec.merge, width // self.spec.merge
        grid = torch.arange(lines * columns).view(lines, columns)
        found = [part.flatten() for band in torch.split(grid, side) for part in torch.split(band, side, 1)]
        starts = torch.tensor([0, *(len(part) * unit for part in found)]).cumsum(0, dtype=torch.int32)
        longest = unit * max(len(part) for part in found)
        return torch.cat(found).to(device), Segments(starts.to(device), longest)

    def destinations(self) -> dict[str, Destination]:
        return dict(
            named(
                ("visual.", self.embedding),
                ("visual.pos_embed.", self.positions),
                *((f"visual.blocks.{layer}.", block) for layer, block in enumerate(self.blocks)),
                *(("visual.", merger) for merger in (self.merger, *self.levels.values())),
            )
        )


TOWER = QwenTower
