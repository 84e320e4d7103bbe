"""Files that are no picture, or none that may be decoded, are refused by what they are."""

from __future__ import annotations

import io
import struct
import time
import tracemalloc
import zlib

import pytest
from PIL import Image, ImageFile, PngImagePlugin

from penstock.engine_core.images.decode import decode
from penstock.protocol.errors import InvalidRequest
from tests.engine_core.images.pictures import files, noise, turned, write

MOST = 1 << 20
TAKEN = "images are PNG, JPEG or WebP"
FORMAT = "invalid_image_format"


def png(width: int, height: int, body: bytes = b"", kind: int = 0, depth: int = 8) -> bytes:
    """A PNG of any header and data."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")):
        found += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return found


def webp(chunk: bytes, body: bytes) -> bytes:
    content = b"WEBP" + chunk + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(content)) + content


def frames(kind: str) -> bytes:
    file = io.BytesIO()
    noise(20, 20).save(file, kind, save_all=True, append_images=[noise(20, 20, seed=1)])
    return file.getvalue()


def jpeg(width: int, height: int) -> bytes:
    """A JPEG whose header says that it is so large."""
    found = write(noise(16, 16), "JPEG")
    place = found.index(b"\xff\xc0") + 5
    return found[:place] + struct.pack(">HH", height, width) + found[place + 4 :]


def deflated(count: int) -> bytes:
    """So many zeros, compressed a thousand times."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(count >> 20)) + packer.flush()


WEBP = write(noise(83, 61), "WEBP", quality=70)
BAD = {
    "empty": (b"", f"it is empty; {TAKEN}", "empty_image_file"),
    "text": (b"a cat", f"it is none of the formats that this server reads; {TAKEN}", FORMAT),
    "GIF": (write(noise(9, 9), "GIF"), f"it is a GIF; {TAKEN}", FORMAT),
    "animated GIF": (frames("GIF"), f"it is a GIF; {TAKEN}", FORMAT),
    "TIFF": (write(noise(9, 9), "TIFF"), f"it is a TIFF; {TAKEN}", FORMAT),
    "BMP": (write(noise(9, 9), "BMP"), f"it is a BMP; {TAKEN}", FORMAT),
    "ICO": (b"\0\0\1\0\1\0", f"it is an ICO; {TAKEN}", FORMAT),
    "AVIF": (b"\0\0\0\x20ftypavif\0\0\0\0", f"it is an AVIF; {TAKEN}", FORMAT),
    "HEIC": (b"\0\0\0\x20ftypheic\0\0\0\0", f"it is a HEIC; {TAKEN}", FORMAT),
    "MP4": (b"\0\0\0\x20ftypisom\0\0\0\0", f"it is a video, or a still of one; {TAKEN}", FORMAT),
    "PDF": (b"%PDF-1.7", f"it is a PDF; {TAKEN}", FORMAT),
    "SVG": (b"\xef\xbb\xbf\n<?xml version='1.0'?><svg/>", f"it is an SVG; {TAKEN}", FORMAT),
    "HTML": (b" <!DOCTYPE html><p>no", f"it is an HTML page; {TAKEN}", FORMAT),
    "WebP of several frames": (frames("WEBP"), "it is a WebP of several frames; a picture has one", FORMAT),
    "PNG of several frames": (frames("PNG"), "it is a PNG of several frames; a picture has one", FORMAT),
    "truncated PNG": (
        write(noise(301, 97), "PNG")[:5000], "it is a PNG that is truncated or damaged", "image_parse_error"
    ),
    "truncated JPEG": (
        write(noise(83, 61), "JPEG")[:-40], "it is a JPEG that is truncated or damaged", "image_parse_error"
    ),
    "truncated WebP": (WEBP[:-40], "it is a WebP that is truncated or damaged", "image_parse_error"),
    "header of a WebP": (WEBP[:24], "it is a WebP that is truncated or damaged", "image_parse_error"),
    "odd WebP": (webp(b"ANIM", bytes(20)), "it is a WebP that is truncated or damaged", "image_parse_error"),
    "header of a PNG": (b"\x89PNG\r\n\x1a\n", "it is a PNG that is truncated or damaged", "image_parse_error"),
    "header of a JPEG": (b"\xff\xd8\xff\xe0", "it is a JPEG that is truncated or damaged", "image_parse_error"),
    "PNG of no width": (png(0, 5), "it is a PNG that is truncated or damaged", "image_parse_error"),
    "PNG bomb": (
        png(100_000, 100_000, deflated(4 << 20)),
        "it has 100000 x 100000 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
    ),
    "JPEG bomb": (
        jpeg(65_000, 65_000),
        "it has 65000 x 65000 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
    ),
    "WebP bomb": (
        webp(b"VP8X", b"\0\0\0\0" + b"\xff\xff\xff" * 2),
        "it has 16777216 x 16777216 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
    ),
    "lossless WebP bomb": (
        webp(b"VP8L", b"\x2f" + (16382 | 16381 << 14).to_bytes(4, "little") + bytes(9)),
        "it has 16383 x 16382 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
    ),
    "lossy WebP bomb": (
        webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16000) + bytes(9)),
        "it has 16383 x 16000 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
    ),
    "one pixel too many": (
        png(1025, 1024),
        "it has 1025 x 1024 pixels; at most 1048576 are decoded (--media-max-pixels)", "image_too_large",
    ),
    "text that inflates": (
        write(noise(8, 8), "PNG", pnginfo=PngImagePlugin.PngInfo())[:33]
        + (lambda body: struct.pack(">I", len(body)) + b"zTXt" + body + struct.pack(">I", zlib.crc32(b"zTXt" + body)))(
            b"a\0\0" + deflated(80 << 20)
        ),
        "it is a PNG that is truncated or damaged", "image_parse_error",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_it_is_refused_at_once(what: str) -> None:
    """By its own sentence, within a moment, and before memory is taken for its pixels."""
    data, message, code = BAD[what]
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(InvalidRequest) as caught:
            decode(data, MOST)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (caught.value.message, caught.value.code) == (message, code)
    assert peak < 8 << 20
    assert time.process_time() - start < 2.0


def test_as_many_pixels_as_allowed_are_decoded() -> None:
    rows = zlib.compress(bytes(1024 * 1025))
    assert decode(png(1024, 1024, rows), MOST).size == (1024, 1024)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_orientation_is_none() -> None:
    image = noise(30, 20)
    upright = decode(write(image, "PNG"), MOST)
    assert decode(write(image, "PNG", exif=b"Exif\0\0MM\0*nonsense"), MOST).tobytes() == upright.tobytes()
    assert decode(write(image, "PNG", exif=turned(6)), MOST).size == (20, 30)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_nothing_else_of_pillow_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its search for formats nor its leniency."""
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    expected = {name: decode(data, MOST << 3).tobytes() for name, data in files().items()}
    for name in ("open", "init", "preinit"):
        monkeypatch.setattr(Image, name, None)
    for name, data in files().items():
        assert decode(data, MOST << 3).tobytes() == expected[name]
