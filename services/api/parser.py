"""httptools' parser of requests for a server that speaks HTTP/1 alone, whatever else a client offers.

A client may offer another protocol in any request, and who does not take the offer answers as if there was none (RFC
9110, section 7.8). Java's own client offers h2c with each request unless it is told not to. httptools takes what
follows such a head for the other protocol: the body would be lost, and every request behind it.
"""

from __future__ import annotations

from typing import Protocol

import httptools

OFFER = b"upgrade"


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
