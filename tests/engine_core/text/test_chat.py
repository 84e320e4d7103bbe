"""Messages are checked before a template sees them; errors name the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine_core.text.rendering import deeper, read_json, read_messages
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.limits import MAX_JSON_DEPTH


def read(*messages: Any) -> list[dict[str, Any]]:
    return read_messages(json.dumps(messages).encode())


def test_plain_messages_pass_with_every_field() -> None:
    message = {"role": "user", "content": "hi", "name": "ann", "reasoning_content": "x"}
    assert read(message) == [message]


def test_text_parts_are_joined_by_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]


def test_tool_arguments_become_objects() -> None:
    def arguments(given: Any) -> Any:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        (message,) = read({"role": "assistant", "content": None, "tool_calls": [call]})
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": 1}') == {"a": 1}
    assert arguments({"a": 1}) == {"a": 1}
    assert arguments("") == {}
    assert arguments("{broken") == "{broken"
    assert arguments("[1]") == "[1]"


@pytest.mark.parametrize("calls", [None, []])
def test_what_is_null_is_not_there(calls: Any) -> None:
    """Clients send answers back as they have them, and templates ask whether a message has `tool_calls`."""
    sent = {"role": "assistant", "content": "hi", "tool_calls": calls, "refusal": None, "name": None}
    assert read(sent) == [{"role": "assistant", "content": "hi"}]
    silent = {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": calls}
    assert read(silent) == [{"role": "assistant", "content": None, "reasoning_content": "so"}]
    assert read({"role": "assistant", "reasoning": "so"}) == [{"role": "assistant", "reasoning": "so"}]


def test_a_call_is_of_a_function_where_it_does_not_say() -> None:
    (message,) = read({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]})
    assert message["tool_calls"] == [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": 3, "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0].type"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": ["text"], "text": "x"}]}, "messages[1].content[0].type"),
        ({"role": "assistant", "tool_calls": 3}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
    ],
)
def test_errors_name_the_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({"role": "user", "content": "first"}, message)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", b"3", b'"x"', b'["\xff"]', b'[{"role":"user","content":"\\ud800 x"}]']
)
def test_what_is_no_conversation_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(data)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 500, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_deep_nesting_is_refused(depth: int, brackets: str) -> None:
    opening = "[" if brackets == "[]" else '{"a":'
    data = (opening * depth + ("0" if brackets == "{}" else "") + brackets[1] * depth).encode()
    with pytest.raises(InvalidRequest, match="nested"):
        read_json(data, "messages")


def test_depth_is_counted_in_containers() -> None:
    assert not deeper([[[1]]], 3)
    assert deeper([[[1]]], 2)
    assert not deeper("x", 0)
    assert deeper({}, 0)
