"""A file of a request → the pixels that the model sees, and the name of these pixels in caches."""

from __future__ import annotations

import struct
from hashlib import blake2b

from penstock.engine_core.images.decode import decode
from penstock.engine_core.images.picture import Picture
from penstock.engine_core.images.processor_spec import ProcessorSpec, Size
from penstock.engine_core.images.resize import resize

DIGEST = 16  # bytes
SIZE = struct.Struct("<II")


def read_picture(data: bytes, detail: str, processor: ProcessorSpec, most_pixels: int) -> Picture:
    """Decode and resize a file. Raises InvalidRequest, whose message begins with "it": as `decode` and `resize`."""
    image = resize(decode(data, most_pixels), processor, detail)
    pixels = image.tobytes()
    return Picture(image.height, image.width, digest_of(Size(image.height, image.width), pixels), pixels)


def digest_of(size: Size, pixels: bytes) -> bytes:
    """BLAKE2b over the size and the pixels."""
    found = blake2b(SIZE.pack(*size), digest_size=DIGEST)
    found.update(pixels)
    return found.digest()
