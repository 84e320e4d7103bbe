"""Images of requests by each API: where they stand in the messages, what goes to the tokenizer, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from openai.types.completion_usage import PromptTokensDetails

from penstock.protocol.images import DETAILS, ImageFile
from penstock.protocol.messages import Client, Finish, SubmitText, Tokenize
from penstock.services.openai.images import PIECE, decoded
from penstock.services.openai.schema import ImageURL
from tests.e2e.scripted import Engine, scripted
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, answering, app_state, client, words
from tests.services.openai.shapes import check_error

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ONE, TWO, THREE = (bytes([number]) * 40 for number in (1, 2, 3))
PLACE = {"type": "image"}


def data(image: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(image).decode()}"


def image_url(image: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data(image), **more}}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def sees(images: int = 3, **options: Any) -> tuple[Any, FakeLink]:
    port = FakeLink(answering(words("a ", "cat")))
    return app_state(port, images=images, **options), port


def asked(port: FakeLink) -> tuple[Any, list[tuple[bytes, str, str]]]:
    """Messages and images of the latest request."""
    sent = port.of(SubmitText)[-1]
    assert all(type(image) is ImageFile for image in sent.images)
    return json.loads(sent.messages), [(image.data, image.detail, image.param) for image in sent.images]


async def refusal(path: str, body: dict[str, Any], images: int = 3, **options: Any) -> tuple[str, str]:
    """The field that a request is refused for, and the message."""
    app, port = sees(images, **options)
    async with client(app) as http:
        found = await http.post(path, json=body)
    assert found.status_code == 400, found.text
    assert port.of(SubmitText) == port.of(Tokenize) == []
    error = found.json()["error"]
    return error.get("param") or "", error["message"]


async def test_images_of_a_chat_keep_their_places() -> None:
    app, port = sees()
    messages = [
        {"role": "system", "content": [text("be"), text("brief")]},
        {"role": "user", "content": [text("what is"), image_url(ONE, detail="low"), text("and"), image_url(TWO)]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [image_url(THREE), text("seen")], "name": "look"},
        {"role": "user", "content": [text("so"), text("?")]},
    ]  # fmt: skip
    async with client(app) as http:
        assert (await http.post(CHAT, json={"messages": messages})).status_code == 200
        found, images = asked(port)
        assert (await http.post("/tokenize", json={"messages": messages})).status_code == 200
        assert (await http.post("/invocations", json={"messages": messages})).status_code == 200
    assert found == [
        {"role": "system", "content": "be\nbrief"},
        {"role": "user", "content": [text("what is"), PLACE, text("and"), PLACE]},
        messages[2],
        {"role": "tool", "tool_call_id": "c", "content": [PLACE, text("seen")], "name": "look"},
        {"role": "user", "content": "so\n?"},
    ]
    assert images == [
        (ONE, "low", "messages[1].content[1].image_url.url"),
        (TWO, "auto", "messages[1].content[3].image_url.url"),
        (THREE, "auto", "messages[3].content[0].image_url.url"),
    ]
    (counted,) = port.of(Tokenize)
    sent = port.of(SubmitText)[0]
    assert (json.loads(counted.messages), counted.images) == (found, sent.images)
    assert counted.client == sent.client != Client(), "its images wait for the client's own"
    assert app.traffic.images.received == {"data": 9}


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_images_are_told(stream: bool) -> None:
    def make(request: SubmitText) -> list[list[Row]]:
        tokens = {"prompt_tokens": 20, "cached_tokens": 3, "image_tokens": 16 * len(request.images)}
        return [[Row(text="a", extra=tokens)], [Row(text="b", finish=Finish.STOP)]]

    app = app_state(FakeLink(answering(make)), images=3)
    details = []
    async with client(app) as http:
        for content in (USER[0]["content"], "hi"):
            body = {"messages": [{"role": "user", "content": content}], "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            found = (await http.post(CHAT, json=body)).text
            last = found.split("data: ")[-2] if stream else found
            details.append(json.loads(last)["usage"]["prompt_tokens_details"])
            PromptTokensDetails.model_validate(details[-1], strict=True)
    assert details == [{"cached_tokens": 3, "image_tokens": 16}, {"cached_tokens": 3}]


async def test_an_image_is_given_as_a_string_too() -> None:
    app, port = sees()
    part = {"type": "image_url", "image_url": data(ONE)}
    async with client(app) as http:
        await http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    assert asked(port)[1] == [(ONE, "auto", "messages[0].content[0].image_url")]


async def test_images_of_a_response() -> None:
    app, port = sees()
    image = {"type": "input_image", "image_url": data(ONE), "detail": "high"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}, image]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": data(TWO)},
                                                                    {"type": "input_text", "text": "here"}]},
    ]  # fmt: skip
    async with client(app) as http:
        found = await http.post(RESPONSES, json={"input": items})
    assert found.status_code == 200, found.text
    messages, images = asked(port)
    assert [message["content"] for message in messages] == [[text("look"), PLACE], None, [PLACE, text("here")]]
    assert images == [
        (ONE, "high", "input[0].content[1].image_url"),
        (TWO, "auto", "input[2].output[0].image_url"),
    ]
    assert "penstock" not in found.json()  # nothing was left out


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_goes_on_from_one_with_images(background: bool) -> None:
    """Images are kept with the conversation; its items are listed without their bytes."""
    app, port = sees()
    first = {"role": "user", "content": [{"type": "input_image", "image_url": data(ONE), "detail": "low"}]}
    second = {"role": "user", "content": [{"type": "input_image", "image_url": data(TWO)}]}
    async with client(app) as http:
        made = (await http.post(RESPONSES, json={"input": [first], "background": background})).json()
        await app.background.ended(LIMIT)
        items = (await http.get(f"{RESPONSES}/{made['id']}/input_items")).json()["data"]
        body = {"input": [second], "previous_response_id": made["id"]}
        again = await http.post(RESPONSES, json=body)
        assert again.status_code == 200, again.text
        body["input"][0]["content"] *= 3
        more = await http.post(RESPONSES, json=body)
    assert items[0]["content"] == [{"type": "input_image", "image_url": None, "file_id": None, "detail": "low"}]
    messages, images = asked(port)
    assert [message["content"] for message in messages] == [[PLACE], "a cat", [PLACE]]
    assert images == [(ONE, "low", "previous_response_id"), (TWO, "auto", "input[0].content[0].image_url")]
    assert more.status_code == 400
    assert more.json()["error"]["param"] == "input[0].content[2]"


async def test_images_of_a_message() -> None:
    app, port = sees()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg",
                                         "data": base64.b64encode(ONE).decode()}}  # fmt: skip
    url = {"type": "image", "source": {"type": "url", "url": data(TWO)}, "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [block, text("what?")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text("a"), url]},
                                     text("go on")]},
    ]  # fmt: skip
    async with client(app) as http:
        found = await http.post(MESSAGES, json={"messages": messages, "max_tokens": 9})
        assert found.status_code == 200, found.text
        count = await http.post(f"{MESSAGES}/count_tokens", json={"messages": messages})
        assert count.status_code == 200
    given, images = asked(port)
    assert [message["content"] for message in given] == [[PLACE, text("what?")], None, [text("a"), PLACE], "go on"]
    assert images == [
        (ONE, "auto", "messages[0].content[0].source.data"),
        (TWO, "auto", "messages[2].content[0].content[1].source.url"),
    ]
    (counted,) = port.of(Tokenize)
    sent = port.of(SubmitText)[0]
    assert (counted.images, counted.client) == (sent.images, sent.client)


USER = [{"role": "user", "content": [image_url(ONE)]}]
ITEMS = [{"role": "user", "content": [{"type": "input_image", "image_url": data(ONE)}]}]
BLOCKS = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": data(ONE)}}]}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER}, "messages[0].content[0]"),
        ("/tokenize", {"messages": USER}, "messages[0].content[0]"),
        (RESPONSES, {"input": ITEMS}, "input[0].content[0]"),
        (MESSAGES, {"messages": BLOCKS, "max_tokens": 9}, "messages[0].content[0]"),
        (f"{MESSAGES}/count_tokens", {"messages": BLOCKS}, "messages[0].content[0]"),
    ],
)
async def test_a_model_that_does_not_see_says_so(path: str, body: dict[str, Any], param: str) -> None:
    found, message = await refusal(path, body, images=0)
    assert message == f"{param}: this model does not see images"
    if not path.startswith(MESSAGES):
        assert found == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": USER * 4}, "messages[3].content[0]"),
        (RESPONSES, {"input": ITEMS * 4}, "input[3].content[0]"),
        (MESSAGES, {"messages": BLOCKS * 4, "max_tokens": 9}, "messages[3].content[0]"),
    ],
)
async def test_more_images_than_a_prompt_may_have(path: str, body: dict[str, Any], param: str) -> None:
    _, message = await refusal(path, body)
    assert message == f"{param}: a request may have 3 images (--limit-mm-per-prompt)"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("data:image/png;base64,", "without any bytes"), ("data:image/png;base64,\n \t", "without any bytes"),
        ("data:image/png;base64,AAA", "not valid base64"), ("data:image/png;base64,AA=A", "not valid base64"),
        ("data:image/png;base64,AA==AAAA", "not valid base64"), ("data:image/png;base64,AA-_", "not valid base64"),
        ("data:image/png;base64,AAA%3D", "not valid base64"), ("data:image/png;base64,ÄAAA", "not valid base64"),
        ("data:image/png;base64,A", "not valid base64"), ("data:image/png;base64,====", "not valid base64"),
        ("data:image/png;base64,AAAA\x00", "not valid base64"), ("data:image/png,AAAA", "data:image/png;base64"),
        ("data:", "data:image/png;base64"), ("data:;base64", "data:image/png;base64"),
        ("data:text/html;base64,AAAA", "'text/html' is not served"), ("data:video/mp4;base64,AAAA", "'video/mp4'"),
        ("http://example.org/a.png", "begin with https://"), ("file:///etc/passwd", "begin with https://"),
        ("/etc/passwd", "begin with https://"), ("blob:x", "begin with https://"), ("", "begin with https://"),
        ("AAAA", "begin with https://"), ("https://example.org/a.png", "--allowed-media-domains"),
    ],
)  # fmt: skip
async def test_urls_that_are_refused(url: str, told: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    param, message = await refusal(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert param == "messages[0].content[0].image_url.url"
    assert message.startswith(param)
    assert told in message


STARTS = {"png": b"\x89PNG\r\n\x1a\n" + ONE, "jpeg": b"\xff\xd8\xff" + ONE, "webp": b"RIFF\0\0\0\0WEBP" + ONE}


@pytest.mark.parametrize(
    ("kind", "format", "right"),
    [
        ("image/png", "png", True), ("image/x-png", "png", True), ("IMAGE/PNG", "png", True), ("image/*", "jpeg", True),
        ("image/jpeg", "jpeg", True), ("image/jpg", "jpeg", True), ("image/webp", "webp", True), ("", "jpeg", True),
        ("image/png;charset=x", "png", True), ("application/octet-stream", "jpeg", True),
        ("image/jpeg", "png", False), ("image/png", "jpeg", False), ("image/png", "webp", False),
        ("image/gif", "webp", False), ("image/svg+xml", "png", False),
    ],
)  # fmt: skip
async def test_an_image_is_what_its_media_type_says(kind: str, format: str, right: bool) -> None:
    image = STARTS[format]
    url = data(image, kind)
    parts = {"input_image": {"type": "input_image", "image_url": url}, "url": {"type": "url", "url": url}}
    base = {"type": "base64", "media_type": kind, "data": base64.b64encode(image).decode()}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, part(type="image_url", image_url={"url": url}), "messages[0].content[0].image_url.url"),
        (RESPONSES, {"input": [{"role": "user", "content": [parts["input_image"]]}]}, "input[0].content[0].image_url"),
        (MESSAGES, source(**parts["url"]), "messages[0].content[0].source.url"),
    ]
    if kind and ";" not in kind:
        cases.append((MESSAGES, source(**base), "messages[0].content[0].source.data"))
    told = f"its media type is {kind.lower()!r}, but it is a {'WebP' if format == 'webp' else format.upper()}"
    for path, body, param in cases:
        app, port = sees()
        async with client(app) as http:
            found = await http.post(path, json=body)
        assert found.status_code == (200 if right else 400), found.text
        assert len(port.of(SubmitText)) == right
        assert app.traffic.images.refused == ({} if right else {"media_type": 1})
        if not right:
            assert found.json()["error"]["message"] == f"{param}: {told} (image/{format})"


def source(**fields: Any) -> dict[str, Any]:
    return {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": fields}]}]}


def part(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "tool_call_id": "c", "content": [fields]}]}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (CHAT, part(type="image_url"), "messages[0].content[0].image_url is missing"),
        (CHAT, part(type="image_url", image_url={}), "messages[0].content[0].image_url.url is missing"),
        (CHAT, part(type="image_url", image_url={"url": 5}), "messages[0].content[0].image_url.url"),
        (CHAT, part(**image_url(ONE, detail="best")), "it may be auto, high, low, original"),
        (CHAT, part("assistant", **image_url(ONE)), "messages of users and tools, not of role assistant"),
        (CHAT, part("system", **image_url(ONE)), "messages of users and tools, not of role system"),
        (CHAT, part(type="input_audio", input_audio={}), "'input_audio' is not supported; this server reads"),
        (CHAT, part(type="video_url", video_url={}), "this server reads text and images only"),
        (CHAT, part(type="file", file={}), "'file' is not supported; this server reads text and images only"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "no files"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image_url is missing"),
        (RESPONSES, {"input": [{"role": "system", "content": ITEMS[0]["content"]}]}, "stand in messages of users"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "reads text and images only"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "reads text and images only"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_video"}]}]}, "reads text and images only"),
        (MESSAGES, {"max_tokens": 9, **part(type="video", source={})}, "reads text and images only"),
        (MESSAGES, {"max_tokens": 9, **part(type="audio", source={})}, "reads text and images only"),
        (MESSAGES, source(type="file", file_id="f"), "this server keeps no files"),
        (MESSAGES, source(type="text", data="x"), "images of type base64 and url are read"),
        (MESSAGES, source(type="url"), "messages[0].content[0].source.url is missing"),
        (MESSAGES, source(type="base64", media_type="image/png"), "messages[0].content[0].source.data is missing"),
        (MESSAGES, source(type="base64", data="AAAA"), "messages[0].content[0].source.media_type is missing"),
        (MESSAGES, source(type="base64", data="AAAA", media_type="application/pdf"), "'application/pdf' is not served"),
        (MESSAGES, source(type="base64", data="!", media_type="image/png"), "source.data is not valid base64"),
        (MESSAGES, source(type="base64", data="", media_type="image/png"), "source.data is an image without any bytes"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "assistant", "content": BLOCKS[0]["content"]}]},
         "messages of users and in results of tools"),
        (MESSAGES, {**source(type="url", url=data(ONE)), "system": BLOCKS[0]["content"]}, "system[0].type: images"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "prediction":
                {"type": "content", "content": [image_url(ONE)]}}, "prediction.content[0].type"),
        ("/v1/embeddings", {"input": [image_url(ONE)]}, "input[0]"),
        ("/v1/embeddings", {"input": "a", "messages": USER}, "messages is not supported"),
        ("/v2/embed", {"model": "demo", "input_type": "x", "images": [data(ONE)]}, ""),
        ("/v1/score", {"text_1": {"content": [image_url(ONE)]}, "text_2": "a"}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": [{"content": [image_url(ONE)]}]}, "documents[0]"),
    ],
)  # fmt: skip
async def test_what_is_not_taken_is_named(path: str, body: dict[str, Any], told: str) -> None:
    _, message = await refusal(path, body)
    assert told in message


@pytest.mark.parametrize("length", [0, 1, 2, 3, PIECE // 4 * 3 - 1, PIECE // 4 * 3, PIECE // 4 * 3 + 1, PIECE * 2 + 5])
def test_base64_in_pieces_is_what_it_is_in_one(length: int) -> None:
    image = bytes(range(256)) * (length // 256 + 1)
    image = image[:length]
    plain = base64.b64encode(image).decode()
    wrapped = base64.encodebytes(image).decode().replace("\n", "\r\n ")
    assert b"".join(decoded(plain)) == b"".join(decoded(wrapped)) == image
    for wrong in (plain + "A", plain + "====", "=" + plain, plain[:-1] + "*"):
        with pytest.raises(ValueError):
            b"".join(decoded(wrong))


def test_details_are_the_protocols() -> None:
    for detail in DETAILS:
        assert msgspec.convert({"url": "", "detail": detail}, ImageURL).detail == detail


async def test_nothing_of_a_body_is_held_twice() -> None:
    """While an answer is made, its request holds the image's bytes and no text of them."""
    image = bytes(range(256)) * (1 << 14)
    bodies = {
        CHAT: {"messages": [{"role": "user", "content": [image_url(image)]}]},
        RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": data(image)}]}],
                    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]},
        MESSAGES: {**source(type="base64", media_type="image/png", data=base64.b64encode(image).decode())},
    }  # fmt: skip
    for path, body in bodies.items():
        came = asyncio.Event()
        port = FakeLink(lambda link, message, came=came: came.set())  # type: ignore[misc]
        app = app_state(port, images=3)
        sent = json.dumps(body).encode()
        async with client(app) as http:
            gc.collect()
            tracemalloc.start()
            asking = asyncio.create_task(http.post(path, content=sent, headers={"content-type": "application/json"}))
            await came.wait()
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert port.of(SubmitText)[0].images[0].data == image
        assert len(image) <= held < len(image) * 1.2, path


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with scripted(images=3) as found:
        yield found


def played(engine: Engine, ask: Callable[[], Any]) -> tuple[Any, SubmitText]:
    """What a client makes of the answer "a cat", and what it asked."""
    before = len(engine.link.of(SubmitText))
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        engine.until(lambda: len(engine.link.of(SubmitText)) > before or asking.done())
        if not asking.done():
            engine.say("a ")
            engine.end("cat")
        return asking.result(), engine.latest


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_sends_images(engine: Engine, stream: bool) -> None:
    with openai.OpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0) as asking:
        content: Any = [{"type": "text", "text": "what?"}, image_url(ONE, detail="high")]

        def chat() -> str:
            found = asking.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": content}], stream=stream
            )
            if not stream:
                return found.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)

        def respond() -> str:
            parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": data(ONE),
                                                               "detail": "high"}]  # fmt: skip
            found = asking.responses.create(model="demo", input=[{"role": "user", "content": parts}], stream=stream)  # type: ignore[call-overload]
            if not stream:
                return str(found.output_text)
            return "".join(event.delta for event in found if event.type == "response.output_text.delta")

        for ask in (chat, respond):
            said, sent = played(engine, ask)
            assert said == "a cat"
            assert json.loads(sent.messages or b"") == [{"role": "user", "content": [text("what?"), PLACE]}]
            assert [(image.data, image.detail) for image in sent.images] == [(ONE, "high")]
        models = asking.models.list().data
    assert [model.input_modalities for model in models] == [["text", "image"]] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_client_sends_images(engine: Engine, stream: bool) -> None:
    with anthropic.Anthropic(base_url=engine.url, api_key="none", max_retries=0) as asking:
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                                  "data": base64.b64encode(ONE).decode()}}  # fmt: skip
        words: Any = {
            "model": "demo",
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [image, text("what?")]}],
        }

        def ask() -> str:
            if stream:
                with asking.messages.stream(**words) as found:
                    return "".join(found.text_stream)
            return str(asking.messages.create(**words).content[0].text)

        said, sent = played(engine, ask)
    assert said == "a cat"
    assert json.loads(sent.messages or b"") == [{"role": "user", "content": [PLACE, text("what?")]}]
    assert [image.data for image in sent.images] == [ONE]


async def test_the_models_page_says_who_sees() -> None:
    for images, modalities in ((3, ["text", "image"]), (0, ["text"])):
        app, _ = sees(images)
        async with client(app) as http:
            found = (await http.get("/v1/models")).json()["data"][0]
            health = (await http.get("/health")).json()
            refused = await http.post(CHAT, json={"messages": [{"role": "user", "content": [{"type": "x"}]}]})
        assert found["input_modalities"] == modalities
        assert health["input_modalities"] == modalities
        check_error(refused.json(), "invalid_request_error", "messages[0].content[0].type")
