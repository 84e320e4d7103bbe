"""Images in prompts: a template writes a placeholder for each, and the model sees a token for each row of embeddings.

How an image's tokens stand in a prompt is told by its placeholder, as the processors of transformers have it: Qwen's
are as many placeholders as the image has rows. Pixtral's lines end with tokens of their own. Gemma 3's templates write
the token that begins an image, and its processor puts blank lines around what it makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.images.processor_spec import Size
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.engine_core.text.rendering import Rendered
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.errors import InvalidRequest, ModelError, Overloaded, Unsupported
from penstock.protocol.images import Image
from penstock.protocol.messages import SubmitText, Tokenize

Call = TypeVar("Call", bound=SubmitText | Tokenize)

BLANK = "\n\n"
MOST_BYTES = 2 << 30  # of the pixels of one prompt, which go to the scheduler in one message


class Layout(msgspec.Struct, frozen=True):
    """How the tokens of one image stand around its placeholders."""

    opening: str = ""  # what templates write in place of the placeholder; it stays before the image
    closing: str = ""  # and this comes behind it; blank lines stand around both
    line_end: str = ""  # behind each line of the image but the last
    end: str = ""  # behind the last one


PLAIN = Layout()
# By the placeholder. Sources: processing_pixtral.py, processing_gemma3.py of transformers.
LAYOUTS: Mapping[str, Layout] = {
    "[IMG]": Layout(line_end="[IMG_BREAK]", end="[IMG_END]"),
    "<image_soft_token>": Layout(opening="<start_of_image>", closing="<end_of_image>"),
}


class PixelBudget:
    """Bytes of the pixels of unfinished requests, which they keep until they end: a scheduler may have to encode them
    again."""

    def __init__(self, most: int) -> None:
        self._most = most  # bytes, --media-max-bytes
        self._held: dict[int, int] = {}  # by request

    @property
    def total(self) -> int:
        return sum(self._held.values())

    def add(self, request: int, size: int, alive: Callable[[int], bool]) -> None:
        """A request has so many more bytes. Raises Overloaded if all that are `alive` would have too many together; one
        that is alone may have any number."""
        self._held[request] = self._held.get(request, 0) + size
        if self.total <= self._most:
            return
        self._held = {held: size for held, size in self._held.items() if held == request or alive(held)}
        if self.total > self._most and len(self._held) > 1:
            del self._held[request]
            told = f"the images of unfinished requests would take more than {self._most} bytes as pixels"
            raise Overloaded(f"{told} (--media-max-bytes)")


class ImagePrompter:
    """Puts images of one model into prompts. Holds no state of requests."""

    def __init__(self, vision: VisionSpec, vocabulary: Vocabulary) -> None:
        """Raises ModelError for a vocabulary without the tokens of images."""
        self._vision = vision
        self._placeholder = vocabulary.token(vision.token_id)
        if not self._placeholder:
            raise ModelError(f"the tokenizer has no token {vision.token_id}, which stands for images in config.json")
        self._layout = LAYOUTS.get(self._placeholder, PLAIN)
        found = {name: vocabulary.token_id(name) for name in msgspec.structs.astuple(self._layout) if name}
        self._ids = {name: token_id for name, token_id in found.items() if token_id is not None}
        for name in found.keys() - self._ids.keys():
            raise ModelError(f"the tokenizer has no token {name}, which this model's images need")

    def opened(self, rendered: Rendered) -> Rendered:
        """A chat with a placeholder for each image, where its template writes another token."""
        opening, closing = self._layout.opening, self._layout.closing
        if not opening:
            return rendered
        if not rendered.pieces:
            image = f"{BLANK}{opening}{self._placeholder}{closing}{BLANK}"
            return msgspec.structs.replace(rendered, text=rendered.text.replace(opening, image))
        plain, found = rendered.pieces[0], []
        for control, text in zip(rendered.pieces[1::2], rendered.pieces[2::2], strict=True):
            if control == opening:
                found += [plain + BLANK, opening, "", self._placeholder, "", closing]
                plain = BLANK + text
            else:
                found += [plain, control]
                plain = text
        pieces = (*found, plain)
        return msgspec.structs.replace(rendered, text="".join(pieces), pieces=pieces)

    def expanded(self, token_ids: list[int], pictures: Sequence[Picture]) -> tuple[list[int], tuple[Image, ...]]:
        """The prompt with the tokens of each image in place of its placeholder, and where they are.

        Raises InvalidRequest unless there are as many placeholders as images.
        """
        self._check(token_ids.count(self._vision.token_id), pictures)
        found: list[int] = []
        images: list[Image] = []
        behind = 0
        for picture in pictures:
            place = token_ids.index(self._vision.token_id, behind)
            found += token_ids[behind:place]
            behind = place + 1
            tokens = self.tokens(picture.size)
            image = Image(
                position=len(found),
                length=len(tokens),
                rows=self._vision.rows(picture.size),
                width=picture.width,
                height=picture.height,
                digest=picture.digest,
                pixels=picture.pixels,
            )
            images.append(image)
            found += tokens
        return found + token_ids[behind:], tuple(images)

    def tokens(self, size: Size) -> list[int]:
        """The tokens of one image, from its first placeholder on."""
        vision, layout = self._vision, self._layout
        if not layout.line_end:
            return [vision.token_id] * vision.rows(size)
        height, width = vision.grid(size)
        line = [*[vision.token_id] * width, self._ids[layout.line_end]]
        return [*(line * height)[:-1], self._ids[layout.end]]

    def _check(self, placeholders: int, pictures: Sequence[Picture]) -> None:
        images = len(pictures)
        if placeholders < images:
            message = f"the chat template shows the model {placeholders} of {images} images"
            raise InvalidRequest(message, param="messages", code="unsupported")
        if placeholders > images:
            message = f"messages must not spell {self._placeholder}, which stands for an image"
            raise InvalidRequest(message, param="messages")
        if sum(len(picture.pixels) for picture in pictures) > MOST_BYTES:
            message = f"the images of a prompt may take {MOST_BYTES >> 20} MiB as pixels; these take more"
            raise InvalidRequest(message, param="messages", code="image_too_large")


def check_place(request: SubmitText | Tokenize) -> None:
    """Raise InvalidRequest for images where none can be."""
    if not request.images:
        return
    if request.messages is None:
        raise Unsupported("images are parts of messages; a prompt has none", param=request.images[0].param or None)
    if isinstance(request, SubmitText) and request.pooling is not None:
        raise Unsupported("this server makes vectors of texts, not of images", param=request.images[0].param or None)
    if isinstance(request, SubmitText) and request.truncate:
        message = "a prompt with images is not truncated: leave out truncate_prompt_tokens"
        raise Unsupported(message, param="truncate_prompt_tokens")


def unseen(request: SubmitText | Tokenize) -> Unsupported:
    """The refusal of images by a model that sees none."""
    return Unsupported("this model does not see images", param=request.images[0].param or None)


def without_files(request: Call) -> Call:
    """The request without the bytes of its pictures: how many there are is still told."""
    if not request.images:
        return request
    files = tuple(msgspec.structs.replace(file, data=b"") for file in request.images)
    return msgspec.structs.replace(request, images=files)
