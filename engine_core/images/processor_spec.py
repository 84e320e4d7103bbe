"""What a model's preprocessor_config.json says about pictures: how they are resized, and what pixels become. Imports no
torch."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

Triple = tuple[float, float, float]


class Size(NamedTuple):
    """Pixels of a picture."""

    height: int
    width: int


class ProcessorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The arithmetic of one image processor of transformers. A number of a pixel is (value * rescale - mean) / std of
    its channel, in fp32."""

    mean: Triple
    std: Triple
    rescale: float = 1 / 255
