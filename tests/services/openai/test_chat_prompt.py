"""Messages of a chat: each is checked, and what the template gets is what was meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.protocol import limits
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("field", "value"),
    [("messages", [{"role": "user", "content": "a", "x": None}]), ("chat_template_kwargs", {"x": None})],
)
async def test_what_is_handed_on_is_not_deep(field: str, value: Any) -> None:
    def nested(levels: int) -> dict[str, Any]:
        inner: Any = 1
        for _ in range(levels):
            inner = [inner]
        target = value[0] if isinstance(value, list) else value
        target["x"] = inner
        return {"messages": [{"role": "user", "content": "a"}], field: value}

    async with client(app_state(FakeLink(answering(words("ok"))))) as http:
        for levels, status in ((50, 200), (limits.MAX_JSON_DEPTH + 1, 400), (500, 400)):
            answer = await http.post(CHAT, json=nested(levels))
            assert answer.status_code == status
            if status == 400:
                check_error(answer.json(), "invalid_request_error", None)
                assert "--max-json-depth" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "a"}, "messages"),
        (["hello"], "messages[0]"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": 5, "content": "a"}], "messages[0].role"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role"),
        ([{"role": "function", "content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}],
         "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
         "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}],
         "messages[0].tool_calls[0].custom"),
        ([{"role": "assistant", "tool_calls": [{"type": "other", "function": {"name": "f"}}]}],
         "messages[0].tool_calls[0].type"),
        ([{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio"),
    ],
)  # fmt: skip
async def test_wrong_messages(messages: Any, param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        async with client(app_state(FakeLink(silent))) as http:
            answer = await http.post(path, json={"messages": messages})
        assert answer.status_code == 400
        expected = "prompt" if path == "/tokenize" and messages is None else param
        check_error(answer.json(), "invalid_request_error", expected)


async def test_text_parts_are_joined() -> None:
    port = FakeLink(answering(words("ok")))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": "s", "extra": 1}, {"role": "user", "content": parts, "name": "n"}]
    async with client(app_state(port)) as http:
        assert (await http.post(CHAT, json={"messages": messages})).status_code == 200
    sent = json.loads(port.sent[0].messages)  # type: ignore[attr-defined]
    assert sent == [messages[0], {"role": "user", "content": "one\ntwo", "name": "n"}]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
async def test_template_arguments_do_not_replace_the_servers_own(name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: 1}}
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(CHAT, json=body)
    check_error(answer.json(), "invalid_request_error", f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("silent_turn", [{"role": "assistant", "content": None}, {"role": "assistant"}])
async def test_an_assistant_may_have_said_nothing(silent_turn: dict[str, Any]) -> None:
    port = FakeLink(answering(words("ok")))
    messages = [{"role": "user", "content": "a"}, silent_turn, {"role": "user", "content": "b"}]
    async with client(app_state(port)) as http:
        assert (await http.post(CHAT, json={"messages": messages})).status_code == 200
    assert json.loads(port.sent[0].messages) == messages  # type: ignore[attr-defined]
