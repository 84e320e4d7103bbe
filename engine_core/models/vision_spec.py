"""A model's vision encoder: what it computes, and how tokens of an image stand in a prompt. Imports no torch."""

from __future__ import annotations

import msgspec

from penstock.engine_core.images.processor_spec import ProcessorSpec, Size


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tower over patches of an image, and the projection of what it makes to embeddings of the decoder.

    An image of a whole number of `cell` pixels on both sides becomes a row of embeddings for each cell, line by line;
    with `pooled` it is one of `pooled` rows whatever its size.
    """

    kind: str  # the module of models/vision that computes it
    token_id: int  # the placeholder in a prompt: each takes the next row of its image
    processor: ProcessorSpec
    patch: int  # pixels of a patch's side
    merge: int = 1  # patches of a side that become one row
    pooled: int = 0
    layers: int
    hidden: int
    heads: int
    width: int  # of the MLP
    outputs: int  # numbers of an embedding: the decoder's hidden size
    # DeepStack (Meng et al., 2024): layers of the tower whose states are added behind the decoder's first layers.
    levels: tuple[int, ...] = ()
    mrope: bool = False  # tokens of an image have positions by line and column (M-RoPE: Qwen2-VL, 2024)
    mutual: bool = False  # tokens of an image see one another both ways

    @property
    def cell(self) -> int:
        """Pixels of the side of what becomes one row."""
        return self.patch * self.merge

    @property
    def row_width(self) -> int:
        """Numbers of a row of the encoder cache: the embedding, then what each DeepStack level adds."""
        return self.outputs * (1 + len(self.levels))

    def grid(self, size: Size) -> Size:
        """Rows of an image, by line and column."""
        return Size(size.height // self.cell, size.width // self.cell)

    def rows(self, size: Size) -> int:
        """Rows of embeddings of an image."""
        height, width = self.grid(size)
        return self.pooled or height * width

    def patches(self, size: Size) -> int:
        """What the tower attends over."""
        return (size.height // self.patch) * (size.width // self.patch)
