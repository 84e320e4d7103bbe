"""Tools of a chat: what the tokenizer is told, what is refused, and how calls and reasoning look to the client."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import openai.types.chat as chat
import pytest

from penstock.protocol import limits
from penstock.protocol.messages import CustomInput, Finish, PieceKind, SubmitText, ToolUse
from penstock.protocol.outputs import Piece
from penstock.services.openai.structured_output import FORMS
from tests.services.client.fake_engine import FakeLink, Row, answering, app_state, client, position, silent, words
from tests.services.openai.shapes import check, check_chat_chunks, check_error, events

CHAT = "/v1/chat/completions"
ASK: Any = [{"role": "user", "content": "a"}]
C, R, CALL, A = PieceKind.CONTENT, PieceKind.REASONING, PieceKind.CALL, PieceKind.ARGUMENTS


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


def custom(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **more}}


F, G = tool("f"), tool("g", strict=True)
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}


async def sent(**body: Any) -> SubmitText:
    port = FakeLink(answering(words("ok")))
    async with client(app_state(port)) as http:
        answer = await http.post(CHAT, json={"messages": ASK, **body})
    assert answer.status_code == 200, answer.text
    (found,) = port.of(SubmitText)
    assert isinstance(found, SubmitText)
    return found


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        ("auto", ToolUse(names=("f", "g"), strict=("g",))),
        ("required", ToolUse(names=("f", "g"), required=True, strict=("g",))),
        ({"type": "function", "function": {"name": "f"}},
         ToolUse(names=("f",), required=True, parallel=False, bound=True, strict=("g",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [F]}},
         ToolUse(names=("f",), bound=True, strict=("g",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [G, F, G]}},
         ToolUse(names=("g", "f"), required=True, bound=True, strict=("g",))),
    ],
)  # fmt: skip
async def test_choices(choice: Any, use: ToolUse) -> None:
    found = await sent(tools=[F, G], tool_choice=choice)
    assert found.tool_use == use
    assert json.loads(found.tools or b"") == [F, G]


STRUCTURES: dict[str, Any] = {
    "structured_outputs": {"regex": "a"}, "guided_json": {"type": "object"}, "guided_regex": "a",
    "guided_grammar": 'start: "a"', "guided_choice": ["a"], "guided_json_object": True, "json_schema": {"type": "null"},
    "regex": "a", "ebnf": 'root ::= "a"', "grammar": 'start: "a"',
    "structural_tag": {"format": {"type": "const_string", "value": "a"}},
}  # fmt: skip
FORMATS: list[Any] = [
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}},
]  # fmt: skip


def allowed_tools(mode: str) -> Any:
    named = {"type": "function", "function": {"name": "f"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}


FORCED: list[Any] = ["required", {"type": "function", "function": {"name": "f"}}, allowed_tools("required")]


def test_every_structure_field_is_tried() -> None:
    assert {*STRUCTURES, "response_format"} == set(FORMS)


@pytest.mark.parametrize("field", STRUCTURES)
@pytest.mark.parametrize("choice", FORCED, ids=["required", "named", "allowed"])
async def test_a_call_that_must_be_follows_no_structure(field: str, choice: Any) -> None:
    body = {"messages": ASK, "tools": [F, G], "tool_choice": choice, field: STRUCTURES[field]}
    async with client(app_state(FakeLink(silent))) as http:
        answer = await http.post(CHAT, json=body)
    assert answer.status_code == 400
    param = "structured_outputs.regex" if field == "structured_outputs" else field
    check_error(answer.json(), "invalid_request_error", param)
    assert f"{param} and tool_choice" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", STRUCTURES)
@pytest.mark.parametrize("choice", ["none", "auto", allowed_tools("auto")], ids=["none", "auto", "allowed"])
async def test_a_call_that_may_be_stands_beside_a_structure(field: str, choice: Any) -> None:
    found = await sent(tools=[F, G], tool_choice=choice, **{field: STRUCTURES[field]})
    assert found.grammar is not None
    assert (found.tool_use is None) == (choice == "none")


@pytest.mark.parametrize("form", FORMATS, ids=["json_object", "json_schema", "structural_tag"])
@pytest.mark.parametrize("choice", ["none", "auto", *FORCED], ids=["none", "auto", "required", "named", "allowed"])
async def test_a_response_format_goes_with_every_choice(form: Any, choice: Any) -> None:
    found = await sent(tools=[F, G], tool_choice=choice, response_format=form)
    assert found.grammar is not None
    assert (found.tool_use is not None and found.tool_use.required) == (choice in FORCED)


@pytest.mark.parametrize("name", ["f\n", "\nf", "f\n\n", "a b", "f\r"])
async def test_a_name_holds_no_line_break(name: str) -> None:
    bodies: list[Any] = [
        {"tools": [tool(name)]}, {"tools": [custom(name)]},
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": name}}},
    ]  # fmt: skip
    async with client(app_state(FakeLink(silent))) as http:
        for body in bodies:
            assert (await http.post(CHAT, json={"messages": ASK, **body})).status_code == 400


async def test_no_tools_no_use() -> None:
    for body in ({}, {"tools": []}, {"tools": None}, {"tool_choice": "none"}, {"tool_choice": "auto"},
                 {"tools": [F], "tool_choice": "none"}, {"parallel_tool_calls": False}):  # fmt: skip
        found = await sent(**body)
        assert (found.tools, found.tool_use) == (None, None)
    serial = await sent(tools=[F], parallel_tool_calls=False)
    assert serial.tool_use is not None
    assert not serial.tool_use.parallel


async def test_custom_tools_are_functions_of_one_string_to_the_model() -> None:
    tools = [F, custom("free", description="Says it."), custom("bound", format=GRAMMAR)]
    found = await sent(tools=tools, tool_choice={"type": "custom", "custom": {"name": "bound"}})
    customs = (CustomInput(name="free"), CustomInput(name="bound", syntax="lark", definition="start: /a+/"))
    assert found.tool_use == ToolUse(
        names=("bound",), required=True, parallel=False, bound=True, strict=("bound",), customs=customs
    )
    first, free, bound = json.loads(found.tools or b"")
    assert first == F
    assert free["type"] == bound["type"] == "function"
    assert (free["function"]["name"], free["function"]["description"]) == ("free", "Says it.")
    assert bound["function"]["parameters"]["required"] == ["input"]
    assert "start: /a+/" in bound["function"]["parameters"]["properties"]["input"]["description"]
    listed = [{"type": "custom", "custom": {"name": "free"}}, F]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": listed}}
    use = (await sent(tools=tools, tool_choice=allowed)).tool_use
    assert use is not None
    assert use.names == ("free", "f")


async def test_calls_of_custom_tools_have_an_input() -> None:
    rows = (
        Row(pieces=(Piece(CALL, "c"), Piece(A, "one")), extra={"prompt_tokens": 5}),
        Row(pieces=(Piece(A, ' "two"'), Piece(CALL, "f"), Piece(A, "{}"))),
        Row(finish=Finish.CALLS),
    )
    body = {"messages": ASK, "tools": [F, custom("c")]}
    async with client(app_state(speaking(rows))) as http:
        answer = (await http.post(CHAT, json=body)).json()
        chunks = events((await http.post(CHAT, json=body | {"stream": True})).text)
    check(chat.ChatCompletion, answer)
    first, second = answer["choices"][0]["message"]["tool_calls"]
    assert (first["type"], first["custom"]) == ("custom", {"name": "c", "input": 'one "two"'})
    assert "function" not in first
    assert second["function"] == {"name": "f", "arguments": "{}"}
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0].pop("id")
    assert calls[0] == {"index": 0, "type": "custom", "custom": {"name": "c", "input": ""}}
    told = [call["custom"]["input"] for call in calls if "custom" in call]
    assert "".join(told) == 'one "two"'
    assert calls[-1] == {"index": 1, "function": {"arguments": "{}"}}


async def test_calls_of_custom_tools_in_the_conversation() -> None:
    other = {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = [{"id": "call_1", "type": "custom", "custom": {"name": "c", "input": 'a "b"'}}, other]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    found = await sent(messages=[*ASK, said, {"role": "tool", "tool_call_id": "call_1", "content": "done"}])
    first, second = json.loads(found.messages or b"")[1]["tool_calls"]
    assert first == {"id": "call_1", "type": "function", "function": {"name": "c", "arguments": {"input": 'a "b"'}}}
    assert second == other


async def test_reasoning_is_handed_on() -> None:
    assert (await sent()).reasoning.split
    found = (await sent(reasoning_effort="low", thinking_token_budget=7, separate_reasoning=False)).reasoning
    assert (found.effort, found.budget, found.split) == ("low", 7, False)
    assert (await sent(max_thinking_tokens=0)).reasoning.budget == 0
    assert (await sent(max_thinking_tokens=3, thinking_token_budget=3)).reasoning.budget == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": 5}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * (limits.MAX_TOOL_NAME + 1))]}, "tools[0].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [F, G, F]}, "tools[2].function.name"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [F] * (limits.MAX_TOOLS + 1)}, "tools"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": [F], "tool_choice": {"type": "other"}}, "tool_choice.type"),
        ({"tools": [custom("c")], "tool_choice": {"type": "custom", "custom": {"name": "d"}}},
         "tool_choice.custom.name"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"), ({"tools": [custom("f"), F]}, "tools[1].function.name"),
        ({"tools": [custom("c", format={"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom("c", format={"type": "other"})]}, "tools[0].custom.format.type"),
        ({"tools": [custom("c", format={"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "a"}})]},
         "tools[0].custom.format.grammar.syntax"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice.function.name"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [G]}}},
         "tool_choice.allowed_tools.tools[0].function.name"),
        ({"reasoning_effort": "much"}, "reasoning_effort"), ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "max_thinking_tokens": 2}, "max_thinking_tokens"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ],
)  # fmt: skip
async def test_wrong(body: dict[str, Any], param: str) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        answer = await http.post(CHAT, json={"messages": ASK, **body})
    assert answer.status_code == 400
    check_error(answer.json(), "invalid_request_error", param)
    assert port.sent == []


ROWS: Sequence[Row] = (
    Row(extra={"prompt_tokens": 5, "cached_tokens": 0}, pieces=(Piece(R, "wh"),)),
    Row(pieces=(Piece(R, "y"), Piece(C, "Let me "))),
    Row(text="see."),
    Row(pieces=(Piece(CALL, "f"), Piece(A, '{"a":'))),
    Row(pieces=(Piece(A, " 1}"), Piece(CALL, "g"), Piece(A, "{}"))),
    Row(finish=Finish.CALLS, extra={"reasoning_tokens": 2}),
)


def speaking(rows: Sequence[Row]) -> FakeLink:
    return FakeLink(answering(lambda request: [[row] for row in rows]))


async def test_calls_and_reasoning_in_a_message() -> None:
    async with client(app_state(speaking(ROWS))) as http:
        answer = (await http.post(CHAT, json={"messages": ASK})).json()
        hidden = (await http.post(CHAT, json={"messages": ASK, "include_reasoning": False})).json()
    check(chat.ChatCompletion, answer)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Let me see.", "why", "why")
    assert {call["type"] for call in message["tool_calls"]} == {"function"}
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert "reasoning" not in hidden["choices"][0]["message"]


async def test_content_is_null_where_there_are_calls_alone() -> None:
    for rows, content in ((ROWS[3:], None), ([Row(pieces=(Piece(R, "why"),), finish=Finish.LENGTH)], "")):
        async with client(app_state(speaking(rows))) as http:
            answer = (await http.post(CHAT, json={"messages": ASK})).json()
        check(chat.ChatCompletion, answer)
        assert answer["choices"][0]["message"]["content"] == content


async def test_calls_and_reasoning_in_a_stream() -> None:
    async with client(app_state(speaking(ROWS))) as http:
        text = (await http.post(CHAT, json={"messages": ASK, "stream": True})).text
    chunks = events(text)
    check_chat_chunks(chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1]
    assert [call.get("id", "")[:5] for call in calls] == ["call_", "", "", "call_", ""]
    assert calls[0]["function"] == {"name": "f", "arguments": ""}
    assert calls[1] == {"index": 0, "function": {"arguments": '{"a":'}}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_stream_without_reasoning_and_with_logprobs() -> None:
    rows = [
        Row(extra={"prompt_tokens": 5, "logprobs": (position("why", 1, 0),)}, pieces=(Piece(R, "why"),)),
        Row(extra={"logprobs": (position("f", 2, 3),)}, pieces=(Piece(CALL, "f"), Piece(A, "{}"))),
        Row(finish=Finish.CALLS),
    ]
    async with client(app_state(speaking(rows))) as http:
        body = {"messages": ASK, "stream": True, "include_reasoning": False, "logprobs": True}
        chunks = events((await http.post(CHAT, json=body)).text)
    check_chat_chunks(chunks)
    assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)
    tokens = [
        entry["token"] for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert tokens == ["why", "f"]


async def test_deltas_of_a_slow_client_merge_in_order() -> None:
    async with client(app_state(FakeLink(answering(lambda request: [list(ROWS)])))) as http:
        chunks = events((await http.post(CHAT, json={"messages": ASK, "stream": True})).text)
    check_chat_chunks(chunks)
    kinds = [next(iter(chunk["choices"][0]["delta"]), "") for chunk in chunks]
    assert kinds == ["role", "reasoning_content", "content", *["tool_calls"] * 4, ""]


async def test_a_template_of_the_request_where_the_server_takes_it() -> None:
    port = FakeLink(answering(words("ok")))
    parts = app_state(port)
    trusting = msgspec.structs.replace(parts.config.tokenizer, trust_request_chat_template=True)
    config = msgspec.structs.replace(parts.config, tokenizer=trusting)
    async with client(dataclasses.replace(parts, config=config)) as http:
        answer = await http.post(CHAT, json={"messages": ASK, "chat_template": "{{ messages }}"})
    assert answer.status_code == 200, answer.text
    assert port.of(SubmitText)[0].chat_template == "{{ messages }}"
