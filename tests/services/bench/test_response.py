"""The client's HTTP and SSE parser: the same events for any way of cutting the stream; nonsense is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.bench.client import Malformed, Response

EVENTS = [b'{"a": 1}', b'{"text": "\\n\\n"}', "{'t': 'dér'}".encode(), b"[DONE]"]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def response(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"", body])


def feed(raw: bytes, cuts: list[int]) -> tuple[Response, list[bytes]]:
    parser, events, at = Response(), [], 0
    for cut in [*sorted(cuts), len(raw)]:
        if cut > at:
            events += parser.feed(raw[at:cut])
            at = cut
    return parser, events


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
@given(st.data())
def test_cuts_do_not_matter(line: bytes, data: st.DataObject) -> None:
    stream = b"".join(b"data: " + event + line * 2 for event in EVENTS)
    edges = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=6)))
    parts = [stream[a:b] for a, b in zip([0, *edges], [*edges, len(stream)], strict=True)]
    raw = response(chunked(parts), b"Transfer-Encoding: chunked")
    parser, events = feed(raw, data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    assert events == EVENTS
    assert (parser.status, parser.complete, parser.keep_alive) == (200, True, True)


def test_byte_by_byte() -> None:
    raw = response(chunked([b"data: x\n\n", b"data: y\n\n"]), b"transfer-encoding: Chunked")
    parser, events = feed(raw, list(range(len(raw))))
    assert (events, parser.complete) == ([b"x", b"y"], True)


def test_comments_and_other_fields_are_skipped() -> None:
    body = b": ping\n\nid: 7\nevent: message\ndata: one\ndata:two\n\nretry: 3\n\ndata:x\n\n"
    _, events = feed(response(body, b"Content-Length: %d" % len(body)), [])
    assert events == [b"one\ntwo", b"x"]


def test_a_length_completes_the_body() -> None:
    parser, events = feed(response(b"data: x\n\nrest", b"Content-Length: 9"), [40])
    assert (events, parser.complete) == ([b"x"], True)


def test_close_completes_only_a_body_without_length() -> None:
    parser, events = feed(response(b"data: x\n\n", b"Connection: close"), [])
    assert (events, parser.complete, parser.keep_alive) == ([b"x"], False, False)
    parser.close()
    assert parser.complete
    cut_short, _ = feed(response(b"5\r\nab", b"Transfer-Encoding: chunked"), [])
    cut_short.close()
    assert not cut_short.complete


def test_trailers_are_waited_for() -> None:
    raw = response(b"0\r\nDigest: x\r\n\r\n", b"Transfer-Encoding: chunked")
    for cut in range(len(raw)):
        parser, _ = feed(raw[:cut], [])
        assert not parser.complete, raw[:cut]
    assert feed(raw, [])[0].complete


def test_an_error_keeps_its_body() -> None:
    raw = response(b'{"error": {}}', b"Content-Length: 13", status=b"429 Too Many Requests")
    parser, events = feed(raw, [5, 60])
    assert (parser.status, events, bytes(parser.body), parser.complete) == (429, [], b'{"error": {}}', True)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        response(b"zz\r\n", b"Transfer-Encoding: chunked"),
        response(b"-1\r\n", b"Transfer-Encoding: chunked"),
        response(b"", b"Content-Length: 1_0"),
    ],
)
def test_what_is_no_response_is_malformed(raw: bytes) -> None:
    with pytest.raises(Malformed):
        Response().feed(raw)
