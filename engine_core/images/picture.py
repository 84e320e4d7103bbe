"""A picture as the model sees it."""

from __future__ import annotations

import msgspec

from penstock.engine_core.images.processor_spec import Size


class Picture(msgspec.Struct, frozen=True, tag=True):
    """Decoded and resized."""

    height: int  # pixels
    width: int
    digest: bytes  # 16 bytes: equal for equal pixels alone
    pixels: bytes  # uint8 [height, width, 3], RGB

    @property
    def size(self) -> Size:
        return Size(self.height, self.width)
