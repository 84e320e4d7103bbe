"""Responses in the background (background.py): how they end, what is kept, and what the server counts and logs."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from penstock.protocol.messages import Abort, Finish, SubmitText
from penstock.services.openai.app_state import AppState
from penstock.services.openai.responses.turn import Turn
from tests.services.client.fake_engine import LIMIT, FakeLink, Row, answering, app_state, batch, client, silent, words

ASKED = {"input": "hi", "background": True}


async def begin(asking: httpx.AsyncClient, **fields: Any) -> str:
    """Begin a response in the background; its id."""
    answer = await asking.post("/v1/responses", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    begun = answer.json()
    assert begun["status"] == "in_progress"
    return str(begun["id"])


async def found(asking: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The response once it has come to an end."""
    async with asyncio.timeout(LIMIT):
        while True:
            answer = await asking.get(f"/v1/responses/{name}")
            assert answer.status_code == 200, answer.text
            told: dict[str, Any] = answer.json()
            if told["status"] != "in_progress":
                return told
            await asyncio.sleep(0)


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.getMessage() == event]


def tokens(parts: AppState) -> tuple[int, int]:
    return parts.traffic.prompt_tokens, parts.traffic.completion_tokens


async def test_its_tokens_are_counted_and_logged_when_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    parts = app_state(FakeLink(answering(words("one", " two", prompt_tokens=7))))
    async with client(parts, headers={"x-request-id": "mine"}) as asking:
        name = await begin(asking)
        told = await found(asking, name)
    assert told["status"] == "completed"
    assert told["usage"]["output_tokens"] == 2
    assert tokens(parts) == (7, 2)
    (line,) = lines(caplog, "background")
    assert line["seconds"] >= 0
    expected = {"id": "mine", "response": name, "status": "completed", "prompt_tokens": 7, "completion_tokens": 2}
    assert {field: line[field] for field in expected} == expected
    assert "reason" not in line


async def test_one_that_fails_is_counted_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = [[Row(text="half", extra={"prompt_tokens": 3})], [Row(finish=Finish.ERROR, tokens=0)]]
    parts = app_state(FakeLink(answering(lambda _: rows)))
    async with client(parts) as asking:
        told = await found(asking, await begin(asking))
    assert told["status"] == "failed"
    assert told["error"]["code"] == "server_error"
    assert parts.traffic.rejections == {"server_error": 1}
    assert tokens(parts) == (3, 1)
    (line,) = lines(caplog, "background")
    assert (line["status"], line["reason"]) == ("failed", "server_error")


async def test_to_delete_one_ends_it_and_it_stays_deleted() -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    async with client(parts) as asking:
        name = await begin(asking)
        (asked,) = port.of(SubmitText)
        assert (await asking.delete(f"/v1/responses/{name}")).json()["deleted"] is True
        assert port.of(Abort) == [Abort(asked.id)]
        assert parts.engine_client.statistics().unfinished == 0
        port.arrive(batch([(asked.id, Row(text="late", finish=Finish.STOP))]))
        await asyncio.sleep(0)
        assert (await asking.get(f"/v1/responses/{name}")).status_code == 404
        assert (await asking.delete(f"/v1/responses/{name}")).status_code == 404
    assert parts.responses.statistics().responses == 0


async def test_one_that_was_cancelled_says_so_and_is_kept() -> None:
    port = FakeLink(silent)
    parts = app_state(port)
    async with client(parts) as asking:
        name = await begin(asking)
        for _ in range(2):
            assert (await asking.post(f"/v1/responses/{name}/cancel")).json()["status"] == "cancelled"
        assert len(port.of(Abort)) == 1
        assert (await asking.get(f"/v1/responses/{name}")).json()["status"] == "cancelled"
        assert (await asking.post("/v1/responses/resp_none/cancel")).status_code == 404


async def test_a_bug_of_ours_fails_it_instead_of_leaving_it_in_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def complete(*_: object) -> None:
        raise RuntimeError("what nobody is told")

    monkeypatch.setattr(Turn, "complete", complete)
    parts = app_state(FakeLink(answering(words("one"))))
    async with client(parts) as asking:
        told = await found(asking, await begin(asking))
    assert told["status"] == "failed"
    assert "nobody" not in told["error"]["message"]
    (line,) = lines(caplog, "request_failed")
    assert line["route"] == "/v1/responses"
    assert parts.traffic.rejections == {"internal_error": 1}
    assert parts.engine_client.statistics().unfinished == 0


async def test_its_body_counts_until_it_has_ended() -> None:
    port = FakeLink(silent)
    long = "x" * 1000
    async with client(app_state(port, max_queued_bytes=1500)) as asking:
        name = await begin(asking, input=long)
        refused = await asking.post("/v1/responses", json=ASKED | {"input": long})
        assert refused.status_code == 429
        assert "--max-queued-bytes" in refused.json()["error"]["message"]
        await asking.post(f"/v1/responses/{name}/cancel")
        await begin(asking, input=long)
