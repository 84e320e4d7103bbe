"""The loop with images: they are decoded elsewhere, before the prompt is made, and travel with its tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.engine_core.images.picture import Picture
from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.text.frontend import Frontend
from penstock.engine_core.text.rendering import Rendered
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.images import ImageFile
from penstock.protocol.messages import (
    Abort,
    Client,
    Finish,
    Rejected,
    Sampling,
    SubmitText,
    SubmitTokens,
    Tokenize,
    Tokenized,
)
from penstock.protocol.outputs import TextBatch
from penstock.services.links.link import Joined, Left
from penstock.services.tokenizer.server_loop import Workers
from tests.engine_core.text.sighted import FAMILIES
from tests.engine_core.text.streams import STATUS
from tests.engine_core.text.test_image_prompt import prompter, said
from tests.services.tokenizer.test_server_loop import Neighbour, new_loop, until

SIGHT = Picture(32, 64, bytes(16), bytes(3 * 32 * 64))
MESSAGES = json.dumps(said("what is that?")).encode()
FILES = (ImageFile(data=b"file", param="image 0"),)


class Decoder:
    """Decodes when it is told to, and tries requests."""

    def __init__(self) -> None:
        self.asked: list[Sequence[ImageFile]] = []
        self.alive: Callable[[int], bool] = bool
        self.clients: list[Client] = []
        self.wanted: Callable[[], bool] = bool
        self.go = asyncio.Event()
        self.tried: list[tuple[Any, Sequence[Picture]]] = []
        self.rendered: list[SubmitText] = []

    async def pictures(
        self, files: Sequence[ImageFile], request: int, alive: Callable[[int], bool], client: Client,
        wanted: Callable[[], bool],
    ) -> tuple[Picture, ...]:  # fmt: skip
        self.asked.append(files)
        self.alive, self.wanted = alive, wanted
        self.clients.append(client)
        assert alive(request)
        await self.go.wait()
        if files[0].data == b"bad":
            raise InvalidRequest("image 0: it is a GIF", param="image 0", code="invalid_image_format")
        return (SIGHT,) * len(files)

    async def fatal(self, call: Any, now: float, rendered: Rendered | None, pictures: Sequence[Picture]) -> str:
        self.tried.append((call, pictures))
        return ""

    async def render(self, request: SubmitText, now: float) -> Rendered:
        self.rendered.append(request)
        return Rendered(text="<|image_pad|> own")


class Scene:
    """A loop between one api process and a scheduler."""

    def __init__(self, *, sees: bool = True) -> None:
        self.decoder: Any = Decoder()
        self.threads = ThreadPoolExecutor(1)
        self.api, self.scheduler = Neighbour(), Neighbour()
        self.frontend = Frontend(FAMILIES["qwen"].vocabulary(), prompter("qwen"), Placement("least_loaded", 1, 16))
        workers = Workers(self.decoder, self.decoder, self.decoder if sees else None)
        self.loop = new_loop(self.frontend, self.threads, workers)
        self.loop.from_apis([self.api.arrival(Joined())])
        self.loop.from_scheduler(0, [self.scheduler.arrival(Joined()), self.scheduler.arrival(STATUS)])

    def ask(self, call: SubmitText | Tokenize) -> None:
        self.loop.from_apis([self.api.arrival(call)])


def text(number: int = 1, files: tuple[ImageFile, ...] = FILES, **fields: Any) -> SubmitText:
    return SubmitText(id=number, messages=MESSAGES, images=files, sampling=Sampling(), stream=True, **fields)


@pytest.fixture
async def scene() -> Any:
    scene = Scene()
    yield scene
    scene.loop.close()
    scene.threads.shutdown()


async def test_pictures_travel_with_the_tokens_and_hold_up_nobody(scene: Scene) -> None:
    scene.ask(text(1))
    scene.ask(SubmitText(id=2, prompt="one", sampling=Sampling()))
    (other,) = await until(scene.scheduler, SubmitTokens)
    assert (other.id, other.images) == (2, ())
    scene.decoder.go.set()
    found = (await until(scene.scheduler, SubmitTokens, 2))[1]
    assert [(image.length, image.rows, image.pixels) for image in found.images] == [(2, 2, SIGHT.pixels)]
    assert scene.frontend._requests[1].message is found, "another scheduler gets the same"


async def test_a_chat_is_tokenized_with_its_images(scene: Scene) -> None:
    scene.decoder.go.set()
    scene.ask(Tokenize(id=3, messages=MESSAGES, images=FILES, with_strings=True))
    (found,) = await until(scene.api, Tokenized)
    assert found.token_strings is not None
    assert found.token_strings.count("<|image_pad|>") == 2


async def test_pixels_are_counted_until_a_request_ends(scene: Scene) -> None:
    scene.decoder.go.set()
    scene.ask(text(1))
    await until(scene.scheduler, SubmitTokens)
    scene.ask(Tokenize(id=3, messages=MESSAGES, images=FILES))
    await until(scene.api, Tokenized)
    await asyncio.gather(*scene.loop._work)
    await asyncio.sleep(0)
    assert [scene.decoder.alive(number) for number in (1, 2, 3)] == [True, False, False]
    scene.loop.from_scheduler(0, [scene.scheduler.arrival(Rejected(id=1, status=400, message="no"))])
    assert not scene.decoder.alive(1)


async def test_refusals_reach_the_api(scene: Scene) -> None:
    scene.decoder.go.set()
    scene.ask(text(1, (ImageFile(data=b"bad"),)))
    (rejected,) = await until(scene.api, Rejected)
    assert (rejected.id, rejected.status, rejected.param) == (1, 400, "image 0")
    assert (rejected.message, rejected.code) == ("image 0: it is a GIF", "invalid_image_format")
    scene.ask(text(2, truncate=4))
    rejected = (await until(scene.api, Rejected, 2))[1]
    assert rejected.param == "truncate_prompt_tokens"
    assert len(scene.decoder.asked) == 1, "what is refused anyway is not decoded"


async def test_a_model_that_sees_no_images_says_so() -> None:
    scene = Scene(sees=False)
    scene.ask(text(1))
    scene.ask(Tokenize(id=2, messages=MESSAGES, images=FILES))
    for rejected in await until(scene.api, Rejected, 2):
        assert (rejected.message, rejected.param) == ("this model does not see images", "image 0")
    scene.loop.close()
    scene.threads.shutdown()


async def test_an_abort_wins_over_the_decoding(scene: Scene) -> None:
    scene.ask(text(1))
    scene.loop.from_apis([scene.api.arrival(Abort(1))])
    (ended,) = await until(scene.api, TextBatch)
    assert ended.finish == bytes([Finish.ABORT])
    scene.decoder.go.set()
    scene.ask(text(2))
    (found,) = await until(scene.scheduler, SubmitTokens)
    assert found.id == 2


async def test_pictures_are_wanted_while_somebody_waits(scene: Scene) -> None:
    """Of whom the decoder is told who it is."""
    one, other = Client(name="one"), Client("key", "other")
    scene.ask(text(1, client=one))
    await asyncio.sleep(0)
    assert scene.decoder.wanted()
    scene.loop.from_apis([scene.api.arrival(Abort(1))])
    assert not scene.decoder.wanted()
    scene.ask(Tokenize(id=3, messages=MESSAGES, images=FILES, client=other))
    await asyncio.sleep(0)
    assert scene.decoder.wanted()
    scene.loop.from_apis([scene.api.arrival(Left("gone"))])
    assert not scene.decoder.wanted()
    assert scene.decoder.clients == [one, other]


async def test_files_go_to_the_decoder_alone(scene: Scene) -> None:
    """Templates of requests and trials learn how many pictures there are, and trials their sizes."""
    scene.decoder.go.set()
    scene.ask(text(1, chat_template="own", suspect=True))
    (found,) = await until(scene.scheduler, SubmitTokens)
    assert found.images[0].rows == 2
    (call, pictures) = scene.decoder.tried[0]
    assert [file.data for file in (*call.images, *scene.decoder.rendered[0].images)] == [b"", b""]
    assert pictures == (SIGHT,)
