"""POST /v1/messages in memory: what the tokenizer is asked (turns.py, request.py), and errors (errors.py)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.protocol.messages import ContextLength, Rejected, SubmitText, Tokenize
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, words

SAY: dict[str, Any] = {"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


async def asked(body: dict[str, Any]) -> SubmitText:
    port = FakeLink(answering(words("so", " be it")))
    async with client(app_state(port)) as http:
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
    async with client(app_state(FakeLink(answering(words("so"))), api_key="key"), headers=headers) as http:
        answer = await http.post("/v1/messages", json={**SAY, "max_tokens": 0})
        assert answer.status_code == status
        body = answer.json()
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]


async def counted(body: dict[str, Any]) -> tuple[dict[str, Any], Tokenize]:
    port = FakeLink(answering(words("so")))
    async with client(app_state(port)) as http:
        answer = await http.post("/v1/messages/count_tokens", json={"messages": SAY["messages"], **body})
    (question,) = port.of(Tokenize)
    assert isinstance(question, Tokenize)
    return answer.json(), question


async def test_a_count_asks_for_the_prompt_alone() -> None:
    answer, question = await counted({})
    assert answer == {"input_tokens": 4}
    assert json.loads(question.messages or b"") == SAY["messages"]
    answer, _ = await counted({"context_management": {"edits": []}})
    assert answer == {"input_tokens": 4, "context_management": {"original_input_tokens": 4}}


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({}, ""),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "high"),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "xhigh"),
    ],
)
async def test_a_count_is_of_the_prompt_that_the_message_would_have(body: dict[str, Any], effort: str) -> None:
    arguments = {"chat_template_kwargs": {"x": 1}}
    _, question = await counted({**body, **arguments})
    submit = await asked({"max_tokens": 512, **body, **arguments} if "thinking" not in body else
                         {"max_tokens": 5000, **body, **arguments})  # fmt: skip
    assert question.reasoning.effort == submit.reasoning.effort == effort
    assert question.messages == submit.messages
    assert question.template_arguments == submit.template_arguments == b'{"x":1}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "x"}, "container"),
    ],
)
async def test_a_count_refuses_what_the_message_would(body: dict[str, Any], param: str) -> None:
    async with client(app_state(FakeLink(answering(words("so"))))) as http:
        answer = await http.post("/v1/messages/count_tokens", json={"messages": SAY["messages"], **body})
    assert answer.status_code == 400
    assert param in answer.json()["error"]["message"]


async def test_the_user_is_a_session() -> None:
    named = [await asked({"metadata": {"user_id": name}}) for name in ("a", "a", "b")]
    assert named[0].session == named[1].session != named[2].session
    assert (await asked({})).session == ""


async def test_a_block_for_billing_is_not_for_the_model() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"}
    submit = await asked({"system": [billing, {"type": "text", "text": "Be kind."}]})
    assert json.loads(submit.messages or b"")[0] == {"role": "system", "content": "Be kind."}
    submit = await asked({"system": [billing]})
    assert [message["role"] for message in json.loads(submit.messages or b"")] == ["user"]


@pytest.mark.parametrize(
    ("option", "clamped", "status"), [("messages", True, 200), ("all", True, 200), ("none", False, 200)]
)
async def test_who_asks_for_more_than_the_context_holds(option: str, clamped: bool, status: int) -> None:
    """What remains is known where the prompt's length is."""
    port = FakeLink(answering(words("so")))
    async with client(app_state(port, clamp_max_tokens=option)) as http:
        answer = await http.post("/v1/messages", json={**SAY, "max_tokens": 32_000})
    assert answer.status_code == status
    (submit,) = port.of(SubmitText)
    assert (submit.clamp, submit.sampling.max_tokens) == (clamped, 32_000)


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (ContextLength(500, 100, 512), "input length and `max_tokens` exceed context limit: 500 + 100 > 512"),
        (ContextLength(512, 1, 512), "prompt is too long: 512 tokens > 512 maximum"),
        (ContextLength(600, 0, 512), "prompt is too long: 600 tokens > 512 maximum"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_lengths_are_told_as_anthropic_tells_them(length: ContextLength, told: str, path: str) -> None:
    def refuse(port: FakeLink, message: Any) -> None:
        rejected = Rejected(id=message.id, status=400, message="x", param="messages", code="y", context=length)
        asyncio.get_running_loop().call_soon(port.arrive, rejected)

    async with client(app_state(FakeLink(refuse))) as http:
        body = SAY if path == "/v1/messages" else {"messages": SAY["messages"]}
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith(told)
