"""Fetches images by https for requests, from the hosts of --allowed-media-domains alone.

A host's name is resolved here once, each of its addresses is checked, and the connection goes to one of those: a name
that is resolved differently the next time changes nothing. The certificate must be the name's. Nothing is redirected,
sent through a proxy, decompressed or kept for later, and every fetch has limits of size and time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ssl import SSLContext
from typing import Any
from urllib.parse import quote

import httpcore2
import msgspec

from penstock.protocol.config import ApiConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.media import HTTPS, dns_name, read_domains
from penstock.protocol.messages import Client
from penstock.protocol.version import VERSION
from penstock.services.client.turns import ClientTurns
from penstock.services.metrics.requests import ImageTraffic

AT_ONCE = 32  # fetches of one process
AT_ONCE_EACH = 8  # of one client
MOST_ADDRESSES = 4  # of a host, that are tried one after the other
LONGEST_URL = 8192  # characters
BAD_URL = "invalid_image_url"  # OpenAI's code for images that it could not fetch
# No user names, no addresses in brackets, no spaces: what is read here is what is asked, so no two readers differ.
URL = re.compile(
    r"https://(?P<host>[^\x00-\x20\x7f/?#:@\[\]\\]+)(?::(?P<port>[0-9]{1,5}))?(?P<target>[/?][^\x00-\x20\x7f#\\]*)?(?:#.*)?",
    re.IGNORECASE | re.DOTALL,
)
KEPT = "/?:@!$&'()*+,;=-._~%[]|"  # of a path and a query: what need not be percent-encoded, and what is already
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
UNICAST = 0b001  # the first bits of what has been given out of IPv6 (RFC 4291, section 2.4)
NAT64 = b"\x00\x64\xff\x9b\0\0\0\0\0\0\0\0"  # 64:ff9b::/96 (RFC 6052): the last 32 bits are an IPv4 address


class RemoteImage(msgspec.Struct, frozen=True):
    """Where an image is, and the request's field that says so."""

    host: str  # in the form of the DNS
    port: int
    target: bytes  # path and query
    param: str


class MediaFetcher:
    """The fetches of one process. `resolve`, `allowed` and `trusted` stand for the system's resolver, the addresses
    that may be asked and the certificates that are believed."""

    def __init__(
        self,
        options: ApiConfig,
        seconds: float,
        traffic: ImageTraffic,
        *,
        resolve: Resolve | None = None,
        allowed: Callable[[IPAddress], bool] | None = None,
        trusted: SSLContext | None = None,
    ) -> None:
        self._domains = read_domains(options)
        self._limit = options.max_body_bytes
        self._seconds = seconds
        self._traffic = traffic
        self._resolve = resolve or system_addresses
        self._allowed = allowed or is_public
        self._trusted = trusted or (httpcore2.default_ssl_context() if self._domains else None)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._clients = ClientTurns(AT_ONCE_EACH)

    def where(self, url: str, param: str) -> RemoteImage:
        """What a URL means. Raises InvalidRequest for one that is not https, and for a host that is not allowed."""
        if not self._domains:
            told = "this server fetches no images (--allowed-media-domains is empty); send it as a data: URL"
            raise self.refusal("host", f"{param}: {told}", param)
        found = URL.fullmatch(url) if len(url) <= LONGEST_URL else None
        host = dns_name(found["host"]) if found else ""
        if found is None or not host:
            told = f"{param} is no https URL with the name of a host and without a user's"
            raise self.refusal("host", told, param)
        port = int(found["port"] or HTTPS)
        if not any(domain.holds(host, port) for domain in self._domains):
            place = host if port == HTTPS else f"{host}:{port}"
            raise self.refusal("host", f"{param}: images are not fetched from {place} (--allowed-media-domains)", param)
        target = found["target"] or "/"
        target = quote(target if target.startswith("/") else f"/{target}", safe=KEPT, errors="replace")
        return RemoteImage(host, port, target.encode(), param)

    async def fetch(self, image: RemoteImage, client: Client, take: Callable[[int], None]) -> tuple[bytes, str]:
        """The image's bytes and its Content-Type. `take` is told of each piece as it comes, and may raise.

        Raises InvalidRequest naming the field and the host, whatever goes wrong.
        """
        async with self._clients.turn(client), self._turns:
            began = time.monotonic()
            try:
                async with asyncio.timeout(self._seconds):
                    return await self._get(image, take)
            except (TimeoutError, httpcore2.TimeoutException) as error:
                told = f"did not send it within {self._seconds:g} s (--media-timeout)"
                raise self._failure("timeout", image, told) from error
            except (httpcore2.NetworkError, OSError) as error:
                raise self._failure("connection", image, "could not be reached by https") from error
            except httpcore2.ProtocolError as error:
                raise self._failure("answer", image, "broke off, or does not speak HTTP") from error
            finally:
                self._traffic.fetch.observe(time.monotonic() - began)

    def refusal(self, reason: str, message: str, param: str) -> InvalidRequest:
        """The error of an image that is not fetched, which is counted."""
        self._traffic.refused[reason] += 1
        return InvalidRequest(message, param=param, code=BAD_URL)

    def _failure(self, reason: str, image: RemoteImage, told: str) -> InvalidRequest:
        return self.refusal(reason, f"{image.param}: {image.host} {told}", image.param)

    async def _get(self, image: RemoteImage, take: Callable[[int], None]) -> tuple[bytes, str]:
        addresses = await self._addresses(image)
        origin = httpcore2.Origin(b"https", image.host.encode(), image.port)
        url = httpcore2.URL(scheme=b"https", host=origin.host, port=image.port, target=image.target)
        headers: list[tuple[bytes | str, bytes | str]] = [
            ("Host", image.host if image.port == HTTPS else f"{image.host}:{image.port}"),
            ("User-Agent", f"penstock/{VERSION}"),
            ("Accept", "image/png, image/jpeg, image/webp"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        request = httpcore2.Request(b"GET", url, headers=headers)
        pinned = Pinned(addresses, self._seconds / len(addresses))
        pieces, size = [], 0
        try:
            async with httpcore2.AsyncHTTPConnection(origin, self._trusted, network_backend=pinned) as connection:
                response = await connection.handle_async_request(request)
                self._check_head(image, response)
                async for piece in response.aiter_stream():
                    size += len(piece)
                    if size > self._limit:
                        raise self._too_large(image)
                    take(len(piece))
                    pieces.append(piece)
        finally:
            await pinned.aclose()
        if not size:
            raise self._failure("answer", image, "sent nothing")
        named = [value.decode("latin-1") for name, value in response.headers if name.lower() == b"content-type"]
        return b"".join(pieces), "".join(named[:1])

    async def _addresses(self, image: RemoteImage) -> list[str]:
        """What the host's name stands for. Raises InvalidRequest unless every address may be asked."""
        try:
            found = list(dict.fromkeys(await self._resolve(image.host, image.port)))
        except OSError as error:
            raise self._failure("connection", image, "is a name that cannot be resolved") from error
        if not found or not all(self._allowed(ipaddress.ip_address(address)) for address in found):
            raise self._failure("address", image, "does not have public addresses alone, which images may come from")
        return found[:MOST_ADDRESSES]

    def _check_head(self, image: RemoteImage, response: httpcore2.Response) -> None:
        if 300 <= response.status < 400:
            raise self._failure("status", image, f"redirects ({response.status}), which is not followed")
        if response.status != 200:
            raise self._failure("status", image, f"answered with {response.status}")
        for name, value in response.headers:
            if name.lower() == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise self._failure("answer", image, "sent it compressed, which was not asked for")
            if name.lower() == b"content-length" and int(value) > self._limit:
                raise self._too_large(image)

    def _too_large(self, image: RemoteImage) -> InvalidRequest:
        return self._failure("size", image, f"sends more than {self._limit} bytes (--max-body-bytes)")


class Pinned(httpcore2.AsyncNetworkBackend):
    """Connects to these addresses, whatever name is asked for: the first that answers within `seconds`. `aclose` ends
    the connection whatever became of it: httpcore forgets one whose handshake is cancelled."""

    def __init__(self, addresses: Sequence[str], seconds: float) -> None:
        self._addresses = addresses
        self._seconds = seconds
        self._tcp = httpcore2.AnyIOBackend()
        self._stream: httpcore2.AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = httpcore2.ConnectError()
        for address in self._addresses:
            try:
                self._stream = await self._tcp.connect_tcp(address, port, self._seconds, local_address, socket_options)
                return self._stream
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


async def system_addresses(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, in the system's order. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


def is_public(address: IPAddress) -> bool:
    """Whether anybody may have the address, and not this host, its network or a group.

    `ipaddress.is_global` alone would let multicast pass, and IPv6 addresses that stand for others: IPv4-compatible
    ones, site-local ones (RFC 3879), 6to4, Teredo, and those of NAT64, which are what their IPv4 address is.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if address.packed.startswith(NAT64):
        return is_public(ipaddress.IPv4Address(address.packed[-4:]))
    stands_for_another = address.sixtofour is not None or address.teredo is not None
    return address.packed[0] >> 5 == UNICAST and address.is_global and not stands_for_another
