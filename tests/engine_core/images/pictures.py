"""Files of pictures of every mode and odd shape, as Pillow writes them."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Mapping

import numpy as np
from PIL import Image, PngImagePlugin

from penstock.engine_core.images.picture import Picture, digest_of
from penstock.engine_core.images.processor_spec import ProcessorSpec
from penstock.engine_core.images.reading import pixels_of, read_image

ORIENTATION = 0x0112  # EXIF's tag
SHAPES = {  # width, height
    "dot": (1, 1), "sliver": (2, 300), "ribbon": (400, 3), "tiny": (7, 5), "square": (64, 64), "cell": (28, 56),
    "wide": (301, 97), "tall": (90, 333), "large": (1201, 803), "larger than Pixtral takes": (2100, 1301),
    "flat": (1590, 9),
}  # fmt: skip


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A picture of random numbers over slow waves, so that filters have something to do."""
    random = np.random.default_rng(seed + width * 7919 + height)
    lines, columns = np.mgrid[:height, :width]
    waves = np.stack([np.sin(lines / 9 + k) + np.cos(columns / (7 + k)) for k in range(4)], axis=-1) * 60 + 128
    values = np.clip(waves + random.normal(0, 40, waves.shape), 0, 255).astype(np.uint8)
    match mode:
        case "I;16":
            return Image.fromarray((values[..., 0].astype(np.uint16) << 8) + values[..., 1])
        case "RGB" | "L":
            return Image.fromarray(values[..., :3]).convert(mode)
        case "RGBA" | "CMYK":
            return Image.frombytes(mode, (width, height), values.tobytes())
        case "LA":
            return Image.frombytes(mode, (width, height), values[..., :2].tobytes())
        case _:
            return Image.fromarray(values[..., :3]).convert(mode)


def write(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def read_picture(data: bytes, detail: str, processor: ProcessorSpec, most_pixels: int) -> Picture:
    """As a tokenizer has a file decoded."""
    image = read_image(data, detail, processor, most_pixels)
    return Picture(image.height, image.width, digest_of(data, detail), b"".join(pixels_of(image)))


def turned(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = value
    return exif


def deep(width: int, height: int, channels: int) -> bytes:
    """A PNG with 16 bits a channel, which Pillow reads and does not write."""
    values = np.random.default_rng(channels).integers(0, 1 << 16, (height, width * channels)).astype(">u2")
    lines = b"".join(b"\0" + line.tobytes() for line in values)
    header = struct.pack(">IIBBBBB", width, height, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    found = b"\x89PNG\r\n\x1a\n"
    for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")):
        found += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return found


@functools.cache
def files() -> Mapping[str, bytes]:
    """Pictures by what is odd about them."""
    found = {name: write(noise(*shape), "PNG") for name, shape in SHAPES.items()}
    for mode in ("L", "1", "P", "RGBA", "LA", "I;16"):
        found[f"PNG {mode}"] = write(noise(83, 61, mode), "PNG")
    for mode in ("RGB", "L", "CMYK"):
        found[f"JPEG {mode}"] = write(noise(83, 61, mode), "JPEG", quality=80)
    found["JPEG progressive"] = write(noise(150, 70), "JPEG", progressive=True)
    found["JPEG 4:2:0, odd"] = write(noise(151, 73), "JPEG", subsampling=2)
    found["WebP"] = write(noise(83, 61), "WEBP", quality=70)
    found["WebP lossless"] = write(noise(84, 61), "WEBP", lossless=True)
    found["WebP alpha"] = write(noise(83, 62, "RGBA"), "WEBP")
    found["PNG interlaced palette, one colour clear"] = write(noise(50, 40, "P"), "PNG", transparency=3)
    found["PNG palette, alphas"] = write(noise(50, 41, "P"), "PNG", transparency=bytes(range(0, 250, 5)))
    found["PNG grey, one clear"] = write(noise(50, 42, "L"), "PNG", transparency=100)
    found["PNG RGB, one clear"] = write(noise(50, 43), "PNG", transparency=(1, 2, 3))
    for value in range(1, 9):
        found[f"JPEG turned {value}"] = write(noise(60 + value, 41), "JPEG", exif=turned(value))
    found["PNG turned"] = write(noise(60, 43), "PNG", exif=turned(6))
    found["WebP turned"] = write(noise(60, 44), "WEBP", exif=turned(8))
    xmp = PngImagePlugin.PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<rdf tiff:Orientation="5"/>')
    found["PNG turned by XMP"] = write(noise(60, 45), "PNG", pnginfo=xmp)
    found["JPEG with a profile"] = write(noise(60, 46), "JPEG", icc_profile=b"not one that anybody reads")
    found["PNG RGB, 16 bits"], found["PNG RGBA, 16 bits"] = deep(61, 47, 3), deep(62, 47, 4)
    return found
