"""A file of a request → the pixels that the model sees."""

from __future__ import annotations

from penstock.engine_core.images.decode import decode
from penstock.engine_core.images.picture import Picture, digest_of
from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.images.resize import resize


def read_picture(data: bytes, detail: str, processor: ProcessorSpec, most_pixels: int) -> Picture:
    """Decode and resize a file. Raises InvalidRequest, whose message begins with "it": as `decode` and `resize`."""
    image = resize(decode(data, most_pixels), processor, detail)
    return Picture(image.height, image.width, digest_of(data, detail), image.tobytes())
