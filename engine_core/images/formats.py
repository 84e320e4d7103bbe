"""Which format a file of a picture is, by how it begins, and what a media type says that it is."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.protocol.errors import InvalidRequest

TAKEN = "images are PNG, JPEG or WebP"
FORMAT = "invalid_image_format"  # a code of OpenAI's API
PNG, JPEG, WEBP = "PNG", "JPEG", "WebP"
READ = (PNG, JPEG, WEBP)
# How files begin, with what they are.
BEGINNINGS = (
    (b"\x89PNG\r\n\x1a\n", PNG),
    (b"\xff\xd8\xff", JPEG),
    (b"GIF8", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"BM", "BMP"),
    (b"%PDF", "PDF"),
    (b"\0\0\1\0", "ICO"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"8BPS", "PSD"),
)
BRANDS: Mapping[bytes, str] = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
}
MARKUP = ((b"<svg", "SVG"), (b"<!doctype html", "HTML page"), (b"<html", "HTML page"), (b"<?xml", "XML file"))
LOOKED_AT = 1024  # bytes that are searched for markup
# Names of media types that are read: the registered ones, and those that programs still give.
MEDIA_TYPES: Mapping[str, str] = {
    "image/png": PNG,
    "image/x-png": PNG,
    "image/jpeg": JPEG,
    "image/jpg": JPEG,
    "image/pjpeg": JPEG,
    "image/webp": WEBP,
}


def recognised(data: bytes) -> str:
    """Which of the three formats a file is, by its content. Raises InvalidRequest naming others."""
    if not data:
        raise InvalidRequest(f"it is empty; {TAKEN}", code="empty_image_file")
    found = format_of(data)
    if found in READ:
        return found
    if data[4:8] == b"ftyp":
        found = BRANDS.get(data[8:12], "video, or a still of one")
    start = data[:LOOKED_AT].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"<"):
        found = next((name for mark, name in MARKUP if mark in start), found)
    what = f"it is {article(found)} {found}" if found else "it is none of the formats that this server reads"
    raise InvalidRequest(f"{what}; {TAKEN}", code=FORMAT)


def format_of(data: bytes) -> str:
    """What a file of one of the known formats is; empty for others."""
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WEBP
    return next((name for beginning, name in BEGINNINGS if data.startswith(beginning)), "")


def check_media_type(data: bytes, media_type: str, param: str) -> None:
    """Raise InvalidRequest where a media type names another kind of image than the bytes are.

    A type of no image says nothing. What is none of the three formats is refused by `recognised`.
    """
    kind = media_type.partition(";")[0].strip().lower()
    found = format_of(data)
    if found in READ and kind.startswith("image/") and kind != "image/*" and MEDIA_TYPES.get(kind) != found:
        told = f"its media type is {kind[:64]!r}, but it is {article(found)} {found} (image/{found.lower()})"
        raise InvalidRequest(f"{param}: {told}", param=param, code=FORMAT)


def article(name: str) -> str:
    """The indefinite article before a name, as it is read aloud."""
    return "an" if name.startswith(("AVIF", "HTML", "ICO", "SVG", "XML")) else "a"
