"""An image worker: decodes and resizes pictures, each in a child process.

The CPU time and memory of a child are limited for good, and nothing of a picture stays in the worker. Its owner
(`services.tokenizer.image_decoder`) replaces it when it ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec
from PIL import (
    Image,
    TiffImagePlugin,  # noqa: F401 - what reads EXIF, which Pillow imports when it is needed: children open no files
)

from penstock.engine_core.images.decode import BROKEN
from penstock.engine_core.images.picture import Picture
from penstock.engine_core.images.reading import read_picture
from penstock.protocol.errors import InvalidRequest
from penstock.services.supervisor.process import PARENT, follow_parent
from penstock.services.tokenizer.confinement import MEMORY_CODES, TIME_CODES, in_child
from penstock.services.tokenizer.image_protocol import ImageJob, ImageSettings, too_large, too_slow
from penstock.services.tokenizer.worker_protocol import Refusal, refusal, reply, requests

SETTINGS = msgspec.msgpack.Decoder(ImageSettings)
JOB = msgspec.msgpack.Decoder(ImageJob)


def main(arguments: Sequence[str]) -> None:
    """PARENT: read the settings, then answer until the input ends."""
    (parent,) = arguments
    follow_parent({PARENT: parent})
    Image.MAX_IMAGE_PIXELS = None  # the operator's limit is checked before Pillow's would be
    frames = requests()
    settings = next(frames, None)
    if settings is None:
        return
    worker = ImageWorker(SETTINGS.decode(settings))
    for frame in frames:
        reply(worker.answer(frame))


class ImageWorker:
    """Runs jobs in child processes."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings

    def answer(self, frame: bytes) -> bytes:
        """An encoded `Picture` or `Refusal`."""
        settings = self._settings
        body, code = in_child(lambda: msgspec.msgpack.encode(self._outcome(frame)), settings.seconds, settings.memory)
        return body if code == os.EX_OK else msgspec.msgpack.encode(limit_passed(code, settings))

    def _outcome(self, frame: bytes) -> Picture | Refusal:
        settings, job = self._settings, JOB.decode(frame)
        try:
            return read_picture(job.data, job.detail, settings.processor, settings.most_pixels)
        except InvalidRequest as error:
            return refusal(error)


def limit_passed(code: int, settings: ImageSettings) -> Refusal:
    """Why a picture was not decoded, by its process's exit code."""
    if code in TIME_CODES:
        return too_slow(settings.seconds)
    if code in MEMORY_CODES:
        return too_large(settings.memory)
    return Refusal("it cannot be decoded", BROKEN)


if __name__ == "__main__":
    main(sys.argv[1:])
