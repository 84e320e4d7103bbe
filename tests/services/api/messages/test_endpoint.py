"""POST /v1/messages in memory: what the tokenizer is asked (turns.py, request.py), and errors (errors.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.messages import SubmitText, Tokenize
from tests.services.api.pipe import FakePort, answering, client, service, words

SAY: dict[str, Any] = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


async def asked(body: dict[str, Any]) -> SubmitText:
    port = FakePort(answering(words("so", " be it")))
    async with client(service(port)) as http:
        answer = await http.post("/v1/messages", json={**SAY, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"][0]["text"] == "so be it"
    (submit,) = port.of(SubmitText)
    assert isinstance(submit, SubmitText)
    return submit


async def test_the_conversation_as_a_chat() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {"role": "user", "content": [{"type": "text", "text": "well?"}, result]},
    ]
    submit = await asked({"system": [{"type": "text", "text": "Be kind."}], "messages": messages})
    assert json.loads(submit.messages or b"") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "user", "content": "well?"},
    ]  # fmt: skip


async def test_parameters_reach_the_engine() -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    submit = await asked({"stop_sequences": ["END"], "temperature": 0.5, "top_k": 3, "thinking": thinking})
    assert (submit.stop, submit.sampling.temperature, submit.sampling.top_k) == (("END",), 0.5, 3)
    assert (submit.sampling.max_tokens, submit.reasoning.budget, submit.reasoning.effort) == (20, 5, "high")


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [({}, 401, "authentication_error"), ({"x-api-key": "key"}, 400, "invalid_request_error")],
)
async def test_errors_have_anthropics_shape(headers: dict[str, str], status: int, kind: str) -> None:
    async with client(service(FakePort(answering(words("so"))), api_key="key"), headers=headers) as http:
        answer = await http.post("/v1/messages", json={**SAY, "max_tokens": 0})
        assert answer.status_code == status
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["request_id"] == answer.headers["x-request-id"]


async def test_a_count_asks_for_the_prompt_alone() -> None:
    port = FakePort(answering(words("so")))
    async with client(service(port)) as http:
        answer = await http.post("/v1/messages/count_tokens", json={"messages": SAY["messages"]})
    assert answer.json() == {"input_tokens": 4}
    (question,) = port.of(Tokenize)
    assert json.loads(question.messages) == SAY["messages"]
