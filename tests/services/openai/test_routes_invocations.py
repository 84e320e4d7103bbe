"""SageMaker's paths: POST /invocations goes where the body's fields say (routes.py), /ping says yes or no."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.protocol.messages import SubmitText
from tests.services.client.fake_engine import MODEL, FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error, events
from tests.services.openai.test_cohere import pooled

POOLED = msgspec.structs.replace(MODEL, hidden=8)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "chat.completion"),
        ({"prompt": "a"}, "text_completion"),
    ],
)
async def test_texts(body: dict[str, Any], kind: str) -> None:
    parts = app_state(FakeLink(answering(words("so", " be it"))))
    async with client(parts) as http:
        whole = await http.post("/invocations", json=body)
        stream = await http.post("/invocations", json={**body, "stream": True})
        wrong = await http.post("/invocations", json={**body, "n": 0})
    assert whole.json()["object"] == kind
    assert events(stream.text)[0]["object"].startswith(kind)
    assert wrong.status_code == 400
    check_error(wrong.json(), "invalid_request_error", "n")
    assert {endpoint for endpoint, _ in parts.traffic.responses} == {"/invocations"}


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ({"input": "a"}, "data"),
        ({"text_1": "a", "text_2": "b"}, "data"),
        ({"query": "a", "documents": ["b"]}, "results"),
    ],
)
async def test_vectors(body: dict[str, Any], member: str) -> None:
    port = FakeLink(answering(pooled))
    async with client(replace(app_state(port), model=POOLED)) as http:
        answer = await http.post("/invocations", json=body)
        score = await http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert len(answer.json()[member]) == 1
    assert len(score.json()["data"]) == 1
    assert all(submit.pooling is not None for submit in port.of(SubmitText))


@pytest.mark.parametrize("body", [{}, {"text_1": "a"}, {"query": "a"}])
async def test_a_body_for_nothing(body: dict[str, Any]) -> None:
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post("/invocations", json=body)
        broken = await http.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == broken.status_code == 400
    assert "messages; prompt; " in answer.json()["error"]["message"]


async def test_a_body_counts_once() -> None:
    parts = app_state(FakeLink(answering(words("so"))), max_queued_bytes=1024)
    async with client(parts) as http:
        for _ in range(4):
            answer = await http.post("/invocations", json={"prompt": "a" * 900})
            assert answer.status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping(method: str) -> None:
    parts = app_state(FakeLink(silent), api_key="key")
    async with client(parts) as http:
        assert (await http.request(method, "/ping")).status_code == 200
    port = FakeLink(silent)
    missing = app_state(port)
    port.lose()
    async with client(missing) as http:
        assert (await http.request(method, "/ping")).status_code == 503
