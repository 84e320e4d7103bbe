"""Input items as chat messages, as they are listed, and what is refused of them."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from penstock.protocol.errors import InvalidRequest
from penstock.services.client.model_info import ModelInfo
from penstock.services.openai.images import Images
from penstock.services.openai.responses.items import IMAGE, History, items_of, listed, sealed, tools_within
from penstock.services.openai.responses.request import Item
from tests.services.client.fake_engine import MODEL

ITEMS = msgspec.json.Decoder(list[Item])


def items(*values: dict[str, Any]) -> list[Item]:
    return ITEMS.decode(msgspec.json.encode(values))


def history_of(given: list[Item], model: ModelInfo = MODEL) -> History:
    return History(given, Images(model))


def messages_of(given: list[Item]) -> list[dict[str, Any]]:
    return history_of(given).messages


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
        ({"type": "compaction_trigger"}, "input[0].type"),
        ({"type": "computer_call", "call_id": "c"}, "input[0].type"),
        ({"type": "computer_call_output", "call_id": "c", "output": {"type": "x"}}, "input[0].type"),
        ({"type": "nothing_known"}, "input[0].type"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "custom_tool_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": {"a": 1}}, "input[0].output"),
        ({"type": "local_shell_call_output", "output": "x"}, "input[0].id"),
        ({"type": "shell_call_output", "output": []}, "input[0].call_id"),
        ({"role": "user", "content": [{"text": "x"}]}, "input[0].content[0].type"),
        ({"role": "tool", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"type": "message", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0]"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[0].content[0].type"),
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


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_calls_of_custom_tools_and_of_namespaces() -> None:
    found = messages_of(items(
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"', "namespace": "files"},
        {"type": "function_call", "call_id": "c2", "name": "spawn", "arguments": "{}", "namespace": "agents__"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
    ))  # fmt: skip
    assert found[0]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "files__patch", "arguments": {"input": 'a "b"'}}},
        call("agents__spawn", "{}", "c2"),
    ]
    assert found[1] == result("c1", "done")


@pytest.mark.parametrize(
    ("given", "called", "told"),
    [
        ([{"type": "local_shell_call", "id": "ls", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
          {"type": "local_shell_call_output", "id": "c", "output": "a.py"}],
         call("local_shell", '{"type":"exec","command":["ls"]}', "c"), "a.py"),
        ([{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
          {"type": "shell_call_output", "call_id": "c",
           "output": [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}]}],
         call("shell", '{"commands":["ls"]}', "c"), "a\nb"),
        ([{"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "x"}},
          {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"}],
         call("apply_patch", '{"type":"delete_file","path":"x"}', "c"), "failed"),
        ([{"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}}],
         call("web_search", '{"type":"search","query":"q"}', "ws"), "completed"),
        ([{"type": "file_search_call", "id": "fs", "queries": ["q"], "results": [{"text": "r"}, {"score": 1}]}],
         call("file_search", '{"queries":["q"]}', "fs"), "r\n"),
        ([{"type": "code_interpreter_call", "id": "ci", "code": "1", "outputs": [{"type": "logs", "logs": "1"}]}],
         call("code_interpreter", '{"code":"1"}', "ci"), "1"),
        ([{"type": "image_generation_call", "id": "ig", "result": "AAAA", "revised_prompt": "a cat"}],
         call("image_generation", '{"prompt":"a cat"}', "ig"), IMAGE),
        ([{"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": "{}", "output": "r"}],
         call("s__f", "{}", "m"), "r"),
        ([{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "error": {"code": 1}}],
         call("f", "{}", "m"), '{"code":1}'),
        ([{"type": "tool_search_call", "call_id": "c", "arguments": {"query": "q"}},
          {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "found"}]}],
         call("tool_search", '{"query":"q"}', "c"), '["found"]'),
        ([{"type": "program", "id": "p", "call_id": "c", "code": "x"},
          {"type": "program_output", "call_id": "c", "result": "y"}], call("program", '{"code":"x"}', "c"), "y"),
    ],
)  # fmt: skip
def test_calls_that_others_made(given: list[dict[str, Any]], called: dict[str, Any], told: str) -> None:
    history = history_of(items(*given))
    assert history.messages == [
        {"role": "assistant", "tool_calls": [called], "content": None}, result(called["id"], told)
    ]  # fmt: skip
    assert history.ignored == []


def test_what_cannot_be_read_is_left_out_with_a_word() -> None:
    history = history_of(items(
        {"role": "user", "content": "a"},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:"}]},
    ))  # fmt: skip
    assert history.messages == [{"role": "user", "content": "a"}, result("c", IMAGE)]
    assert [told.split(":")[0] for told in history.ignored] == ["input[1]", "input[2]", "input[3]", "input[4].output"]


def test_what_of_a_compaction_can_be_read_stays() -> None:
    summary = [{"type": "summary_text", "text": "so far"}]
    history = history_of(items({"type": "compaction", "encrypted_content": "x", "summary": summary}))
    assert history.messages == [{"role": "user", "content": "so far"}]
    assert history.ignored == []


def test_reasoning_comes_back_from_what_was_sealed() -> None:
    for given in ({"encrypted_content": sealed("hm ü")}, {"encrypted_content": "x", "content":
                  [{"type": "reasoning_text", "text": "hm ü"}]}, {"summary": [{"type": "summary_text", "text": "hm ü"}],
                  "encrypted_content": base64.b64encode(b"other").decode()}):  # fmt: skip
        history = history_of(items({"type": "reasoning", "summary": [], **given}))
        assert [message["reasoning_content"] for message in history.messages] == ["hm ü"]
        assert history.ignored == []


def test_tools_that_the_conversation_brought() -> None:
    found = tools_within(items(
        {"role": "user", "content": "a"},
        {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "function", "name": "f"}]},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "g"}]},
    ))  # fmt: skip
    assert [(place, tool.name) for place, tool in found] == [("input[1].tools[0]", "f"), ("input[2].tools[0]", "g")]


def test_other_items_are_listed_as_they_were_given() -> None:
    (found,) = listed(items({"type": "web_search_call", "id": "ws", "status": "failed", "action": {"query": "q"}}))
    assert found == {"type": "web_search_call", "id": "ws", "status": "failed", "action": {"query": "q"}}


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
