"""Images of a request: as a client sends them, and as the model sees them."""

from __future__ import annotations

from penstock.protocol.message import Message, Part

DETAILS = ("auto", "low", "high", "original")  # of OpenAI's API


class ImageFile(Part, frozen=True, kw_only=True):
    """api → tokenizer: one picture as it came: PNG, JPEG or WebP. The api has read it and has not decoded it."""

    data: bytes
    detail: str = "auto"
    param: str = ""  # the request's field that holds it, for errors


class Image(Part, frozen=True, kw_only=True):
    """tokenizer → scheduler: one picture, resized, and its place in the prompt. It covers the tokens
    position .. position + length - 1. Those of them with the model's placeholder id are `rows`, in order the rows of
    embeddings that the vision encoder makes; others (Pixtral's ends of lines) are embedded as text."""

    position: int
    length: int
    rows: int
    width: int  # pixels
    height: int
    digest: bytes  # 16 bytes: of its file, so it names its pixels in caches and block hashes
    pixels: bytes  # uint8 [height, width, 3], RGB


class EncodeImage(Message, frozen=True, kw_only=True):
    """scheduler → one executor of the first stage: make embeddings of a picture beside the steps, and put them into
    rows first_row .. first_row + rows - 1 of the encoder cache. Answered by `ImageEncoded`."""

    number: int  # the scheduler's, not used twice
    rank: int = 0  # the executor's
    first_row: int
    rows: int
    width: int
    height: int
    pixels: bytes


class ImageEncoded(Message, frozen=True):
    """this executor → scheduler: steps planned from now on may read the rows; or why there are none."""

    number: int
    error: str = ""
