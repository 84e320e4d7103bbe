"""A model's vision encoder: what it computes, and how tokens of an image stand in a prompt. Imports no torch."""

from __future__ import annotations

import msgspec

from penstock.engine_core.images.processor_spec import ProcessorSpec, Size
from penstock.engine_core.models.layer_spec import NormSpec

COLORS = 3
LAYER_NORM = NormSpec(eps=1e-6, centered=True)


class ProjectionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """From the encoder's states to embeddings, where that has settings of its own."""

    norm: NormSpec
    activation: str = "gelu"  # of its MLP, if it is one
    bias: bool = False  # of that


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tower over patches of an image, and the projection of what it makes to embeddings of the decoder.

    An image of a whole number of `cell` pixels on both sides becomes a row of embeddings for each cell, line by line;
    with `pooled` it is one of `pooled` rows whatever its size.
    """

    kind: str  # the module of models/vision that computes it, and of models/vision_kinds that reads it
    places: tuple[str, ...] = ("visual.",)  # beginnings of its tensors' names, without that of what wraps the model
    # Beginnings of names, and what files may have in the place of each.
    aliases: tuple[tuple[str, str], ...] = ()
    token_id: int  # the placeholder in a prompt: each takes the next row of its image
    processor: ProcessorSpec
    patch: int  # pixels of a patch's side
    merge: int = 1  # patches of a side that become one row
    pooled: int = 0
    layers: int
    hidden: int
    heads: int
    width: int  # of the MLP
    activation: str = "gelu_tanh"  # of the MLP, of kernels.activation.KINDS
    gated: bool = False  # the MLP is down(activation(gate(x)) * up(x))
    norm: NormSpec = LAYER_NORM
    bias: bool = True  # of products within the layers
    # Of a patch of a film, which the weight of the patch embedding is for: an image is the same frame in each. 0: it is
    # for images alone.
    frames: int = 0
    positions: int = 0  # of a side of the square table of learned positions; 0: there is none
    theta: float = 0.0  # base of rotary positions by line and column; 0: there are none
    # Pixels of a side of the squares within which patches attend, but in those layers that attend over the whole image
    # (Qwen2.5-VL, 2025); 0: all do.
    window: int = 0
    full: tuple[int, ...] = ()
    taken: int = 0  # layers behind which states are taken, though there are more; 0: all
    projection: ProjectionSpec | None = None
    outputs: int  # numbers of an embedding: the decoder's hidden size
    # DeepStack (Meng et al., 2024): layers of the tower whose states are added behind the decoder's first layers.
    levels: tuple[int, ...] = ()
    mrope: bool = False  # tokens of an image have positions by line and column (M-RoPE: Qwen2-VL, 2024)
    mutual: bool = False  # tokens of an image see one another both ways

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def patch_numbers(self) -> int:
        """That the patch embedding reads of a patch."""
        return COLORS * max(1, self.frames) * self.patch**2

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
