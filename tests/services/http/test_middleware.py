"""Every request: key and id, the errors of routing (routing.py), bodies that are too large or of the wrong kind."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.protocol.control import EngineStatus
from penstock.protocol.errors import InvalidRequest, MethodNotAllowed, Overloaded, RequestError, Unavailable
from penstock.services.client.model_info import ModelInfo
from penstock.services.http import middleware
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret prompt"}]}
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
OPEN = ("/health/live", "/health/ready")
CLOSED = ("/v1/models", "/v1/models/demo", "/version", "/metrics", "/openapi.json", "/nowhere")


@pytest.mark.parametrize("path", [*OPEN, *CLOSED])
async def test_every_route_but_the_probes_needs_the_key(path: str) -> None:
    parts = app_state(FakeLink(silent), api_key="s3cret-ü")
    async with client(parts) as http:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"x-api-key": "s3cret"}):
            answer = await http.get(path, headers=given)
            if path in OPEN:
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401
                check_error(answer.json(), "authentication_error", None)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        right = await http.get(path, headers={"authorization": "Bearer s3cret-ü".encode()})
        assert right.status_code == (404 if path == "/nowhere" else 200)


@pytest.mark.parametrize(
    "scheme", ["Basic ", "basic ", "Basic  ", "Digest ", "Token  ", "Bearex ", "ApiKey ", "Bearer", "Bearer: "]
)
async def test_the_key_is_a_bearer_token_and_nothing_else(scheme: str) -> None:
    """Whatever the scheme's length, the right key behind another one opens nothing."""
    async with client(app_state(FakeLink(silent), api_key="s3cret")) as http:
        answer = await http.get("/v1/models", headers={"authorization": f"{scheme}s3cret"})
        assert answer.status_code == 401
        check_error(answer.json(), "authentication_error", None)
        for right in ("Bearer s3cret", "bearer s3cret", "BEARER   s3cret "):
            assert (await http.get("/v1/models", headers={"authorization": right})).status_code == 200
        wrong_first = {"authorization": f"{scheme}s3cret", "x-api-key": "s3cret"}
        assert (await http.get("/v1/models", headers=wrong_first)).status_code == 401


async def test_posts_need_the_key_before_their_body_is_read() -> None:
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with client(app_state(FakeLink(silent), api_key="key")) as http:
        for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
            answer = await http.post(path, content=body())
            assert answer.status_code == 401


@pytest.mark.parametrize("given", ["abc-123", "x" * 128, "!~"])
async def test_a_request_id_is_taken_and_returned(given: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.get("/version", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a b", b"a\tb", "ü".encode()])
async def test_a_request_id_that_is_not_printable_or_too_long_is_replaced(given: bytes) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answers = [await http.get(path, headers={"x-request-id": given}) for path in ("/version", "/nowhere")]
    names = {answer.headers["x-request-id"] for answer in answers}
    assert len(names) == 2
    assert all(len(name) == 32 and name.isalnum() for name in names)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"), ("PUT", "/v1/completions", "POST"), ("DELETE", "/tokenize", "POST"),
        ("POST", "/health", "GET, HEAD"), ("POST", "/v1/models", "GET, HEAD"), ("OPTIONS", "/metrics", "GET, HEAD"),
    ],
)  # fmt: skip
async def test_a_wrong_method(method: str, path: str, allowed: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    check_error(answer.json(), "invalid_request_error", None)


@pytest.mark.parametrize("path", ["/v1", "/v1/chat/completions/", "/v1/nothing", "/health/", "/%00", "/a" * 5000])
async def test_a_wrong_path(path: str) -> None:
    parts = app_state(FakeLink(silent))
    async with client(parts) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404
    check_error(answer.json(), "not_found_error", None)
    assert len(answer.content) < 1000
    assert parts.traffic.responses == {("other", 404): 1}  # paths of clients make no series


async def test_what_nobody_may_ask_is_counted_under_its_route() -> None:
    parts = app_state(FakeLink(silent), api_key="secret")
    async with client(parts) as http:
        assert (await http.post(CHAT, json=HELLO)).status_code == 401
        assert (await http.get("/v1/models", headers={"origin": "https://example.org"})).status_code == 403
        assert (await http.get("/secret")).status_code == 401
    assert parts.traffic.responses == {(CHAT, 401): 1, ("/v1/models", 403): 1, ("other", 401): 1}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200),
        ("application/vnd.api+json", 200), (None, 200), ("text/plain", 415), ("application/xml", 415),
        ("multipart/form-data", 415), ("", 415), ("json", 415),
    ],
)  # fmt: skip
async def test_the_content_type(kind: str | None, status: int) -> None:
    async with client(app_state(FakeLink(answering(words("ok"))))) as http:
        headers = {} if kind is None else {"content-type": kind}
        answer = await http.post(CHAT, content=json.dumps(HELLO), headers=headers)
    assert answer.status_code == status
    if status == 415:
        check_error(answer.json(), "invalid_request_error", None)


async def test_a_body_that_is_announced_or_counted_too_large() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 64

    async with client(app_state(FakeLink(silent), max_body_bytes=1024)) as http:
        announced = await http.post(CHAT, content=b" " * 1025, headers=JSON)
        counted = await http.post(CHAT, content=pieces(), headers=JSON)
        fits = await http.post(CHAT, content=b" " * 1024, headers=JSON)
    for answer in (announced, counted):
        assert answer.status_code == 413
        check_error(answer.json(), "invalid_request_error", None)
        assert "--max-body-bytes" in answer.json()["error"]["message"]
    assert fits.status_code == 400


async def test_a_wrong_content_length_is_refused() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(CHAT, content=b"{}", headers=JSON | {"content-length": "two"})
    assert answer.status_code == 400


async def test_not_ready_is_503_where_the_engine_is_needed() -> None:
    port = FakeLink(answering(words("")))
    parts = app_state(port)
    changed = EngineStatus(**{**_fields(parts.engine_client.status), "ready": False})
    port.arrive(changed)
    async with client(parts) as http:
        for path, body in ((CHAT, HELLO), ("/v1/completions", {"prompt": "a"})):
            answer = await http.post(path, json=body)
            assert answer.status_code == 503, path
            check_error(answer.json(), "service_unavailable", None)
        for path in ("/health/ready", "/health"):
            assert (await http.get(path)).status_code == 503
        for path in ("/health/live", "/v1/models", "/version", "/metrics", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await http.post(path, json=body)).status_code == 200  # needs no engine
        port.lose()
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            answer = await http.post(path, json=body)
            assert answer.status_code == 503
            check_error(answer.json(), "service_unavailable", None)


def _fields(status: EngineStatus | None) -> dict[str, Any]:
    assert status is not None
    return {name: getattr(status, name) for name in status.__struct_fields__}


async def test_too_many_requests_are_429_with_a_time_to_come_back() -> None:
    port = FakeLink(silent)
    parts = app_state(port, max_queued_requests=2)
    async with client(parts) as http:
        both = await http.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert both.status_code == 400  # would never fit
        check_error(both.json(), "invalid_request_error", "prompt")
        assert port.peer is not None
        port.peer.credit = 0
        answer = await http.post(CHAT, json=HELLO)
    assert answer.status_code == 429
    check_error(answer.json(), "rate_limit_error", None)
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_one_log_line_per_request_without_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, middleware.__name__):
        async with client(app_state(FakeLink(answering(words("an", "answer"))))) as http:
            await http.post(CHAT, json=HELLO | {"stream": True}, headers={"x-request-id": "mine"})
            await http.get("/health")
            await http.get("/v1/models/nobody")
            await http.get("/v1/chat?key=secret")
    first, second, third = caplog.records
    fields = first.__dict__["fields"]
    assert fields.pop("seconds") > 0
    assert fields.pop("ttft") > 0
    assert len(fields.pop("trace_id")) == 32
    assert fields == {
        "id": "mine", "method": "POST", "route": CHAT, "status": 200, "prompt_tokens": 5, "completion_tokens": 2
    }  # fmt: skip
    assert second.__dict__["fields"]["route"] == "/v1/models/{name}"
    assert second.__dict__["fields"]["status"] == 404
    assert second.__dict__["fields"]["reason"] == "model_not_found", "a line says why, in the metrics' word"
    assert third.__dict__["fields"]["path"] == "/v1/chat", "as a base URL is often wrong"
    assert "secret" not in caplog.text
    assert "secret" not in str([record.__dict__["fields"] for record in caplog.records])
    assert "answer" not in str(fields)


async def test_a_line_names_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    with caplog.at_level(logging.INFO, middleware.__name__):
        async with client(app_state(FakeLink(answering(words("ok"))))) as http:
            await http.post(CHAT, json=HELLO, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
            await http.post(CHAT, json=HELLO, headers={"traceparent": "no trace"})
            await http.post(CHAT, json={})
            await http.get("/health")
    told, *own = [record.__dict__["fields"]["trace_id"] for record in caplog.records]
    assert told == trace
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in own)
    assert len(set(own)) == len(own) == 2


async def test_prompts_are_logged_only_where_that_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for wanted in (False, True):
            async with client(app_state(FakeLink(answering(words("ok"))), log_prompts=wanted)) as http:
                await http.post(CHAT, json=HELLO, headers={"x-request-id": f"wanted-{wanted}"})
                await http.post(CHAT, json=HELLO | {"n": "a secret prompt"})
    told = [record.__dict__["fields"] for record in caplog.records if "secret" in str(record.__dict__)]
    assert len(told) == 2
    assert told[0]["id"] == "wanted-True"
    assert json.loads(told[0]["body"]) == HELLO
    assert told[0]["size"] == len(told[0]["body"])


async def test_a_bug_of_ours_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    parts = app_state(FakeLink(answering(words("ok"))))

    class Broken(ModelInfo, frozen=True):
        def adapter(self, asked: str | None) -> None:
            raise RuntimeError("an internal detail")

    broken = dataclasses.replace(parts, model=Broken(**_model(parts.model)))
    async with client(broken) as http:
        answer = await http.post(CHAT, json=HELLO | {"model": "another"})
        assert (await http.get("/version")).status_code == 200
    assert answer.status_code == 500
    check_error(answer.json(), "server_error", None)
    assert "detail" not in answer.text
    assert "an internal detail" in caplog.text


def _model(model: ModelInfo) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__struct_fields__}


async def test_head_is_answered_like_get() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer: httpx.Response = await http.head("/health/ready")
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (Overloaded("full", retry_after=0.0), [(b"retry-after", b"1")]),
        (Overloaded("full", retry_after=1.2), [(b"retry-after", b"2")]),
        (Unavailable("starting", retry_after=3600.0), [(b"retry-after", b"60")]),
        (Unavailable("starting"), []),
        (MethodNotAllowed("no", allowed="GET"), [(b"allow", b"GET")]),
        (InvalidRequest("no"), []),
    ],
)
def test_the_headers_of_an_error(error: RequestError, headers: list[tuple[bytes, bytes]]) -> None:
    """Retry-After is in whole seconds: neither at once nor in an hour."""
    assert middleware.error_headers(error) == headers


async def test_of_two_keys_the_last_one_counts() -> None:
    """A proxy in front of the server adds its own behind what a client sent."""
    async with client(app_state(FakeLink(silent), api_key="s3cret")) as http:
        for given, status in ((("wrong", "s3cret"), 200), (("s3cret", "wrong"), 401)):
            answer = await http.get("/v1/models", headers=[("x-api-key", key) for key in given])
            assert answer.status_code == status


async def test_a_path_that_only_begins_like_an_api_is_not_its() -> None:
    """/v1/messagesabc is no path of Anthropic's API, so its error is OpenAI's."""
    async with client(app_state(FakeLink(silent))) as http:
        assert (await http.get("/v1/messages/abc")).json()["type"] == "error"
        assert "type" not in (await http.get("/v1/messagesabc")).json()
