"""A server of images with TLS on loopback, whose answers a test plays, and the network that leads to it."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

HOST = "images.example"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))  # what the api takes for an image: it decodes none
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def answer(body: bytes = PNG, status: str = "200 OK", *headers: str, length: int | None = None) -> Answer:
    """One whole answer."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        size = len(body) if length is None else length
        head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers, "", ""))
        writer.write(head.encode() + body)
        await writer.drain()

    return write


class ImageServer:
    """`seen` holds the requests as they came, `open` those that are not answered yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answer: Answer = answer()
        self.seen: list[bytes] = []
        self.open = self.most_open = 0
        self.opened = asyncio.Event()
        self.addresses: Sequence[str] = ("127.0.0.1",)
        self.resolved: list[str] = []
        self.port = 0

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """The network's resolver."""
        self.resolved.append(host)
        return self.addresses

    @property
    def network(self) -> dict[str, Any]:
        """What `MediaFetcher` takes for the system's."""
        trusted = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        return {"resolve": self.resolve, "allowed": lambda address: True, "trusted": trusted}

    def url(self, path: str = "/a.png", host: str = HOST) -> str:
        return f"https://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.opened.set()
        reads = reader.readuntil

        async def kept(separator: bytes) -> bytes:
            found = await reads(separator)
            self.seen.append(found)
            return found

        reader.readuntil = kept  # type: ignore[method-assign, assignment]
        try:
            await self.answer(reader, writer)
        except (OSError, EOFError, ssl.SSLError):
            pass
        finally:
            self.open -= 1
            writer.close()


def make_certificates(folder: Path, name: str = HOST) -> None:
    """A CA, and what it signed for `name`."""
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-days",
        "2",
        "-nodes",
    ]
    ca = ["-subj", "/CN=ca", "-addext", "keyUsage=critical,keyCertSign", "-keyout", "ca.key", "-out", "ca.pem"]
    leaf = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", "leaf.key", "-out", "leaf.pem"]
    leaf += ["-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca.pem", "-CAkey", "ca.key"]
    for each in (ca, leaf):
        subprocess.run([*words, *each], check=True, capture_output=True, cwd=folder)


@asynccontextmanager
async def image_server(folder: Path) -> AsyncIterator[ImageServer]:
    """A server with the certificates of `make_certificates` in this folder."""
    found = ImageServer(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf.pem", folder / "leaf.key")
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=context)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        if hasattr(server, "close_clients"):  # from Python 3.13 on
            server.close_clients()
