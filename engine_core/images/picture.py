"""A picture as the model sees it, and its name in caches."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from penstock.engine_core.images.processor_spec import Size

DIGEST = 16  # bytes


class Picture(msgspec.Struct, frozen=True):
    """Decoded and resized."""

    height: int  # pixels
    width: int
    digest: bytes  # 16 bytes, of its file: the same for the same pixels alone
    pixels: bytes  # uint8 [height, width, 3], RGB

    @property
    def size(self) -> Size:
        return Size(self.height, self.width)


def digest_of(data: bytes, detail: str) -> bytes:
    """The same for files that become the same picture. Of the file, not of its pixels, which are ten times as many."""
    found = blake2b(b"low\0" if detail == "low" else b"full", digest_size=DIGEST)
    found.update(data)
    return found.digest()
