"""What an image worker is told and asked, and how limits are named. Imports no Pillow: a worker alone needs it."""

from __future__ import annotations

import msgspec

from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.services.tokenizer.worker_protocol import Refusal

TOO_MUCH = "image_too_complex"


class ImageSettings(msgspec.Struct, frozen=True):
    """What an image worker needs of the model, and the limits of one picture."""

    processor: ProcessorSpec
    most_pixels: int  # of a file
    seconds: float  # of CPU
    memory: int  # bytes


class ImageJob(msgspec.Struct, frozen=True):
    """A file to decode."""

    data: bytes
    detail: str


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """A picture, whose pixels are in the shared memory: uint8 [height, width, 3], RGB."""

    height: int
    width: int

    @property
    def bytes(self) -> int:
        return 3 * self.height * self.width


DECODED: msgspec.msgpack.Decoder[Decoded | Refusal] = msgspec.msgpack.Decoder(Decoded | Refusal)


def too_slow(seconds: float) -> Refusal:
    return Refusal(f"decoding it takes more than {seconds:g} s (--media-timeout)", TOO_MUCH)


def too_large(memory: int) -> Refusal:
    return Refusal(f"decoding it takes more than {memory >> 20} MiB (--media-memory)", TOO_MUCH)
