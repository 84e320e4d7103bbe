"""Files that are the same on every server: the page at /, its icon, and what crawlers ask for.

They need no key, hold nothing of the server, and load nothing from elsewhere: the page's own script asks for the key
where the server wants one. Source of the policy: W3C Content Security Policy Level 3.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources

import msgspec

from penstock.services.http.request_context import RequestContext

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#0f766e"/>'
    '<path d="M8 5v8c0 4 3 6 7 6h9" fill="none" stroke="#fff" stroke-width="5"/>'
    '<circle cx="24" cy="19" r="3" fill="#99f6e4"/></svg>'
)
ROBOTS = "User-agent: *\nDisallow: /\n"
INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
DAY = "public, max-age=86400"


class File(msgspec.Struct, frozen=True):
    """One file with the headers it is sent with."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    summary: str = ""  # of the route's description


class StaticFile:
    """The endpoint of one file; a client that has it already is told so (RFC 9110, section 13.1.2)."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._tag = b'"%b"' % hashlib.sha256(file.body).hexdigest()[:32].encode()

    async def __call__(self, _state: object, context: RequestContext) -> None:
        file = self._file
        known = context.header(b"if-none-match") or b""
        fresh = self._tag in (tag.strip().removeprefix(b"W/") for tag in known.split(b","))
        headers = [(b"etag", self._tag), *file.headers]
        if not fresh:
            headers.append((b"content-length", str(len(file.body)).encode()))
        await context.start(304 if fresh else 200, headers)
        await context.send({"type": "http.response.body", "body": b"" if fresh else file.body})


def file(body: str, kind: str, policy: str = "default-src 'none'", cache: str = DAY) -> File:
    headers = {
        "content-type": kind,
        "cache-control": cache,
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    return File(body.encode(), tuple((name.encode(), value.encode()) for name, value in headers.items()))


def page() -> File:
    """The page. Its policy allows the script and the style that stand in it, by their hashes, and this server."""
    text = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in INLINE.findall(text):
        hashes[kind].append("'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    found = file(text, "text/html; charset=utf-8", policy, "no-cache")
    return msgspec.structs.replace(found, summary="A page to talk to the model")


FILES: Mapping[str, File] = {
    "/": page(),
    "/favicon.ico": file(ICON, "image/svg+xml"),
    "/favicon.svg": file(ICON, "image/svg+xml"),
    "/robots.txt": file(ROBOTS, "text/plain; charset=utf-8"),
}
