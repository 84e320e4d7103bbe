"""What a model's image processor does with pictures: how they are resized, and what pixels become. Imports no torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

Triple = tuple[float, float, float]

BICUBIC = 3  # of Pillow's `Resampling`
SHARPEST = 200  # most that one side may be of the other: Qwen's processors refuse more
LOW_EDGE = 512  # pixels: what OpenAI's API shows a model at low detail


class Size(NamedTuple):
    """Pixels of a picture."""

    height: int
    width: int


class SmartResize(msgspec.Struct, frozen=True, tag=True):
    """Qwen's: both sides multiples of `factor`, near the picture's own shape, with `least` to `most` pixels in all.
    Source: smart_resize of transformers' qwen2_vl. The defaults are those of its processor class."""

    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    factor: int = 28

    @property
    def sharpest(self) -> int:
        """Most that one side may be of the other."""
        return SHARPEST

    def target(self, size: Size) -> Size | None:
        """None: the picture is too long for its width, or too wide for its height."""
        height, width = size
        factor = self.factor
        if max(size) / min(size) > SHARPEST:
            return None
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > self.most:
            shrunk = math.sqrt((height * width) / self.most)
            high = max(factor, math.floor(height / shrunk / factor) * factor)
            wide = max(factor, math.floor(width / shrunk / factor) * factor)
        elif high * wide < self.least:
            grown = math.sqrt(self.least / (height * width))
            high, wide = (math.ceil(side * grown / factor) * factor for side in size)
        return Size(high, wide)


class FixedSize(msgspec.Struct, frozen=True, tag=True):
    """Every picture becomes one of this size, whatever its shape."""

    height: int
    width: int

    def target(self, size: Size) -> Size | None:
        return Size(self.height, self.width)

    @property
    def sharpest(self) -> int:
        """Most that one side may be of the other; 0: no matter."""
        return 0


class LongestEdge(msgspec.Struct, frozen=True, tag=True):
    """Pixtral's: pictures are made smaller until they fit `height` by `width`, then each side grows to a multiple of
    `factor`. Source: get_resize_output_image_size of transformers' pixtral."""

    height: int
    width: int
    factor: int

    @property
    def sharpest(self) -> int:
        """Most that one side may be of the other."""
        return min(self.height, self.width)

    def target(self, size: Size) -> Size | None:
        """None: a side would vanish."""
        ratio = max(size.height / self.height, size.width / self.width)
        if ratio > 1:
            size = Size(math.floor(size.height / ratio), math.floor(size.width / ratio))
        return Size(*(((side - 1) // self.factor + 1) * self.factor for side in size)) if min(size) > 0 else None


Resize = SmartResize | FixedSize | LongestEdge


class ProcessorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The arithmetic of one image processor of transformers. A number of a pixel is (value * rescale - mean) / std of
    its channel in fp32, where value * rescale is a product of doubles that is rounded once."""

    mean: Triple
    std: Triple
    rescale: float = 1 / 255
    resize: Resize = SmartResize()
    resample: int = BICUBIC  # of Pillow's `Resampling`

    def target(self, size: Size, detail: str) -> Size | None:
        """What a picture is resized to, in one step; None if its shape is beyond what the model takes.

        Detail `low` has a picture first fit 512 by 512 pixels; the processor's own limits hold for what that leaves,
        so one of a fixed size stays the same. `auto`, `high` and `original` are the processor's limits alone.
        """
        if detail == "low" and self.resize.target(size) is not None:
            size = fitted(size, LOW_EDGE)
        return self.resize.target(size)


def fitted(size: Size, edge: int) -> Size:
    """The size made smaller until its longer side is `edge` at most. The shorter one does not get too short for it."""
    longest = max(size)
    least = -(-edge // SHARPEST)
    return Size(*(max(least, side * edge // longest) for side in size)) if longest > edge else size
