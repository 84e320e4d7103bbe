"""Files that are the same on every server: the page at /, what it loads, its icon, and what crawlers ask for.

They need no key, hold nothing of the server, and load nothing from elsewhere: the page's own script asks for the key
where the server wants one. Sources of the policy: W3C Content Security Policy Level 3 and Trusted Types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.services.http.request_context import RequestContext

DAY = "public, max-age=86400"
CHECKED = "no-cache"  # asked for at each visit, so that the files of one release stay together
KINDS: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Scripts, styles and requests are this server's own; a picture may also be one that the user attached. No text becomes
# HTML or a script, since browsers that know Trusted Types refuse the functions that would do it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


class File(msgspec.Struct, frozen=True):
    """One file with the headers it is sent with."""

    body: bytes
    tag: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    summary: str = ""  # of the route's description


async def send_file(file: File, _state: object, context: RequestContext) -> None:
    """The endpoint of one file; a client that has it already is told so (RFC 9110, section 13.1.2)."""
    known = context.header(b"if-none-match") or b""
    fresh = file.tag in (tag.strip().removeprefix(b"W/") for tag in known.split(b","))
    headers = [(b"etag", file.tag), *file.headers]
    if not fresh:
        headers.append((b"content-length", str(len(file.body)).encode()))
    await context.start(304 if fresh else 200, headers)
    await context.send({"type": "http.response.body", "body": b"" if fresh else file.body})


def folder() -> Path:
    """Where the files are."""
    return Path(__file__).with_name("static")


def file(name: str, policy: str = "default-src 'none'", cache: str = DAY, summary: str = "") -> File:
    headers = {
        "content-type": KINDS[Path(name).suffix],
        "cache-control": cache,
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }
    encoded = tuple((key.encode(), value.encode()) for key, value in headers.items())
    body = (folder() / name).read_bytes()
    return File(body, b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode(), encoded, summary)


FILES: Mapping[str, File] = {
    "/": file("page.html", PAGE_POLICY, CHECKED, "A page to talk to the model"),
    "/favicon.ico": file("favicon.svg"),
    "/favicon.svg": file("favicon.svg"),
    "/robots.txt": file("robots.txt"),
    **{
        f"/static/{found.name}": file(found.name, cache=CHECKED)
        for found in sorted(folder().iterdir())
        if found.suffix in (".css", ".js")
    },
}
