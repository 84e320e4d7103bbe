"""Sessions by header and by user, and what brings a conversation's turns to one tokenizer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import Client, Finish, Sampling, SubmitText
from penstock.services.client.tokenizer_router import affinity
from penstock.services.http.request_context import RequestContext, digest
from penstock.services.openai.routes import application
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, request_context, words


def request(*headers: tuple[bytes, bytes], port: int = 1, tenant: str = "") -> RequestContext:
    found = request_context(*headers, client=("10.0.0.1", port))
    found.tenant = tenant
    return found


def chat(*contents: str, **fields: Any) -> SubmitText:
    roles = ("system", *("user", "assistant") * len(contents))
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return SubmitText(id=fields.pop("id", 7), messages=json.dumps(turns).encode(), sampling=Sampling(), **fields)


def test_nobody_says_so() -> None:
    assert request().sender()[0] == request().sender("")[0] == request().sender(None)[0] == ""


def test_the_header_comes_before_the_user() -> None:
    named = request((b"x-session-id", b"a"))
    assert named.sender()[0] == named.sender("somebody")[0] != ""
    assert request().sender("somebody")[0] not in ("", named.sender()[0])
    assert request().sender("a")[0] != named.sender()[0], "they are names of different things"


@pytest.mark.parametrize("value", [b"", b"two words", b"x" * 257, "ü".encode()])
def test_what_is_no_name_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request((b"x-session-id", value)).sender()[0]
    assert caught.value.code == "invalid_header"


def test_two_names_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        request((b"x-session-id", b"a"), (b"x-session-id", b"b")).sender()[0]


def test_any_user_is_a_digest_of_one_length() -> None:
    assert {len(request().sender(user)[0]) for user in ("a", "é" * 10_000, "\ud800")} == {24}


def test_a_chat_that_goes_on_keeps_its_number() -> None:
    first = chat("be kind", "hello")
    later = chat("be kind", "hello", "hi", "how are you", id=8)
    assert affinity(first) == affinity(later)
    assert affinity(chat("be kind", "good morning")) != affinity(first)
    assert affinity(chat("be rude", "hello")) != affinity(first)


def test_a_session_is_a_number_whatever_it_says() -> None:
    other = SubmitText(id=3, prompt="x", sampling=Sampling(), session="s")
    assert affinity(chat("a", "b", session="s")) == affinity(other)
    assert affinity(chat("a", "b", session="t")) != affinity(chat("a", "b", session="s"))


def test_a_prompt_without_a_session_goes_by_its_id() -> None:
    assert affinity(SubmitText(id=3, prompt="x", sampling=Sampling())) == 3


def test_a_chat_without_a_user_has_a_number_too() -> None:
    messages = [{"role": "system", "content": "be kind"}]
    assert affinity(SubmitText(id=3, messages=json.dumps(messages).encode(), sampling=Sampling())) > 0


def test_a_client_is_its_user_or_else_its_session_or_else_its_connection() -> None:
    session = (b"x-session-id", b"s")
    found = {
        "user": request(session).sender("a")[1],
        "same user": request(port=2).sender("a")[1],
        "session": request(session).sender()[1],
        "same session": request(session, port=2).sender()[1],
        "connection": request().sender()[1],
        "same connection": request().sender()[1],
        "other connection": request(port=2).sender()[1],
        "no address": request_context(client=None).sender()[1],
        "user called as the session": request().sender("s")[1],
    }
    assert found["user"] == found["same user"]
    assert found["session"] == found["same session"]
    assert found["connection"] == found["same connection"]
    assert len(set(found.values())) == len(found) - 3
    assert {(client.tenant, len(client.name)) for client in found.values()} == {("", 24)}


def test_the_key_stands_above_the_user_and_is_not_told() -> None:
    one, other = (request(tenant=digest(b"key:" + key)).sender("a")[1] for key in (b"sk-1", b"sk-2"))
    assert one.name == other.name
    assert one.tenant != other.tenant
    assert "sk-1" not in one.tenant
    assert len(digest(b"key:" + b"k" * 10_000)) == 24


def test_a_session_without_a_name_is_refused_here_too() -> None:
    with pytest.raises(InvalidRequest):
        request((b"x-session-id", b"two words")).sender()[1]


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
VECTOR = np.ones(4, np.float32).tobytes()
ROUTES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT, {"user": "ann"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4}, {"user": "ann"}),
    ("/v1/messages", CHAT, {"metadata": {"user_id": "ann"}}),
    ("/v1/responses", {"input": "hi", "store": False}, {"user": "ann"}),
    ("/v1/embeddings", {"input": ["a", "b"]}, {"user": "ann"}),
]


@pytest.mark.parametrize(("path", "body", "named"), ROUTES)
@pytest.mark.parametrize("keys", ["", "sk-1,sk-2"])
async def test_every_route_says_whose_its_requests_are(
    path: str, body: dict[str, Any], named: dict[str, Any], keys: str
) -> None:
    vector = Row(tokens=0, finish=Finish.STOP, extra={"prompt_tokens": 1, "vector": VECTOR})
    port = FakeLink(answering(lambda request: [[vector]] if request.pooling else words("x")(request)))
    app = application(app_state(port, api_key=keys))

    async def ask(connection: int, key: str, fields: dict[str, Any]) -> Client:
        transport = httpx.ASGITransport(app, client=("10.0.0.1", connection))
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as http:
            port.sent.clear()
            answer = await http.post(path, json={**body, **fields}, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
        (found,) = {request.client for request in port.of(SubmitText)}
        assert isinstance(found, Client)
        return found

    ann = await ask(1, "sk-1", named)
    assert ann == await ask(2, "sk-1", named)
    assert ann == Client(digest(b"key:" + b"sk-1") if keys else "", ann.name)
    bare = [await ask(connection, "sk-1", {}) for connection in (1, 1, 2)]
    assert bare[0] == bare[1] != bare[2]
    assert ann not in bare
    other = await ask(1, "sk-2", named)
    assert (other == ann) is not bool(keys), "a key that nobody checks is no name"
    assert other.name == ann.name
