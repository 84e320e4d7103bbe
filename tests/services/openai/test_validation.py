"""Bodies of every kind of wrong: each is a 400 that says so, and none is a 500."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import SubmitText
from penstock.services.http import request_context as bodies
from penstock.services.http.request_context import Nesting
from penstock.services.openai.parameters import UNSUPPORTED
from penstock.services.openai.routes import application
from penstock.services.openai.schema import ChatRequest, CompletionRequest
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, request_context, silent, words
from tests.services.openai.shapes import check_error

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
HELLO = b'{"messages":[{"role":"user","content":"Hello"}],"prompt":"a","tokens":[1]'

MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("empty", b""),
    ("not JSON", b"messages=hello"),
    ("cut", b'{"messages": [{"role": "user"'),
    ("two values", b"{} {}"),
    ("an array", b"[]"),
    ("a string", b'"hello"'),
    ("null", b"null"),
    ("a number", b"1"),
    ("byte order mark", b"\xef\xbb\xbf{}"),
    ("bad UTF-8", b'{"messages":[{"role":"user","content":"\xff"}],"prompt":"\xff","tokens":["\xff"]}'),
    ("half a surrogate pair", HELLO.replace(b"Hello", b"\\ud800").replace(b'"a"', b'"\\ud800"') + b"}"),
    ("NaN", HELLO + b',"temperature":NaN,"model":NaN}'),
    ("infinity", HELLO + b',"temperature":1e999,"model":1}'),
    ("a float and no end", b'{"max_tokens": 7.0, "prompt": "a'),
    ("control character", b'{"model":"a\nb"}'),
    ("deep array", HELLO + b',"x":' + b"[" * 100_000 + b"}"),
    ("deep object", HELLO + b',"model":' + b'{"a":' * 100_000 + b"}"),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("what", "body"), MALFORMED)
async def test_malformed_bodies(path: str, what: str, body: bytes) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, what
    check_error(answer.json(), "invalid_request_error", answer.json()["error"]["param"])
    assert port.sent == []


@pytest.mark.parametrize(
    ("text", "half"),
    [(rb"cut \ud83d", True), (rb"\uD83Dx", True), (rb"\ud83d\u0041", True), (rb"\ud83d\ude00 \x", False),
     (rb"a \\ud83d \x", False)],
)  # fmt: skip
async def test_a_text_cut_inside_a_character_is_told_from_other_malformed_ones(text: bytes, half: bool) -> None:
    """JavaScript's texts are cut between halves of a pair, and its JSON has them as escapes."""
    async with client(app_state(FakeLink(silent))) as http:
        body = HELLO.replace(b"Hello", text) + b"}"
        answer = await http.post(PATHS[0], content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert ("half of a surrogate pair" in answer.json()["error"]["message"]) == half


@pytest.mark.parametrize(("given", "code"), [("7.0", 200), ("7.000", 200), ("7.5", 400), ("70e-1", 400), ('"7"', 400)])
async def test_a_float_without_a_fraction_is_a_whole_number(given: str, code: int) -> None:
    port = FakeLink(answering(words("ok")))
    async with client(app_state(port)) as http:
        body = f'{{"prompt": "a", "max_tokens": {given}, "top_k": {given}, "temperature": 1.0}}'.encode()
        answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == code, answer.text
    if code == 400:
        check_error(answer.json(), "invalid_request_error", "max_tokens")
    else:
        assert [sent.sampling.max_tokens for sent in port.of(SubmitText)] == [7]


@pytest.mark.parametrize("width", [1, 3, 64, 10_000])
@pytest.mark.parametrize(("levels", "refused"), [(limits.MAX_JSON_DEPTH, False), (limits.MAX_JSON_DEPTH + 1, True)])
async def test_depth_is_counted_across_the_pieces_of_a_body(width: int, levels: int, refused: bool) -> None:
    """Whatever comes before what is deep, and in strings, does not count."""
    body = b'{"model":"' + b"[{" * 70 + b'\\"","x":[[],[]],"y":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"
    pieces = [body[at : at + width] for at in range(0, len(body), width)]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request", "body": b""})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    if refused:
        with pytest.raises(InvalidRequest, match="nested deeper"):
            await request_context(receive=receive).read_json()
        assert messages, "it is refused before it has come"
    else:
        assert await request_context(receive=receive).read_json() == body


async def test_other_tasks_have_their_turns_while_a_long_body_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much comes at once, so much of it and no more is looked at in one turn of the loop."""
    body = HELLO + b',"x":[' + b"[]," * 100_000 + b"0]}"
    sizes: list[int] = []
    turns = 0

    class Noted(Nesting):
        def push(self, piece: bytes) -> None:
            sizes.append(len(piece))
            super().push(piece)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(bodies, "Nesting", Noted)
    beside = asyncio.create_task(neighbour())
    assert await request_context(receive=receive).read_json() == body
    beside.cancel()
    assert sum(sizes) == len(body)
    assert max(sizes) == bodies.MEASURED
    assert turns >= len(sizes) - 1 > 30


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *UNSUPPORTED, "tokens", "x"})
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
GOOD: tuple[dict[str, Any], ...] = ({"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}, {"tokens": [1]})


async def ask(path: str, body: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(application(app_state(FakeLink(answering(words("a", "b"))))))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
        return await http.post(path, content=body, headers={"content-type": "application/json"})


def check_any(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        body = answer.json()
        check_error(body, body["error"]["type"], body["error"]["param"])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PATHS), BODIES, st.sampled_from(GOOD))
async def test_no_object_is_a_server_error(path: str, body: dict[str, Any], good: dict[str, Any]) -> None:
    check_any(await ask(path, json.dumps({**good, **body}).encode()))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PATHS), st.binary(max_size=64), st.integers(0, 60), st.integers(0, 8))
async def test_no_bytes_are_a_server_error(path: str, noise: bytes, at: int, cut: int) -> None:
    body = HELLO + b"}"
    check_any(await ask(path, body[:at] + noise + body[at + cut :]))


@pytest.mark.parametrize("path", PATHS)
async def test_a_compressed_body_is_not_taken_for_bad_json(path: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        coded = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await http.post(path, content=gzip.compress(HELLO + b"}"), headers=coded)
    assert answer.status_code == 415
    check_error(answer.json(), "invalid_request_error", None)
    assert answer.json()["error"]["code"] == "unsupported_content_encoding"


async def test_an_empty_body_and_a_bound_of_the_operators_are_called_so() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        empty = await http.post("/v1/completions", headers={"content-type": "application/json"})
        many = await http.post("/v1/completions", json={"prompt": "a", "n": 100_000})
    assert empty.json()["error"]["message"] == "the body is empty"
    assert many.json()["error"]["message"] == "n is 100000; expected `int` <= 1024, the most that --max-n can allow"
    assert many.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": 3}, "temperature is 3; expected `float` <= 2.0"),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "max_tokens is -1; expected `int` >= "),
        ("/v1/completions", {"prompt": "a", "seed": 10**60}, "seed is 100000000000000000000000…; "),
        ("/v1/completions", {"prompt": "a", "stop": "x" * 600}, "stop: expected `str` of length <= 512"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [5, -1]}, "stop_token_ids[1] is -1; expected `int` >= 0"),
        ("/v1/chat/completions", {"messages": [], "logit_bias": {"5": 1000}}, "logit_bias"),
        ("/tokenize", {"messages": [{"role": 7}]}, "messages[0].role: expected `str`"),
    ],
)
async def test_a_number_that_is_out_of_bounds_is_named(path: str, body: dict[str, Any], told: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith(told)
    assert "--max-stop-strings" not in message  # which bounds how many there are
