"""An image worker: decodes and resizes pictures, each in a child process that has been forked before the picture comes.

The CPU time and memory of a child are limited for good, and nothing of a picture stays in the worker but its pixels,
in memory that its owner reads (`services.tokenizer.image_decoder`), who replaces it when it ends.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import select
import sys
from collections.abc import Sequence

import msgspec
from PIL import (
    Image,
    TiffImagePlugin,  # noqa: F401 - what reads EXIF, which Pillow imports when it is needed: children open no files
)

from penstock.engine_core.images.decode import BROKEN
from penstock.engine_core.images.reading import pixels_of, read_image
from penstock.protocol.errors import InvalidRequest
from penstock.services.supervisor.process import PARENT, follow_parent
from penstock.services.tokenizer.confinement import Child, forked, limit_passed
from penstock.services.tokenizer.worker_protocol import (
    DECODED,
    Decoded,
    ImageJob,
    ImageSettings,
    Refusal,
    refusal,
    reply,
    requests,
)

SETTINGS = msgspec.msgpack.Decoder(ImageSettings)
JOB = msgspec.msgpack.Decoder(ImageJob)
POPULATE_WRITE = 23  # madvise(2), since Linux 5.14
SAMPLE_SIDE = 1024  # pixels of what a child decodes before its picture comes: memory for as much is there then


def main(arguments: Sequence[str]) -> None:
    """PARENT SHARED: read the settings, then answer until the input ends. SHARED: the descriptor of the memory for
    pixels."""
    parent, shared = arguments
    follow_parent({PARENT: parent})
    pixels = mmap.mmap(int(shared), 0)
    os.close(int(shared))
    Image.MAX_IMAGE_PIXELS = None  # the operator's limit is checked before Pillow's would be
    frames = requests()
    settings = next(frames, None)
    if settings is None:
        return
    worker = ImageWorker(SETTINGS.decode(settings), pixels)
    for frame in frames:
        reply(*worker.answer(frame))
        waiting, _, _ = select.select([sys.stdin], [], [], 0)
        worker.renew(prepared=not waiting)


class ImageWorker:
    """Runs jobs in child processes, of which one is always ready."""

    def __init__(self, settings: ImageSettings, pixels: mmap.mmap) -> None:
        self._settings = settings
        self._pixels = pixels
        file = io.BytesIO()
        Image.new("RGB", (SAMPLE_SIDE, SAMPLE_SIDE)).save(file, "JPEG")
        self._sample = file.getvalue()
        self._child = self._fork(prepared=True)

    def answer(self, frame: bytes) -> tuple[bytes, int]:
        """An encoded `Decoded` or `Refusal`, and how many bytes of pixels there are. `renew` must follow."""
        with contextlib.suppress(msgspec.DecodeError):  # of nothing, where the child has ended
            body = self._child.ask(frame)
            found = DECODED.decode(body)
            if isinstance(found, Refusal):
                return body, 0
            if min(found.height, found.width) > 0 and found.bytes <= len(self._pixels):
                return body, found.bytes
        ended = limit_passed(self._child.end(), self._settings.limits) or Refusal("it cannot be decoded", BROKEN)
        return msgspec.msgpack.encode(ended), 0

    def renew(self, *, prepared: bool) -> None:
        """Make sure that the child of the last job writes to the pixels no more, and fork the next one."""
        self._child.end(kill=True)
        self._child = self._fork(prepared=prepared)

    def _fork(self, *, prepared: bool) -> Child:
        settings = self._settings
        return forked(self._decode, settings.seconds, settings.memory, self._prepare if prepared else None)

    def _prepare(self) -> None:
        """Have the memory and the code there that a picture needs. In a child, while nobody waits."""
        with contextlib.suppress(OSError):  # of an older kernel
            self._pixels.madvise(POPULATE_WRITE, 0, 3 * SAMPLE_SIDE**2)
        for _ in pixels_of(read_image(self._sample, "auto", self._settings.processor, SAMPLE_SIDE**2)):
            pass

    def _decode(self, frame: bytes) -> bytes:
        """In a child: an encoded `Decoded` or `Refusal`; the pixels are where the owner reads them."""
        settings, job = self._settings, JOB.decode(frame)
        try:
            image = read_image(job.data, job.detail, settings.processor, settings.most_pixels)
        except InvalidRequest as error:
            return msgspec.msgpack.encode(refusal(error))
        found, at = Decoded(image.height, image.width), 0
        if found.bytes > len(self._pixels):
            raise MemoryError
        for piece in pixels_of(image):
            self._pixels[at : at + len(piece)] = piece
            at += len(piece)
        return msgspec.msgpack.encode(found)


if __name__ == "__main__":
    main(sys.argv[1:])
