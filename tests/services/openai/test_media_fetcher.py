"""Where images are fetched from. What hosts can do to it is tried in tests/security/test_images.py."""

from __future__ import annotations

import asyncio
import gc
import ipaddress

import httpcore2
import pytest

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Client
from penstock.services.metrics.requests import ImageTraffic
from penstock.services.openai.media_fetcher import MediaFetcher, Pinned, is_public, system_addresses
from tests.services.client.fake_engine import LIMIT


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:800::200e", "64:ff9b::808:808", "192.0.0.9"],
)
def test_addresses_that_anybody_has(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("domains", "url", "found"),
    [
        ("example.org", "https://example.org", ("example.org", 443, b"/")),
        ("example.org", "HTTPS://EXAMPLE.org:443?a=b#c", ("example.org", 443, b"/?a=b")),
        ("*.example.org", "https://a.b.example.org/x//y/../z", ("a.b.example.org", 443, b"/x//y/../z")),
        ("example.org:8443", "https://example.org:8443/%41%zz|ü", ("example.org", 8443, b"/%41%zz|%C3%BC")),
        ("bücher.example", "https://BÜCHER.example/", ("xn--bcher-kva.example", 443, b"/")),
        ("xn--bcher-kva.example", "https://bücher。example/", ("xn--bcher-kva.example", 443, b"/")),
        ("a.org,b.org", "https://b.org/\ud800", ("b.org", 443, b"/?")),
    ],
)
def test_what_a_url_means(domains: str, url: str, found: tuple[str, int, bytes]) -> None:
    media = MediaFetcher(ApiConfig(allowed_media_domains=domains), 1.0, ImageTraffic())
    where = media.where(url, "x")
    assert (where.host, where.port, where.target) == found


def test_a_refusal_names_the_field_and_the_host() -> None:
    traffic = ImageTraffic()
    media = MediaFetcher(ApiConfig(allowed_media_domains="example.org"), 1.0, traffic)
    with pytest.raises(InvalidRequest) as caught:
        media.where("https://other.example:8443/a?secret", "x.url")
    assert caught.value.message == "x.url: images are not fetched from other.example:8443 (--allowed-media-domains)"
    assert (caught.value.param, caught.value.code) == ("x.url", "invalid_image_url")
    assert traffic.refused == {"host": 1}


async def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1" in await system_addresses("localhost", 443)
    with pytest.raises(OSError):
        await system_addresses("nowhere.invalid", 443)


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pinned = Pinned(["127.0.0.2", "127.0.0.1"], LIMIT)
    stream = await pinned.connect_tcp("whatever.example", port)
    assert stream.get_extra_info("server_addr")[0] == "127.0.0.1"
    await pinned.aclose()
    server.close()
    with pytest.raises(httpcore2.ConnectError):
        await Pinned(["127.0.0.2"], LIMIT).connect_tcp("whatever.example", port)


async def test_a_connection_whose_handshake_never_ends_is_closed() -> None:
    ended = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    media = MediaFetcher(
        ApiConfig(allowed_media_domains=f"images.example:{port}"), 0.1, ImageTraffic(), resolve=resolve,
        allowed=lambda address: True,
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match=r"images\.example did not send it within 0\.1 s") as caught:
        await media.fetch(media.where(f"https://images.example:{port}/", "x"), Client(), lambda size: None)
    await asyncio.wait_for(ended.wait(), LIMIT)
    server.close()
    del caught
    gc.collect()


async def test_a_resolver_that_does_not_answer_is_not_waited_for() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return []

    media = MediaFetcher(ApiConfig(allowed_media_domains="images.example"), 0.1, ImageTraffic(), resolve=resolve)
    with pytest.raises(InvalidRequest, match=r"images\.example did not send it within 0\.1 s"):
        await media.fetch(media.where("https://images.example/", "x"), Client(), lambda size: None)
