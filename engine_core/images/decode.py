"""Files of pictures → RGB, as transformers makes it of them: load_image turns them upright and has Pillow convert them,
and convert_to_rgb of the image processors puts what is clear yet on white.

A file's content alone says what it is. Of Pillow's plugins three are used, by their classes: `Image.open` would import
others. Pixels are counted from the header, before memory is taken for them.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Iterator, Mapping

from PIL import ExifTags, Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from penstock.engine_core.images.formats import FORMAT, WEBP, recognised
from penstock.engine_core.images.processor_spec import Size
from penstock.protocol.errors import InvalidRequest

BROKEN, LARGE = "image_parse_error", "image_too_large"  # codes of OpenAI's API
ANIMATION = 2  # flag of a WebP's VP8X chunk
# How a picture is turned for each value of EXIF's orientation; 1 is upright.
TURNS: Mapping[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What Pillow raises for malformed files: by parsing them, and by what it puts together of them.
MALFORMED = (
    OSError, SyntaxError, ValueError, IndexError, KeyError, TypeError, AttributeError, EOFError, OverflowError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


def decode(data: bytes, most_pixels: int) -> Image.Image:
    """The picture in RGB, upright. Colour profiles are ignored. An alpha channel is dropped; a single colour that is
    said to be clear becomes white.

    Raises InvalidRequest: another format, several frames, more than `most_pixels` (--media-max-pixels), or malformed.
    """
    kind = recognised(data)
    if kind == WEBP:
        check_webp(data, most_pixels)
    with malformed(kind):
        image = opened(data, kind)
    check_size(Size(image.height, image.width), most_pixels)
    if getattr(image, "n_frames", 1) > 1:
        raise animated(kind)
    with malformed(kind):
        image.load()
    turn = TURNS.get(orientation(image))
    with malformed(kind):
        upright = image if turn is None else image.transpose(turn)
        return on_white(upright if upright.mode == "RGB" else upright.convert("RGB"))  # of RGB it makes a copy


def opened(data: bytes, kind: str) -> ImageFile.ImageFile:
    """The picture with its header read."""
    file = io.BytesIO(data)
    match kind:
        case "PNG":
            return PngImageFile(file)
        case "JPEG":  # of several pictures in one file (MPO) the first is the one to show
            return JpegImageFile(file)
        case _:
            return WebPImageFile(file)


def check_size(size: Size, most_pixels: int) -> None:
    """Raise InvalidRequest for a picture with too many pixels, or none."""
    if min(size) < 1:
        raise InvalidRequest("it has no pixels", code="image_too_small")
    if size.height * size.width > most_pixels:
        pixels = f"{size.width} x {size.height} pixels"
        raise InvalidRequest(f"it has {pixels}; at most {most_pixels} are decoded (--media-max-pixels)", code=LARGE)


def check_webp(data: bytes, most_pixels: int) -> None:
    """As `check_size`, and for one frame: libwebp takes memory for the whole canvas when it opens a file. The header's
    layout is RFC 9649's, sections 2.5 to 2.7."""
    chunk, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise broken(WEBP)
    if chunk == b"VP8X":
        if body[0] & ANIMATION:
            raise animated(WEBP)
        size = Size(1 + int.from_bytes(body[7:10], "little"), 1 + int.from_bytes(body[4:7], "little"))
    elif chunk == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        size = Size(1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF))
    elif chunk == b"VP8 ":
        size = Size(int.from_bytes(body[8:10], "little") & 0x3FFF, int.from_bytes(body[6:8], "little") & 0x3FFF)
    else:
        raise broken(WEBP)
    check_size(size, most_pixels)


def on_white(image: Image.Image) -> Image.Image:
    """A picture in RGB with the colour that is clear, where Pillow keeps one, as white."""
    if image.info.get("transparency") is None:
        return image
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def orientation(image: Image.Image) -> int:
    """EXIF's orientation of a picture; 1 where it has none, or none that can be read."""
    with contextlib.suppress(*MALFORMED):
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
        return found if isinstance(found, int) else 1
    return 1


def animated(kind: str) -> InvalidRequest:
    return InvalidRequest(f"it is a {kind} of several frames; a picture has one", code=FORMAT)


def broken(kind: str) -> InvalidRequest:
    return InvalidRequest(f"it is a {kind} that is truncated or damaged", code=BROKEN)


@contextlib.contextmanager
def malformed(kind: str) -> Iterator[None]:
    """Errors of Pillow as the request's."""
    try:
        yield
    except MALFORMED:
        raise broken(kind) from None
