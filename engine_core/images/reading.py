"""A file of a request → the pixels that the model sees."""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image

from penstock.engine_core.images.decode import decode
from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.images.resize import resize

PIECE = 64 << 10  # bytes of pixels that are copied at a time


def read_image(data: bytes, detail: str, processor: ProcessorSpec, most_pixels: int) -> Image.Image:
    """Decode and resize a file. Raises InvalidRequest, whose message begins with "it": as `decode` and `resize`."""
    return resize(decode(data, most_pixels), processor, detail)


def pixels_of(image: Image.Image) -> Iterator[bytes]:
    """uint8 [height, width, 3], some lines at a time: a copy of all of them would take memory that is not there yet."""
    lines = max(1, PIECE // (3 * image.width))
    for line in range(0, image.height, lines):
        yield image.crop((0, line, image.width, min(image.height, line + lines))).tobytes()
