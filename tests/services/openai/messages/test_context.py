"""Edits that a message's `context_management` asks for (context.py): none is made, and those that matter are named."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.messages import SubmitText
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words

THOUGHT = [{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "so"}]
CALLS = [{"type": "tool_use", "id": f"t{number}", "name": "f", "input": {}} for number in range(4)]
SAY: list[Any] = [{"role": "user", "content": "hi"}]
THOUGHT_TWICE: list[Any] = [*SAY, {"role": "assistant", "content": THOUGHT}, *SAY,
                            {"role": "assistant", "content": THOUGHT}, *SAY]  # fmt: skip
RESULT = {"type": "tool_result", "tool_use_id": "t0", "content": "x"}
CALLED: list[Any] = [*SAY, {"role": "assistant", "content": CALLS}, {"role": "user", "content": [RESULT]}]
THINKING, TOOLS = "clear_thinking_20251015", "clear_tool_uses_20250919"
FIRST = "context_management.edits[0]"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("messages", "management", "named"),
    [
        (SAY, {}, ""),
        (SAY, {"edits": None}, ""),
        (SAY, {"edits": []}, ""),
        (THOUGHT_TWICE, {"edits": [{"type": THINKING, "keep": "all"}]}, ""),
        (THOUGHT_TWICE, {"edits": [{"type": THINKING, "keep": {"type": "all"}}]}, ""),
        (THOUGHT_TWICE, {"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}]}, ""),
        (THOUGHT_TWICE, {"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 1}}]}, FIRST),
        (THOUGHT_TWICE, {"edits": [{"type": THINKING}]}, FIRST),
        (THOUGHT_TWICE[2:], {"edits": [{"type": THINKING}]}, ""),
        (CALLED, {"edits": [{"type": TOOLS}]}, ""),  # begins at more tokens than the context holds
        (CALLED, {"edits": [{"type": TOOLS, "trigger": {"type": "input_tokens", "value": 100}}]}, FIRST),
        (CALLED, {"edits": [{"type": TOOLS, "trigger": {"type": "input_tokens", "value": 100},
                             "keep": {"type": "tool_uses", "value": 4}}]}, ""),
        (CALLED, {"edits": [{"type": TOOLS, "trigger": {"type": "tool_uses", "value": 4}}]}, ""),
        (CALLED, {"edits": [{"type": TOOLS, "trigger": {"type": "tool_uses", "value": 3}}]}, FIRST),
        (SAY, {"edits": [{"type": "compact_20260112"}, {"type": THINKING}, {"type": "of_tomorrow"}]},
         f"{FIRST}, context_management.edits[2]"),
    ],
)  # fmt: skip
async def test_edits(path: str, messages: list[Any], management: dict[str, Any], named: str) -> None:
    port = FakeLink(answering(words("so")))
    body: dict[str, Any] = {"messages": messages, "context_management": management}
    async with client(app_state(port)) as http:
        if path == "/v1/messages":
            body["max_tokens"] = 9
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-penstock-ignored", "") == named
    told = answer.json()["context_management"]
    assert told == ({"applied_edits": []} if path == "/v1/messages" else {"original_input_tokens": 4})


async def test_a_stream_says_that_nothing_was_edited() -> None:
    port = FakeLink(answering(words("so")))
    management = {"edits": [{"type": "compact_20260112"}]}
    body = {"messages": SAY, "max_tokens": 9, "stream": True}
    async with client(app_state(port)) as http:
        answer = await http.post("/v1/messages", json={**body, "context_management": management})
        plain = await http.post("/v1/messages", json=body)
    assert answer.headers["x-penstock-ignored"] == FIRST
    assert '"context_management":{"applied_edits":[]}' in answer.text
    assert "context_management" not in plain.text
    assert "x-penstock-ignored" not in plain.headers
    assert len(port.of(SubmitText)) == 2


@pytest.mark.parametrize(
    ("management", "named"),
    [
        ({"edits": {}}, "context_management.edits"),
        ({"edits": [{"keep": "all"}]}, "context_management.edits[0].type"),
        ({"edits": [{"type": THINKING, "keep": "some"}]}, "context_management.edits[0].keep"),
        ({"edits": [{"type": THINKING}, {"type": TOOLS, "keep": {"type": "tool_uses", "value": -1}}]},
         "context_management.edits[1].keep.value"),
        ({"edits": [{"type": TOOLS, "trigger": 5}]}, "context_management.edits[0].trigger"),
        ({"edits": [{"type": THINKING}] * 65}, "context_management.edits"),
    ],
)  # fmt: skip
async def test_what_is_no_edit(management: Any, named: str) -> None:
    async with client(app_state(FakeLink(answering(words("so"))))) as http:
        body = {"messages": SAY, "max_tokens": 9, "context_management": management}
        answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(named)
