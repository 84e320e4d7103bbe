"""Images of requests, whatever API they come by: found in the messages, and read from data: URLs or fetched."""

from __future__ import annotations

import asyncio
import binascii
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.engine_core.images.formats import FORMAT, check_media_type
from penstock.protocol.errors import InvalidRequest, Unsupported, invalid, unsupported
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import Client
from penstock.services.client.model_info import ModelInfo
from penstock.services.http.request_context import RequestContext, answered
from penstock.services.openai.app_state import AppState
from penstock.services.openai.media_fetcher import BAD_URL

Message = dict[str, object]

PIECE = 128 << 10  # characters of base64 that are decoded in one go: about a millisecond
SPACES = b" \t\n\r\v\f"
BAD_BASE64 = "invalid_base64"
NOT_NAMED = ("", "application/octet-stream", "binary/octet-stream")  # media types that say nothing


class GivenImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that has not been read: base64, or a URL to fetch it from. Other fields as of `ImageFile`."""

    base64: str = ""
    media_type: str = ""  # what the request says that the base64 is
    url: str = ""
    detail: str = "auto"
    param: str


class Images:
    """The images of one request, in the order of their parts. `check_room` comes first."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self.found: list[GivenImage] = []

    @property
    def seen(self) -> bool:
        """Whether the model sees images."""
        return self._model.images > 0

    @property
    def read(self) -> str:
        """What the model reads, in words."""
        return "text and images" if self.seen else "text"

    def check_room(self, param: str) -> None:
        """Raise Unsupported for a model that sees none, and InvalidRequest where there are as many as it may get."""
        limit = self._model.images
        if not limit:
            raise unsupported(param, ": this model does not see images")
        if len(self.found) >= limit:
            raise invalid(param, f": a request may have {limit} images (--limit-mm-per-prompt)", "limit_exceeded")

    def add(self, url: str, detail: str | None, param: str) -> Message:
        """What stands in the message for an image whose URL the field `param` holds. Raises InvalidRequest."""
        kind = url[:8].lower()
        if kind.startswith("data:"):
            media_type, text = base64_of(url, param)
            return self._put(GivenImage(base64=text, media_type=media_type, detail=detail or "auto", param=param))
        if kind != "https://":
            raise invalid(param, "must be a data: URL or begin with https://", BAD_URL)
        return self._put(GivenImage(url=url, detail=detail or "auto", param=param))

    def add_base64(self, text: str, media_type: str, place: str) -> Message:
        """The same for base64 in the field `data` of `place` and its type in `media_type`."""
        check_kind(media_type, f"{place}.media_type")
        if not text:
            raise empty(f"{place}.data")
        return self._put(GivenImage(base64=text, media_type=media_type, param=f"{place}.data"))

    def add_stored(self, base64: str, detail: str, param: str) -> None:
        """An image of the conversation that a request goes on from."""
        self._put(GivenImage(base64=base64, detail=detail, param=param))

    def _put(self, image: GivenImage) -> Message:
        self.found.append(image)
        return placeholder()


def placeholder() -> Message:
    """What stands in a message for the next of a request's images."""
    return {"type": "image"}


def joined(parts: Sequence[str | Message]) -> str | list[Message]:
    """A content of texts and images as templates read it: text, or parts in their order where one is an image."""
    if all(isinstance(part, str) for part in parts):
        return "\n".join(str(part) for part in parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def unread(kind: str, param: str, images: Images) -> Unsupported:
    """The error of a part that is neither text nor an image."""
    return unsupported(param, f": {kind!r} is not supported; this server reads {images.read} only")


def restored(messages: list[dict[str, Any]], images: Images, param: str) -> list[dict[str, Any]]:
    """Messages that were kept by `with_data`; their images are put to `images`. Raises as `Images` does, naming the
    field that says which messages."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if part["type"] == "image":
                    images.check_room(param)
                    images.add_stored(part["data"], part["detail"], param)
            content = [placeholder() if part["type"] == "image" else part for part in content]
        found.append({**message, "content": content})
    return found


def with_data(messages: list[dict[str, Any]], images: Sequence[ImageFile]) -> list[dict[str, Any]]:
    """The messages with the bytes of their images, so that they can be kept."""
    rest = iter(images)
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = ((part, next(rest) if part["type"] == "image" else None) for part in content)
            content = [
                part if image is None else {**part, "data": b2a_base64(image.data), "detail": image.detail}
                for part, image in parts
            ]
        found.append({**message, "content": content})
    return found


def b2a_base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def base64_of(url: str, param: str) -> tuple[str, str]:
    """The media type of a data: URL and what it holds (RFC 2397). Raises InvalidRequest for one that holds no base64,
    or no image."""
    head, comma, text = url.partition(",")
    media_type, *parameters = head[len("data:") :].split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise invalid(param, "must be like data:image/png;base64,…", BAD_URL)
    check_kind(media_type, param)
    if not text:
        raise empty(param)
    return media_type, text


def check_kind(media_type: str, param: str) -> None:
    kind = media_type.strip().lower()
    if kind not in NOT_NAMED and not kind.startswith("image/"):
        raise invalid(param, f": {kind[:64]!r} is not served; this server reads images")


def empty(param: str) -> InvalidRequest:
    return invalid(param, "is an image without any bytes", BAD_BASE64)


def decoded(text: str) -> Iterator[bytes]:
    """The bytes of base64 (RFC 4648, section 4), piece by piece. White space counts for nothing; raises ValueError for
    anything else that does not belong."""
    rest, closed = b"", False
    for start in range(0, len(text), PIECE):
        piece = rest + text[start : start + PIECE].encode("ascii").translate(None, SPACES)
        whole = len(piece) - len(piece) % 4
        piece, rest = piece[:whole], piece[whole:]
        if (closed and piece) or b"=" in piece[:-2]:  # the strict mode lets some of these pass
            raise ValueError("characters behind the padding")
        closed = closed or piece.endswith(b"=")
        yield binascii.a2b_base64(piece, strict_mode=True)
    if rest:
        raise ValueError("characters are missing at the end")


def read_data(image: GivenImage) -> Iterator[bytes]:
    """As `decoded`. Raises InvalidRequest naming the field."""
    try:
        yield from decoded(image.base64)
    except ValueError as error:  # binascii's and codecs' as well
        raise invalid(image.param, "is not valid base64", BAD_BASE64) from error


def read_inline(images: Sequence[GivenImage]) -> tuple[ImageFile, ...]:
    """The images of a program that serves itself. Raises InvalidRequest for one that would have to be fetched."""
    found = []
    for image in images:
        if image.url:
            message = ": only a server fetches images; give the picture itself or its data: URL"
            raise invalid(image.param, message, BAD_URL)
        found.append(file_of(image, b"".join(read_data(image)), image.media_type))
    return tuple(found)


def file_of(image: GivenImage, data: bytes, media_type: str) -> ImageFile:
    """The image as the tokenizer gets it. Raises InvalidRequest for one without bytes, or of another media type."""
    if not data:
        raise empty(image.param)
    check_media_type(data, media_type, image.param)
    return ImageFile(data=data, detail=image.detail, param=image.param)


async def read(
    app: AppState,
    context: RequestContext,
    images: Sequence[GivenImage],
    user: str | None = None,
    *,
    engine: bool = True,
) -> tuple[ImageFile, ...]:
    """The images of a request that has been checked; `user` is its sender as the body says. It takes a place among the
    unfinished requests meanwhile; without `engine` it needs a tokenizer alone.

    Raises InvalidRequest naming the field of an image that cannot be had, what the engine refuses the request with,
    DeadlineExceeded and ClientDisconnect.
    """
    if not images:
        return ()
    left = context.time_left(time.monotonic())
    with app.engine_client.reserved(time.monotonic(), engine=engine):
        try:
            async with asyncio.timeout(None if left == math.inf else left):
                return await answered(read_all(app, context, images, context.sender(user)[1]), context)
        except TimeoutError:
            raise context.deadline_exceeded() from None


async def read_all(
    app: AppState, context: RequestContext, images: Sequence[GivenImage], client: Client
) -> tuple[ImageFile, ...]:
    for image in images:
        app.traffic.images.received["url" if image.url else "data"] += 1
    remote = {number: app.media.where(image.url, image.param) for number, image in enumerate(images) if image.url}
    files = {}
    for number, image in enumerate(images):
        if number not in remote:
            files[number] = await read_slowly(app, image)
    left = app.config.api.max_body_bytes

    def take(size: int) -> None:
        """Bytes that are fetched count as those of a body, of which a request has as many as it could have sent."""
        nonlocal left
        left -= size
        if left < 0:
            limit = app.config.api.max_body_bytes
            message = f"the images that this request names have more than {limit} bytes together (--max-body-bytes)"
            param = images[min(remote)].param
            raise app.media.refusal("size", message, param)
        context.reserve(size)

    fetches = [asyncio.ensure_future(app.media.fetch(place, client, take)) for place in remote.values()]
    try:
        for number, (data, media_type) in zip(remote, await asyncio.gather(*fetches), strict=True):
            with counted(app):
                files[number] = file_of(images[number], data, media_type)
    finally:
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
    return tuple(files[number] for number in range(len(images)))


async def read_slowly(app: AppState, image: GivenImage) -> ImageFile:
    """Decode an image with pauses, in which streams go on."""
    pieces = []
    with counted(app):
        for piece in read_data(image):
            pieces.append(piece)
            await asyncio.sleep(0)
        return file_of(image, b"".join(pieces), image.media_type)


@contextmanager
def counted(app: AppState) -> Iterator[None]:
    """Refusals of what has come, in the metrics."""
    try:
        yield
    except InvalidRequest as error:
        app.traffic.images.refused["media_type" if error.code == FORMAT else "base64"] += 1
        raise
