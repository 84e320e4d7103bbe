"""Input items as chat messages, as they are listed, and what is refused of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol.errors import InvalidRequest
from services.api.responses.items import items_of, listed, messages_of
from services.api.responses.request import Item

ITEMS = msgspec.json.Decoder(list[Item])


def items(*values: dict[str, Any]) -> list[Item]:
    return ITEMS.decode(msgspec.json.encode(values))


def test_a_text_is_what_a_user_says() -> None:
    assert messages_of(items_of("hi")) == [{"role": "user", "content": "hi"}]


def test_what_an_assistant_wrote_is_one_message() -> None:
    found = messages_of(items(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "content": "four"},
    ))  # fmt: skip
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert found == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "hm", "content": "so",
         "tool_calls": [{"id": "c1", **call}, {"id": "c2", "type": "function",
                                               "function": {"name": "g", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"type": "message", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[0].call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[0].name"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
    ],
)
def test_what_cannot_be_read_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages_of(items(item))
    assert caught.value.param == param
    assert param in caught.value.message


def test_items_are_listed_with_ids() -> None:
    found = listed(items(
        {"role": "user", "content": "a"},
        {"type": "message", "id": "msg_own", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
    ))  # fmt: skip
    assert [item["id"].split("_")[0] for item in found] == ["msg", "msg", "fc", "fco", "rs"]
    assert found[0]["content"] == [{"type": "input_text", "text": "a"}]
    assert found[1]["id"] == "msg_own"
    assert found[1]["content"] == [{"type": "output_text", "text": "b", "annotations": []}]
    assert found[4]["summary"] == [{"type": "summary_text", "text": "s"}]
