"""Requests that offer another protocol are parsed as if they did not, however the bytes are cut."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.http.connection import RequestParser

OFFERS = (b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\n")
BODIES = (
    b"\r\n",
    b"Content-Length: 5\r\n\r\nhello",
    b"Content-Length: 0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n",
    b"Content-Length: 26\r\n\r\nGET /inner HTTP/1.1\r\nA: b\r\n",
)


class Record:
    """What a parser tells: of each request its method, target, headers without an offer, body and end."""

    def __init__(self) -> None:
        self.parser = RequestParser(self)
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.requests: list[tuple[object, ...]] = []
        self._body = b""

    def feed(self, data: bytes, cuts: list[int] | None = None) -> None:
        ends = sorted({min(cut, len(data)) for cut in cuts or ()} | {len(data)})
        for start, end in zip([0, *ends], ends, strict=False):
            self.parser.feed_data(data[start:end])

    def on_message_begin(self) -> None:
        self.url, self.headers, self._body = b"", [], b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if not self.parser.offered:
            assert not self.parser.should_upgrade()
            self.requests.append((self.parser.get_method(), self.url, self.parser.get_http_version(),
                                  self.parser.should_keep_alive(), *self.headers))  # fmt: skip

    def on_body(self, body: bytes) -> None:
        assert not self.parser.offered
        self._body += body

    def on_message_complete(self) -> None:
        if not self.parser.offered:
            self.requests.append((self._body,))


def told(data: bytes, cuts: list[int] | None = None) -> list[tuple[object, ...]]:
    record = Record()
    record.feed(data, cuts)
    return record.requests


def without_offers(requests: list[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """The same, less the header that names who may look at the offer: it stays, and is nobody's business."""
    return [tuple(part for part in request if not isinstance(part, tuple) or part[0] != b"connection")
            for request in requests]  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Requests on one connection, with some offers and without any."""
    offering, plain = b"", b""
    for number in range(draw(st.integers(1, 4))):
        body = draw(st.sampled_from(BODIES))
        head = b"POST /%d?a=b HTTP/1.1\r\nHost: x\r\n" % number
        offering += head + draw(st.sampled_from((b"", *OFFERS))) + body
        plain += head + body
    return offering, plain


@given(conversations(), st.lists(st.integers(0, 400), max_size=6))
def test_an_offer_changes_nothing_wherever_the_bytes_are_cut(found: tuple[bytes, bytes], cuts: list[int]) -> None:
    offering, plain = found
    assert without_offers(told(offering, cuts)) == without_offers(told(plain))


def test_the_offer_itself_is_not_passed_on() -> None:
    (head, body) = told(b"GET /a HTTP/1.1\r\nHost: x\r\n" + OFFERS[0] + b"X: 1\r\n\r\n")
    assert head[4:] == ((b"host", b"x"), (b"connection", b"Upgrade"), (b"x", b"1"))
    assert body == (b"",)


def test_a_header_that_offers_nothing_stays() -> None:
    (head, _) = told(b"GET /a HTTP/1.1\r\nUpgrade: h2c\r\n\r\n")
    assert (b"upgrade", b"h2c") in head


def test_versions_and_the_end_of_a_connection_are_those_of_the_head() -> None:
    (head, _) = told(b"GET /a HTTP/1.0\r\n" + OFFERS[0] + b"\r\n")
    assert head[2:4] == ("1.0", False)
    (head, _) = told(b"GET /a HTTP/1.1\r\nUpgrade: h2c\r\nConnection: close, Upgrade\r\n\r\n")
    assert head[2:4] == ("1.1", False)


def test_thousands_of_offers_in_one_piece() -> None:
    many = 5000
    requests = told((b"GET / HTTP/1.1\r\n" + OFFERS[0] + b"\r\n") * many)
    assert len(requests) == 2 * many


@pytest.mark.parametrize("offer", [b"", *OFFERS])
def test_a_tunnel_is_refused(offer: bytes) -> None:
    with pytest.raises(httptools.HttpParserError):
        told(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n" + offer + b"\r\n")


@pytest.mark.parametrize("wrong", [b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0"])
def test_what_is_no_http_is_refused(wrong: bytes) -> None:
    with pytest.raises(httptools.HttpParserError):
        told(wrong)
    with pytest.raises(httptools.HttpParserError):
        told(b"GET / HTTP/1.1\r\n" + OFFERS[1] + b"\r\n" + wrong)
