"""httptools' parser of requests for a server that speaks HTTP/1 alone, whatever else a client offers.

A client may offer another protocol in any request, and who does not take the offer answers as if there was none (RFC
9110, section 7.8). Java's own client offers h2c with each request unless it is told not to. httptools takes what
follows such a head for the other protocol: the body would be lost, and every request behind it.
"""

from __future__ import annotations

from typing import Protocol

import httptools

from penstock.protocol.errors import InvalidRequest, RequestError, UnknownCoding, UnknownVersion

OFFER = b"upgrade"
VERSIONS = "this server speaks HTTP/1.1 and HTTP/1.0"
WRONG_VERSION = ("Invalid HTTP version", "Pause on PRI/Upgrade")  # llhttp's words; the second are of HTTP/2's preface
CHUNKED = b"chunked"
Headers = list[tuple[bytes, bytes]]


class Receiver(Protocol):
    """Whom the parser calls, as httptools describes it; it keeps the head that is being parsed."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """As httptools.HttpRequestParser. A head with an offer is parsed a second time, without it: where it ends for the
    first time, and its message with it, `offered` is true, and the receiver passes over what it is told."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = self._fresh()
        self._version_refused = False

    @property
    def refusal(self) -> RequestError | None:
        """Why the head at hand is refused, where there is more to say than that it is no HTTP/1.1."""
        return UnknownVersion(VERSIONS, code="http_version_not_supported") if self._version_refused else None

    @property
    def offered(self) -> bool:
        """Whether the head at hand offers another protocol."""
        return bool(self._parser.should_upgrade())

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError for what is no HTTP, and for CONNECT, which has no other meaning."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                head = self._head()
            except httptools.HttpParserError as error:
                self._version_refused = str(error) in WRONG_VERSION
                raise
            self._parser = self._fresh()
            try:
                self._parser.feed_data(head)
            except httptools.HttpParserUpgrade:
                raise httptools.HttpParserError("a tunnel is asked for") from None

    def close(self) -> None:
        """Nothing more is parsed. The receiver, which has this parser, is held no longer."""
        del self._parser, self._receiver

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return bool(self._parser.should_keep_alive())

    def should_upgrade(self) -> bool:
        """No request is one for another protocol."""
        return False

    def _head(self) -> bytes:
        """The head that was parsed, without the offer."""
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._receiver.url, version)]
        lines += [b"%b: %b" % (name, value) for name, value in self._receiver.headers if name.lower() != OFFER]
        return b"\r\n".join([*lines, b"", b""])

    def _fresh(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._receiver)
        # As uvicorn has it: a request that stands behind one with `Connection: close` is no reason to refuse that one.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser


def check_head(version: str, headers: Headers) -> None:
    """Raise RequestError for a head that llhttp takes and that is not to be served. Names are in lower case.

    What makes two readers disagree on where a request ends (both lengths, several of them, folded lines, bare line
    feeds) is refused by llhttp already.
    """
    if version not in ("1.0", "1.1"):
        raise UnknownVersion(VERSIONS, code="http_version_not_supported")
    given = b",".join(value for name, value in headers if name == b"transfer-encoding").lower()
    codings = [coding.strip() for coding in given.split(b",") if given]
    if codings and version == "1.0":
        raise InvalidRequest("HTTP/1.0 has no transfer codings", code="invalid_http")
    if codings and codings != [CHUNKED]:
        message = "the only transfer coding of a request that is served is chunked"
        raise UnknownCoding(message, code="unsupported_transfer_coding")
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (not hosts and version == "1.1"):
        raise InvalidRequest("the header Host must be there once", code="invalid_host")


def name_host(url: bytes, headers: Headers) -> None:
    """Put the host of a target in absolute form into `headers`: the header Host is then ignored (RFC 9112, section
    3.2.2). Raises httptools.HttpParserInvalidURLError."""
    if url[:1] in (b"/", b"*"):
        return
    target = httptools.parse_url(url)
    if target.host is None:
        return
    host = b"[%b]" % target.host if b":" in target.host else target.host
    if target.port is not None:
        host += b":%d" % target.port
    headers[:] = [(name, value) for name, value in headers if name != b"host"] + [(b"host", host)]
