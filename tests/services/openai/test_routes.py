"""Every path leads to its endpoint, by routes.py and routing.py, and one that nearly does is told so."""

from __future__ import annotations

import pytest

from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/completions", "/v1/completions"),
        ("/completions/", "/v1/completions"), ("/v1/embeddings/", "/v1/embeddings"), ("/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"), ("/v1/health", "/health"), ("/messages", "/v1/messages"),
        ("/v1/chat/completion", "/v1/chat/completions"), ("/embedding", "/v1/embeddings"),
    ],
)  # fmt: skip
async def test_a_path_that_is_nearly_right(path: str, near: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_path"
    assert answer.json()["error"]["message"] == f"there is nothing at {path}; {near} is served"


@pytest.mark.parametrize("path", ["/v2/chat/completions", "/v1/images/generations", "/v1", "/nothing/" + "x" * 500])
async def test_a_path_that_is_nothing(path: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.get(path)
    assert answer.status_code == 404
    check_error(answer.json(), "not_found_error", None)
    assert answer.json()["error"]["message"] == f"there is nothing at {path[:200]}"


@pytest.mark.parametrize(
    ("path", "options"),
    [("/sleep", "--admin-address"), ("/v1/load_lora_adapter", "--admin-address and --lora-dir"),
     ("/update_weights_from_disk", "--admin-address and --weights-dir")],
)  # fmt: skip
async def test_what_is_for_the_operator_is_told_so(path: str, options: str) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(path)
    assert answer.status_code == 404
    told = f"there is nothing at {path}; it is for the operator, with {options}"
    assert answer.json()["error"]["message"] == told


async def test_a_wrong_method_is_told_the_right_ones() -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


async def test_the_right_path_is_served() -> None:
    async with client(app_state(FakeLink(answering(words("hi"))))) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert answer.json()["choices"][0]["text"] == "hi"
