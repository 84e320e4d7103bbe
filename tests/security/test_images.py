"""What requests with images could do to a server: have it fetch from where it should not, wait, or fill up.

The server of images is a real one with TLS; the network that leads to it is the test's, and so are its addresses.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.protocol.messages import SubmitText
from penstock.services.openai.media_fetcher import AT_ONCE_EACH, is_public
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, clock, words
from tests.services.openai.image_server import (
    HOST,
    PNG,
    ImageServer,
    answer,
    image_server,
    make_certificates,
    needs_openssl,
)
from tests.services.openai.shapes import check_error

pytestmark = needs_openssl

CHAT = "/v1/chat/completions"
SOON = 0.3  # seconds
PATIENT = 30.0  # seconds of --media-timeout, which are wound on where something is to time out
TURNS = 100  # of the loop, in which an attack does what it does


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture
async def images(certificates: Path) -> AsyncIterator[ImageServer]:
    async with image_server(certificates) as found:
        yield found


def asking(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], **more}


def served(images: ImageServer, **options: Any) -> tuple[Any, FakeLink]:
    """The api over a fake engine that sees images, which fetches from HOST at the port of `images`."""
    port = FakeLink(answering(words("ok")))
    options = {"allowed_media_domains": f"{HOST}:{images.port}", "images": 16, "media": images.network, **options}
    options.setdefault("media_timeout", PATIENT)
    return app_state(port, **options), port


def refused(found: httpx.Response, port: FakeLink, told: str, reason: str, app: Any) -> None:
    """It is a 400 that names the field, says `told` and no address, and nothing went to the engine."""
    assert found.status_code == 400, found.text
    check_error(found.json(), "invalid_request_error", "messages[0].content[0].image_url.url")
    message = found.json()["error"]["message"]
    assert told in message
    assert "127.0.0.1" not in message
    assert "Errno" not in message
    assert port.of(SubmitText) == []
    assert app.traffic.images.refused == {reason: 1}


async def test_an_image_is_fetched_from_the_address_that_was_checked(
    images: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is resolved once, and its certificate and Host are the name's. No proxy of the environment is asked."""
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    app, port = served(images)
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url("/a%20b/ü.png?c=d&e=%2F#f")))
    assert found.status_code == 200, found.text
    (sent,) = port.of(SubmitText)
    assert [(image.data, image.detail, image.param) for image in sent.images] == [
        (PNG, "auto", "messages[0].content[0].image_url.url")
    ]
    assert json.loads(sent.messages) == [{"role": "user", "content": [{"type": "image"}]}]
    assert images.resolved == [HOST]
    (head,) = images.seen
    lines = head.decode().split("\r\n")
    assert lines[0] == "GET /a%20b/%C3%BC.png?c=d&e=%2F HTTP/1.1"
    assert f"Host: {HOST}:{images.port}" in lines
    assert app.traffic.images.received == {"url": 1}
    assert sum(app.traffic.images.fetch.statistics().counts) == 1


@pytest.mark.parametrize(
    ("header", "right"),
    [
        ("image/png", True), ("image/png; a=b", True), ("application/octet-stream", True), ("text/plain", True),
        ("image/jpeg", False), ("image/gif", False),
    ],
)  # fmt: skip
async def test_what_is_fetched_is_the_image_that_its_server_says(images: ImageServer, header: str, right: bool) -> None:
    app, port = served(images)
    images.answer = answer(PNG, "200 OK", f"Content-Type: {header}")
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url()))
    if right:
        assert found.status_code == 200, found.text
    else:
        refused(found, port, f"its media type is {header!r}, but it is a PNG (image/png)", "media_type", app)


@pytest.mark.parametrize(
    "url",
    [
        "http://{host}/a", "ftp://{host}/a", "file:///etc/passwd", "https://evil.example/a", "https://{host}.evil.example/a",
        "https://evil.example/?{host}", "https://evil.example#@{host}/", "https://{host}@evil.example/",
        "https://u:p@{host}/a", "https://{host}:{port}@evil.example/", "https://evil.example\\@{host}/",
        "https://{host}\\.evil.example/", "https://{name}/a", "https://{name}:8443/a", "https://x.{host}/a",
        "https://127.0.0.1:{port}/a", "https://2130706433:{port}/a", "https://0x7f000001/a", "https://0177.0.0.1/a",
        "https://127.1/a", "https://[::1]:{port}/a", "https://[::ffff:127.0.0.1]:{port}/a", "https://localhost:{port}/a",
        "https:{host}/a", "https:///{host}/a", "https://{host}:x/a", "https://{name}:{port}0000/a", "https:// {host}/a",
        "https://{host}/a\r\nX-Evil: 1", "https://{host}/a b", "https://{name}./a", "https://{name}%00.evil.example/",
        "https://①②⑦.⓪.⓪.①/a", "https://", "//{host}/a", "{host}/a", "", "https://{host}/" + "a" * 9000,
    ],
)  # fmt: skip
async def test_other_places_are_not_even_looked_up(images: ImageServer, url: str) -> None:
    app, port = served(images)
    given = url.format(host=f"{HOST}:{images.port}", name=HOST, port=images.port)
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(given))
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert found.json()["error"]["code"] == "invalid_image_url"
    assert images.resolved == []
    assert images.most_open == 0
    assert port.of(SubmitText) == []


async def test_nothing_is_fetched_unless_the_operator_says_from_where(images: ImageServer) -> None:
    app, port = served(images, allowed_media_domains="")
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url()))
    refused(found, port, "--allowed-media-domains", "host", app)
    assert images.resolved == []


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"], ["10.0.0.1"], ["172.16.0.1"], ["192.168.1.1"], ["169.254.169.254"], ["100.64.0.1"], ["0.0.0.0"],
        ["224.0.0.1"], ["239.255.255.250"], ["255.255.255.255"], ["240.0.0.1"], ["192.0.2.1"], ["198.18.0.1"],
        ["::1"], ["::"], ["fe80::1"], ["fc00::1"], ["fec0::1"], ["ff02::1"], ["2001:db8::1"], ["::ffff:127.0.0.1"],
        ["::ffff:8.8.8.8"], ["::127.0.0.1"], ["::ffff:0:127.0.0.1"], ["64:ff9b::7f00:1"], ["64:ff9b::a00:1"],
        ["64:ff9b:1::7f00:1"], ["2002:7f00:1::1"], ["2002:808:808::1"], ["2001:0:808:808::1"], ["fe80::1%1"],
        ["8.8.8.8", "127.0.0.1"], ["2606:4700::1111", "::1"], [],
    ],
    ids=str,
)  # fmt: skip
async def test_no_address_but_public_ones_is_asked(images: ImageServer, addresses: list[str]) -> None:
    images.addresses = addresses
    app, port = served(images, media={**images.network, "allowed": is_public})
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url()))
    refused(found, port, f"{HOST} does not have public addresses alone", "address", app)
    assert images.most_open == 0


async def test_a_name_that_is_resolved_differently_later_changes_nothing(images: ImageServer) -> None:
    """DNS rebinding: what is connected to is what was checked, so the second answer is never asked for."""
    checked: list[str] = []

    def allowed(address: object) -> bool:
        checked.append(str(address))
        images.addresses = ("10.0.0.1",)
        return True

    app, _ = served(images, media={**images.network, "allowed": allowed})
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url()))
    assert found.status_code == 200
    assert (images.resolved, checked) == ([HOST], ["127.0.0.1"])


async def slow_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    await reader.read()  # until the api has had enough


async def dripping_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(reader, writer, b"HTTP/1.1 200 OK\r\nX-A: ")


async def dripping_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await drip(reader, writer, b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(head)
    while not writer.is_closing() and not reader.at_eof():
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0)


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"8000\r\n" + bytes(0x8000) + b"\r\n")
        await writer.drain()


async def endless_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"X-A: " + b"a" * 4096 + b"\r\n")
        await writer.drain()


async def endless_hints(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    while not writer.is_closing() and not reader.at_eof():
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0)


async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("attack", "told", "reason"),
    [
        (slow_head, "within 30 s (--media-timeout)", "timeout"),
        (dripping_head, "within 30 s (--media-timeout)", "timeout"),
        (dripping_body, "within 30 s (--media-timeout)", "timeout"),
        (endless_hints, "within 30 s (--media-timeout)", "timeout"),
        (endless, "more than 65536 bytes (--max-body-bytes)", "size"),
        (endless_head, "does not speak HTTP", "answer"),
        (answer(length=65537), "more than 65536 bytes (--max-body-bytes)", "size"),
        (answer(length=1 << 60), "more than 65536 bytes (--max-body-bytes)", "size"),
        (answer(length=len(PNG) + 1), "broke off", "answer"),
        (answer(b""), "sent nothing", "answer"),
        (answer(gzip.compress(bytes(1 << 20)), "200 OK", "Content-Encoding: gzip"), "compressed", "answer"),
        (answer(b"", "302 Found", "Location: https://127.0.0.1/"), "redirects (302)", "status"),
        (answer(b"", "301 Moved", f"Location: https://{HOST}/"), "redirects (301)", "status"),
        (answer(status="404 Not Found"), "answered with 404", "status"),
        (answer(status="206 Partial Content"), "answered with 206", "status"),
        (answer(PNG, "200 OK", "Content-Length: 5"), "does not speak HTTP", "answer"),
        (nonsense, "does not speak HTTP", "answer"),
        (gone, "broke off", "answer"),
    ],
)  # fmt: skip
async def test_a_host_that_answers_badly_costs_its_request_alone(
    images: ImageServer, attack: Any, told: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.answer = attack
    app, port = served(images, max_body_bytes=65536)
    wind = clock(monkeypatch)
    async with client(app) as http:
        asked = asyncio.create_task(http.post(CHAT, json=asking(images.url())))
        await images.opened.wait()
        other = await http.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]})
        assert other.status_code == 200
        port.sent.clear()
        if reason == "timeout":
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert not asked.done()
            wind(PATIENT)
        found = await asked
    refused(found, port, told, reason, app)
    assert app.engine_client.statistics().unfinished == 0


async def test_what_follows_the_length_is_not_read(images: ImageServer) -> None:
    images.answer = answer(PNG + b"more", length=len(PNG))
    app, port = served(images)
    async with client(app) as http:
        assert (await http.post(CHAT, json=asking(images.url()))).status_code == 200
    assert port.of(SubmitText)[0].images[0].data == PNG


async def unencrypted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize("wrong", ["name", "signer", "plain", "closed"])
async def test_who_is_not_the_host_by_its_certificate_is_not_believed(
    images: ImageServer, wrong: str, tmp_path: Path
) -> None:
    media = images.network
    host = HOST
    if wrong == "name":
        host = "other.example"
    if wrong == "signer":
        media["trusted"] = ssl.create_default_context()
    place = images.port
    if wrong in ("plain", "closed"):
        plain = await asyncio.start_server(unencrypted, "127.0.0.1", 0)
        place = plain.sockets[0].getsockname()[1]
        if wrong == "closed":
            plain.close()
    app, port = served(images, allowed_media_domains=f"{host}:{place}", media=media)
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(f"https://{host}:{place}/a"))
    refused(found, port, f"{host} could not be reached by https", "connection", app)
    assert images.seen == []
    if wrong == "plain":
        plain.close()


async def test_one_client_has_few_fetches_at_once_and_others_have_theirs(images: ImageServer) -> None:
    """Sixteen images of a request whose host does not answer: half of them wait, and another client's goes on."""
    release = asyncio.Event()

    async def held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/slow" in head:
            await release.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        await writer.drain()

    images.answer = held
    app, port = served(images)
    async with client(app) as http:
        slow = asyncio.create_task(http.post(CHAT, json=asking(*[images.url("/slow")] * 16, user="one")))
        while images.open < AT_ONCE_EACH:
            images.opened.clear()
            await images.opened.wait()
        assert (await http.post(CHAT, json=asking(images.url("/fast"), user="other"))).status_code == 200
        assert images.open == AT_ONCE_EACH
        release.set()
        assert (await slow).status_code == 200
    assert images.most_open <= AT_ONCE_EACH + 1
    assert [len(sent.images) for sent in port.of(SubmitText)] == [1, 16]


async def test_the_first_image_that_cannot_be_had_ends_the_others(images: ImageServer) -> None:
    async def by_name(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/bad" in head:
            writer.write(b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n")
        else:
            await reader.read()

    images.answer = by_name
    app, port = served(images)
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url("/slow"), images.url("/bad")))
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages[0].content[1].image_url.url"
    assert port.of(SubmitText) == []


async def test_fetched_bytes_count_as_those_of_bodies(images: ImageServer) -> None:
    """A request has no more of them than it could have sent, and all requests together have --max-queued-bytes."""
    images.answer = answer(bytes(3000))
    app, _ = served(images, max_body_bytes=8192)
    async with client(app) as http:
        assert (await http.post(CHAT, json=asking(*[images.url()] * 2))).status_code == 200
        found = await http.post(CHAT, json=asking(*[images.url()] * 3))
        assert found.status_code == 400
        assert "8192 bytes together (--max-body-bytes)" in found.json()["error"]["message"]
    waiting = asyncio.Event()

    async def held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3001\r\n\r\n" + bytes(3000))
        await writer.drain()
        await waiting.wait()
        writer.write(b"a")
        await writer.drain()

    images.answer = held
    app, _ = served(images, max_queued_bytes=4096)
    async with client(app) as http:
        both = [asyncio.create_task(http.post(CHAT, json=asking(images.url()))) for _ in range(2)]
        (first,), (second,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        assert first.result().status_code == 429
        assert "--max-queued-bytes" in first.result().json()["error"]["message"]
        waiting.set()
        assert (await second).status_code == 200
        images.answer = answer(bytes(3000))
        assert (await http.post(CHAT, json=asking(images.url()))).status_code == 200


async def test_what_is_fetched_has_a_place_in_the_queue(images: ImageServer) -> None:
    """Nothing is fetched for a request that would be refused, whatever for."""
    images.answer = slow_head
    app, _ = served(images, max_queued_requests=1)
    async with client(app) as http:
        one = asyncio.create_task(http.post(CHAT, json=asking(images.url())))
        await images.opened.wait()
        assert (await http.post(CHAT, json=asking(images.url()))).status_code == 429
        assert (await http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})).status_code == 429
        assert (await http.post(CHAT, json=asking(images.url(), temperature=9))).status_code == 400
        one.cancel()
        await asyncio.gather(one, return_exceptions=True)
    assert images.resolved == [HOST]
    assert images.most_open == 1
    assert app.engine_client.statistics().unfinished == 0


async def test_the_requests_timeout_ends_a_fetch(images: ImageServer) -> None:
    images.answer = slow_head
    app, port = served(images)
    async with client(app) as http:
        found = await http.post(CHAT, json=asking(images.url(), timeout=SOON))
    assert found.status_code == 504
    assert found.json()["error"]["code"] == "deadline_exceeded"
    assert port.of(SubmitText) == []
