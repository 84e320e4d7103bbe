"""The time that a request has: over, the request ends with a 504 wherever it stands, and frees what it had."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol import limits
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.message import Message
from penstock.protocol.messages import Abort, SubmitText
from penstock.services.http.request_context import RequestContext, new_id
from penstock.services.openai.app_state import AppState
from penstock.services.openai.responses.store import ResponseStore
from tests.services.client.fake_engine import (
    FakeLink,
    Row,
    answering,
    app_state,
    batch,
    client,
    clock,
    request_context,
    silent,
    words,
)
from tests.services.openai.shapes import check_error

SOON = 0.05  # seconds
LATER = 30.0  # seconds, which are wound on as soon as what should happen before has happened
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
REQUESTS = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/responses", {"input": "a"}),
)
VECTORS = (("/v1/embeddings", {"input": ["a", "b"]}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
           ("/v1/rerank", {"query": "a", "documents": ["b"]}))  # fmt: skip


def begins(port: FakeLink, message: Message) -> None:
    """A tokenizer that says one token of each request and then nothing more."""
    if isinstance(message, SubmitText):
        row = Row(text="so far", extra={"prompt_tokens": 3})
        asyncio.get_running_loop().call_soon(port.arrive, batch([(message.id, row)]))


def later(turns: int, act: Callable[[], object]) -> None:
    """Do something once everything has run that can run: after so many turns of the loop."""
    loop = asyncio.get_running_loop()
    loop.call_soon(act if turns == 0 else lambda: later(turns - 1, act))


def check_freed(port: FakeLink, parts: AppState) -> None:
    assert port.of(Abort) == [Abort(request.id) for request in port.of(SubmitText)]
    assert parts.engine_client.statistics().unfinished == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize(
    ("fields", "headers", "option", "source"),
    [
        ({"timeout": SOON}, {}, 0.0, "timeout"),
        ({}, {"x-request-timeout": str(SOON)}, 0.0, "X-Request-Timeout"),
        ({}, {}, SOON, "--request-timeout"),
        ({"timeout": 500}, {"x-request-timeout": "60"}, SOON, "--request-timeout"),
        ({"timeout": SOON}, {"x-request-timeout": "60"}, 30.0, "timeout"),
    ],
)
async def test_a_request_that_waits_ends_at_its_deadline(
    path: str, body: dict[str, Any], stream: bool, fields: dict[str, Any], headers: dict[str, str], option: float,
    source: str,
) -> None:  # fmt: skip
    port = FakeLink(silent)
    parts = app_state(port, request_timeout=option)
    async with client(parts) as http:
        answer = await http.post(path, json=body | fields | {"stream": stream}, headers=headers)
    assert answer.status_code == 504
    check_error(answer.json(), "timeout_error", None)
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert f"after {SOON} s ({source})" in answer.json()["error"]["message"]
    check_freed(port, parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_ends_at_its_deadline_too(stream: bool) -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    body = CHAT | {"max_tokens": 5, "timeout": SOON, "stream": stream}
    async with client(parts) as http:
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert f"after {SOON} s (timeout)" in answer.json()["error"]["message"]
    check_freed(port, parts)


@pytest.mark.parametrize(("path", "body"), VECTORS)
async def test_vectors_end_at_their_deadline_too(path: str, body: dict[str, Any]) -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    async with client(parts) as http:
        answer = await http.post(path, json=body | {"timeout": SOON})
    assert answer.status_code == 504
    check_error(answer.json(), "timeout_error", None)
    check_freed(port, parts)


@pytest.mark.parametrize(("fields", "option"), [({"timeout": SOON}, 0.0), ({}, SOON)])
async def test_a_response_in_the_background_ends_at_its_deadline_too(
    fields: dict[str, Any], option: float, tmp_path: Path
) -> None:
    port = FakeLink(silent)
    parts = app_state(port, request_timeout=option)
    parts = replace(parts, responses=ResponseStore(tmp_path, 0, 1, parts.config.api))
    async with client(parts) as http:
        begun = await http.post("/v1/responses", json={"input": "a", "background": True} | fields)
        assert begun.json()["status"] == "in_progress"
        found = begun.json()
        while found["status"] == "in_progress":
            await asyncio.sleep(0)
            found = (await http.get(f"/v1/responses/{begun.json()['id']}")).json()
    assert found["status"] == "failed"
    assert f"not complete after {SOON} s" in found["error"]["message"]
    check_freed(port, parts)


@pytest.mark.parametrize(("path", "body"), REQUESTS[:2])
async def test_a_stream_that_has_begun_ends_with_the_reason(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wind = clock(monkeypatch)

    def begun(port: FakeLink, message: Message) -> None:
        begins(port, message)
        if len(port.of(SubmitText)) == prompts:
            later(20, lambda: wind(LATER))

    prompts = len(body.get("prompt", "a"))
    port = FakeLink(begun)
    parts = app_state(port)
    async with client(parts) as http:
        answer = await http.post(path, json=body | {"stream": True, "timeout": LATER})
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert "so far" in answer.text
    check_error(json.loads(events[-2] if events[-1] == "[DONE]" else events[-1]), "timeout_error", None)
    check_freed(port, parts)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_whole_answer_that_has_begun_is_a_504(path: str, body: dict[str, Any]) -> None:
    port = FakeLink(begins)
    parts = app_state(port)
    async with client(parts) as http:
        answer = await http.post(path, json=body | {"timeout": SOON})
    assert answer.status_code == 504
    check_freed(port, parts)


async def test_who_is_in_time_is_served_and_leaves_no_timer() -> None:
    port = FakeLink(answering(words("an", "answer")))
    async with client(app_state(port, request_timeout=60.0)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a", "timeout": 30}, headers=bounded("29.5"))
    assert answer.status_code == 200
    assert port.of(Abort) == []
    loop = asyncio.get_running_loop()
    assert not [
        handle for handle in getattr(loop, "_scheduled", ()) if not handle.cancelled() and "expire" in repr(handle)
    ]


def bounded(seconds: str) -> dict[str, str]:
    return {"x-request-timeout": seconds}


@pytest.mark.parametrize("timeout", [0, -1, 5e-324, 0.0009, "1", True, 1e9, limits.MAX_TIMEOUT + 1])
async def test_a_time_that_is_none_is_refused(timeout: Any) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a", "timeout": timeout})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"
    assert port.sent == []


@pytest.mark.parametrize(
    "text", ["", "0", "0.0", "0.0009", "-1", "nan", "inf", "1e3", "9999999", "999999", "1,5", "0x1", "٣", "1 s"]
)
async def test_a_header_that_is_none_is_refused(text: str) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        answer = await http.post(
            "/v1/completions", json={"prompt": "a"}, headers=[(b"x-request-timeout", text.encode())]
        )
    assert answer.status_code == 400
    assert "X-Request-Timeout" in answer.json()["error"]["message"]
    assert port.sent == []


def with_timeout(*values: bytes) -> RequestContext:
    return request_context(*((b"x-request-timeout", value) for value in values))


def test_seconds_of_the_header() -> None:
    assert with_timeout().header_timeout() is None
    assert with_timeout(b"12").header_timeout() == 12.0
    assert with_timeout(b"0.25").header_timeout() == 0.25
    with pytest.raises(InvalidRequest):
        with_timeout(b"12", b"12").header_timeout()


def test_the_shortest_bound_holds_and_counts_from_the_start() -> None:
    context = request_context()
    context.started = 100.0
    assert context.time_left(1e9) == math.inf
    context.set_timeout(None, "nobody")
    context.set_timeout(8.0, "one")
    context.set_timeout(9.0, "other")
    assert context.time_left(103.0) == 5.0
    assert context.time_left(109.0) == 0.0
    assert context.deadline_exceeded().message == "the request was not complete after 8 s (one)"


async def test_bodies_of_unfinished_requests_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wind, taken = clock(monkeypatch), asyncio.Event()
    parts = app_state(FakeLink(lambda port, message: taken.set()), max_queued_bytes=3000)
    long = {"prompt": "a" * 2000, "timeout": LATER}
    async with client(parts) as http:
        first = asyncio.create_task(http.post("/v1/completions", json=long))
        await taken.wait()
        second = await http.post("/v1/completions", json=long)
        small = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "timeout": SOON}))
        assert second.status_code == 429
        assert "3000 bytes (--max-queued-bytes)" in second.json()["error"]["message"]
        assert "retry-after" in second.headers
        wind(LATER)
        assert [(await first).status_code, (await small).status_code] == [504, 504]
        alone = await http.post("/v1/completions", json={"prompt": "a" * 5000, "timeout": SOON})
        assert alone.status_code == 504  # there was room again, and one that is alone has any size


def test_a_name_is_taken_only_if_it_is_printable_and_short() -> None:
    def named(value: bytes) -> bytes:
        return request_context((b"x-request-id", value)).id

    assert named(b"mine") == b"mine"
    for odd in (b"", b"a b", b"\xc3\xbc", b"x" * 129, b"a\x00"):
        assert len(named(odd)) == 32
    assert new_id() != new_id()
