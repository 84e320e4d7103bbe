"""Pages of other origins: kept out unless asked for, answered before the key, never with more than was allowed."""

from __future__ import annotations

import pytest

from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.validation import check
from penstock.services.http.security import MAX_ASKED
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error

PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE, "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}  # fmt: skip
CHAT = "/v1/chat/completions"
ALLOWANCE = "access-control-allow-origin"


async def test_nothing_is_said_unless_it_was_asked_for() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        for method, headers in (("GET", {"origin": PAGE}), ("OPTIONS", PREFLIGHT)):
            answer = await http.request(method, CHAT, headers=headers)
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]
            assert "vary" not in answer.headers


async def test_a_preflight_needs_no_key_and_reads_no_body() -> None:
    async with client(app_state(FakeLink(silent), api_key="k", allowed_origins=f"{PAGE},https://b")) as http:
        answer = await http.options(CHAT, headers=PREFLIGHT)
        assert answer.status_code == 204
        assert answer.content == b""
        assert answer.headers[ALLOWANCE] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "access-control-allow-credentials" not in answer.headers
        assert "Origin" in answer.headers["vary"]
        assert answer.headers["x-request-id"]
        assert (await http.get("/v1/models", headers={"origin": PAGE})).status_code == 401


async def test_every_answer_names_the_origin_errors_and_streams_too() -> None:
    parts = app_state(FakeLink(answering(words("a", "b"))), allowed_origins=PAGE)
    async with client(parts, headers={"origin": PAGE}) as http:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        answers = [await http.post(CHAT, json=body), await http.post(CHAT, json={}), await http.get("/nowhere")]
    assert [answer.status_code for answer in answers] == [200, 400, 404]
    for answer in answers:
        assert answer.headers[ALLOWANCE] == PAGE
        assert answer.headers["vary"] == "Origin"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize("origin", ["https://other.example", "http://page.example", "https://page.example.evil", ""])
async def test_another_origin_gets_nothing(origin: str) -> None:
    async with client(app_state(FakeLink(silent), allowed_origins=PAGE)) as http:
        preflight = await http.options(CHAT, headers=PREFLIGHT | {"origin": origin})
        answer = await http.get("/version", headers={"origin": origin})
    for each in (preflight, answer):
        assert each.status_code == 403
        check_error(each.json(), "permission_error", None)
        assert each.json()["error"]["code"] == "origin_not_allowed"
        assert ALLOWANCE not in each.headers
        assert each.headers["vary"] == "Origin"  # a cache keeps the answers apart


async def test_any_origin() -> None:
    async with client(app_state(FakeLink(silent), allowed_origins="*")) as http:
        answer = await http.get("/version", headers={"origin": "null"})
        assert answer.headers[ALLOWANCE] == "*"
        assert (await http.options(CHAT, headers=PREFLIGHT)).headers[ALLOWANCE] == "*"
        assert ALLOWANCE not in (await http.get("/version")).headers


async def test_methods_headers_and_credentials_as_told() -> None:
    options = {"allowed_methods": "GET,POST", "allowed_headers": "x-a,authorization", "allow_credentials": True}
    async with client(app_state(FakeLink(silent), allowed_origins=PAGE, **options)) as http:
        answer = await http.options(CHAT, headers=PREFLIGHT)
        plain = await http.get("/version", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-methods"] == "GET, POST"
    assert answer.headers["access-control-allow-headers"] == "x-a, authorization"
    for each in (answer, plain):
        assert each.headers["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize("asked", ["a b", "a\tb", "a:", "x," * MAX_ASKED])
async def test_header_names_that_are_none_are_not_repeated(asked: str) -> None:
    async with client(app_state(FakeLink(silent), allowed_origins="*")) as http:
        answer = await http.options(CHAT, headers=PREFLIGHT | {"access-control-request-headers": asked})
    assert answer.status_code == 405
    assert "access-control-allow-headers" not in answer.headers


async def test_options_alone_are_no_preflight() -> None:
    async with client(app_state(FakeLink(silent), allowed_origins="*")) as http:
        assert (await http.options(CHAT)).status_code == 405
        assert (await http.options(CHAT, headers={"origin": PAGE})).status_code == 405


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"allow_credentials": True}, "--allow-credentials"),
        ({"allow_credentials": True, "allowed_origins": f"{PAGE},*"}, "--allow-credentials"),
        ({"allowed_origins": "page.example"}, "--allowed-origins"),
        ({"allowed_origins": "https://page.example/path"}, "--allowed-origins"),
        ({"allowed_methods": "GE T"}, "--allowed-methods"),
        ({"allowed_headers": "a:b"}, "--allowed-headers"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(Config(api=ApiConfig(**options)))
    assert caught.value.option == flag


FOREIGN = ["https://evil.example", "null", "", "http://127.0.0.1:3000", "https://127.0.0.1", "http://api.evil.example"]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("kind", [None, "text/plain", "application/json"])
async def test_a_page_of_another_origin_makes_nothing_run(origin: str, kind: str | None) -> None:
    """A browser sends such a request without asking first, and keeps no more than its answer from the page."""
    port = FakeLink(silent)
    headers = {"origin": origin} | ({} if kind is None else {"content-type": kind})
    async with client(app_state(port)) as http:
        for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"):
            answer = await http.post(path, content=b'{"prompt": "a", "input": "a"}', headers=headers)
            assert answer.status_code == 403
        for path in ("/version", "/v1/models", "/metrics", "/"):
            assert (await http.get(path, headers=headers)).status_code == 403
        for path in ("/health/live", "/health/ready"):
            assert (await http.get(path, headers=headers)).status_code == 200
        assert (await http.delete("/v1/responses/resp_1", headers=headers)).status_code == 403
    assert port.sent == []


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://api"},
        {"origin": "http://API"},
        {"origin": "https://api"},  # a front has ended TLS
        {"origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"origin": "https://outside.example", "sec-fetch-site": "same-origin"},  # a front sends a Host of its own
    ],
)
async def test_the_servers_own_page_may_call_it(headers: dict[str, str]) -> None:
    async with client(app_state(FakeLink(answering(words("ok"))))) as http:
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert (await http.post(CHAT, json=body, headers=headers)).status_code == 200


async def test_several_origins_are_each_looked_at() -> None:
    async with client(app_state(FakeLink(silent), allowed_origins=PAGE)) as http:
        for origins in (["https://evil.example", PAGE], [PAGE, "https://evil.example"]):
            answer = await http.get("/version", headers=[("origin", origin) for origin in origins])
            assert answer.status_code == 403
        answer = await http.get("/version", headers={"origin": "https://evil.example", "sec-fetch-site": "cross-site"})
        assert answer.status_code == 403
