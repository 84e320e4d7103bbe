"""What a file is by its beginning, and media types that say something else."""

from __future__ import annotations

import pytest

from penstock.engine_core.images.formats import BEGINNINGS, MEDIA_TYPES, READ, check_media_type, format_of
from penstock.protocol.errors import InvalidRequest

FILES = {"PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff\xe0", "WebP": b"RIFF\x10\0\0\0WEBPVP8 "}


@pytest.mark.parametrize("kind", sorted(MEDIA_TYPES))
@pytest.mark.parametrize("format", READ)
def test_a_media_type_names_what_the_file_is(kind: str, format: str) -> None:
    if MEDIA_TYPES[kind] == format:
        check_media_type(FILES[format], kind.upper(), "image")
        return
    with pytest.raises(InvalidRequest, match=f"^image: its media type is '{kind}', but it is a {format}") as raised:
        check_media_type(FILES[format], f" {kind}; a=b", "image")
    assert (raised.value.param, raised.value.code) == ("image", "invalid_image_format")


def test_what_names_no_image_and_what_is_none_is_left_to_the_decoder() -> None:
    for kind in ("", "application/octet-stream", "text/plain", "image/*"):
        check_media_type(FILES["PNG"], kind, "image")
    for beginning, name in BEGINNINGS:
        assert format_of(beginning + b"x") == name
        if name not in READ:
            check_media_type(beginning, "image/png", "image")
    assert format_of(b"") == format_of(b"RIFF\0\0\0\0WAVE") == ""
