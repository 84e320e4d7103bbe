"""The layers that vision encoders share: the patch embedding, attention over an image, MLPs, and positions by line and
column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.models.layers import Destinations, Linear, Norm, named
from penstock.engine_core.models.parts import Placement, whole
from penstock.engine_core.models.vision.tower import Segments
from penstock.engine_core.models.vision_kinds import BlockNames
from penstock.engine_core.models.vision_spec import COLORS, VisionSpec
from penstock.kernels.activation import SILU, activate
from penstock.kernels.records import Activation, AttentionOptions, Rotation
from penstock.kernels.rope import rotate_and_store
from penstock.kernels.varlen_attention import varlen_attention

VALUES = 256  # of a pixel's color


def one_segment(count: int, device: torch.device) -> Segments:
    return Segments(torch.tensor([0, count], dtype=torch.int32).to(device), count)


def pixel_table(processor: ProcessorSpec) -> Tensor:
    """What each value of each color becomes, fp32 `[colors, values]`: rescaled in fp64 and normalised in fp32, as the
    image processors of transformers do it."""
    scaled = (torch.arange(VALUES, dtype=torch.float64) * processor.rescale).float()
    mean, std = (torch.tensor(values, dtype=torch.float32)[:, None] for values in (processor.mean, processor.std))
    return (scaled - mean) / std


def cells(grid: Tensor, merge: int) -> Tensor:
    """`[lines, columns, ...] -> [lines * columns, ...]` of patches, in which those of a cell are together."""
    lines, columns, *inner = grid.shape
    found = grid.reshape(lines // merge, merge, columns // merge, merge, *inner)
    return found.transpose(1, 2).flatten(0, 3)


class PatchEmbedding:
    """The product of each patch's numbers, a convolution in the checkpoint: `[hidden, colors, side, side]`, or with
    `spec.frames` behind colors."""

    def __init__(self, name: str, spec: VisionSpec, placement: Placement, *, bias: bool) -> None:
        self.patch, self.merge, self.frames = spec.patch, spec.merge, max(1, spec.frames)
        self.table = pixel_table(spec.processor).to(placement.device)
        self.linear = Linear((whole(name, spec.hidden),), spec.patch_numbers, placement, bias=bias)
        films = (spec.frames,) if spec.frames else ()
        self.shape = (spec.hidden, COLORS, *films, spec.patch, spec.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        """uint8 `[height, width, 3] -> [patches, hidden]`, those of a cell together."""
        return self.linear.forward(self.patches(pixels).to(self.linear.weight.dtype))

    def patches(self, pixels: Tensor) -> Tensor:
        """The numbers of each patch, fp32 `[patches, patch_numbers]`: by color, frame, line and column."""
        colors = torch.arange(COLORS, device=pixels.device)
        values = self.table[colors, pixels.int()]  # [height, width, colors]
        height, width, side = *pixels.shape[:2], self.patch
        grid = values.view(height // side, side, width // side, side, COLORS).permute(0, 2, 4, 1, 3)
        found = cells(grid, self.merge)[:, :, None]  # [patches, colors, 1, side, side]
        return found.expand(-1, -1, self.frames, -1, -1).flatten(1)

    def destinations(self) -> Destinations:
        for name, place in self.linear.destinations():
            if place.fan_in and place.tensor is not None:
                place = replace(place, tensor=place.tensor.view(self.shape), shape=self.shape)
            yield name, place


def axial_rotation(lines: Tensor, columns: Tensor, head_dim: int, theta: float) -> Rotation:
    """Rotary positions of patches `[patches]`: half of a head's pairs turn by the line, half by the column, each with
    the frequencies of a head of half the size (Qwen2-VL, 2024)."""
    half = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    frequencies = frequencies.to(lines.device)
    angles = torch.cat([places[:, None].float() * frequencies for places in (lines, columns)], dim=1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [patches, 1, pairs]
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


class ImageAttention:
    """Attention both ways among the patches of each segment."""

    def __init__(self, spec: VisionSpec, placement: Placement, qkv: Sequence[str], output: str, *, bias: bool) -> None:
        self.heads, self.head_dim = spec.heads, spec.head_dim
        names = [*qkv] * 3 if len(qkv) == 1 else qkv
        parts = tuple(whole(name, spec.hidden) for name in names)
        self.qkv = Linear(parts, spec.hidden, placement, bias=bias)
        self.output = Linear((whole(output, spec.hidden),), spec.hidden, placement, bias=bias)
        self.options = AttentionOptions(spec.head_dim**-0.5)

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        """`[patches, hidden] -> [patches, hidden]`."""
        q, k, v = self.qkv.forward(x).view(len(x), 3 * self.heads, self.head_dim).chunk(3, dim=1)
        if rotation is not None:
            keys, values = (torch.empty(len(x), 1, *k.shape[1:], dtype=x.dtype, device=x.device) for _ in range(2))
            places = torch.arange(len(x), device=x.device)
            q = rotate_and_store(q, k, v, rotation, keys, values, places)
            k, v = keys.flatten(0, 1), values.flatten(0, 1)
        return self.output.forward(varlen_attention(q, k, v, *segments, self.options).flatten(1))

    def destinations(self) -> Destinations:
        return named(("", self.qkv), ("", self.output))


class FeedForward:
    """down(activation(up(x))), or with a gate, whose name comes before that of `up`, down(activation(gate(x)) * up(x)).
    A projection of rows to embeddings is one, too."""

    def __init__(
        self, sizes: tuple[int, int, int], up: Sequence[str], down: str, placement: Placement, *, activation: str,
        bias: bool,
    ) -> None:  # fmt: skip
        """sizes: inputs, width, outputs. up, down: names."""
        inputs, width, outputs = sizes
        self.gated = len(up) > 1
        self.activation = Activation(activation)
        self.up = Linear(tuple(whole(name, width) for name in up), inputs, placement, bias=bias)
        self.down = Linear((whole(down, outputs),), width, placement, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, inputs] -> [rows, outputs]`."""
        if self.gated and self.activation == SILU:
            return self.down.forward(self.up.forward_gated(x))
        return self.down.forward(activate(self.up.forward(x), self.activation, gated=self.gated))

    def destinations(self) -> Destinations:
        return named(("", self.up), ("", self.down))


class VisionBlock:
    """A layer: attention, then an MLP, each behind a norm and added to the residual stream."""

    def __init__(self, spec: VisionSpec, names: BlockNames, placement: Placement) -> None:
        self.names = names
        self.attention_norm, self.mlp_norm = (Norm(spec.hidden, spec.norm, placement) for _ in range(2))
        self.attention = ImageAttention(spec, placement, names.qkv, names.output, bias=spec.bias)
        sizes = spec.hidden, spec.width, spec.hidden
        self.mlp = FeedForward(sizes, names.up, names.down, placement, activation=spec.activation, bias=spec.bias)

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        """`[patches, hidden] -> [patches, hidden]`."""
        delta = self.attention.forward(self.attention_norm.forward(x), rotation, segments)
        normed, x = self.mlp_norm.add(delta, x, partial=False)
        return x + self.mlp.forward(normed)

    def destinations(self) -> Destinations:
        """By names within the layer."""
        names = self.names
        return named(
            (f"{names.attention_norm}.", self.attention_norm),
            ("", self.attention),
            (f"{names.mlp_norm}.", self.mlp_norm),
            ("", self.mlp),
        )
