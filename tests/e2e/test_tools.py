"""Tools and reasoning through real processes and OpenAI's client: what is called, with what, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any

import jsonschema
import openai
import pytest

from benchmarks.demo_model.conversation import Exercise
from benchmarks.demo_model.tasks.tools import NO_TOOL, draw_tools, no_tool, tool_use

MODEL = "penstock-demo"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
TIMER: Any = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Set a timer.",
        "parameters": {
            "type": "object",
            "properties": {
                "minutes": {"type": "integer", "minimum": 1, "maximum": 90},
                "unit": {"enum": ["minute", "hour"]},
            },
            "required": ["minutes", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
HELLO: Any = [{"role": "user", "content": "What is 128 + 457?"}]
THINK: Any = {"chat_template_kwargs": {"enable_thinking": True}}


class Said:
    """One choice of a chat, streamed or whole, in the same words."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.finish = ""

    def call(self) -> list[tuple[str, Any]]:
        return [(call["name"], json.loads(call["arguments"])) for call in self.calls]

    def same(self, other: Said) -> bool:
        calls = [[(call["name"], call["arguments"]) for call in said.calls] for said in (self, other)]
        mine, others = ((said.content, said.reasoning, said.finish) for said in (self, other))
        return mine == others and calls[0] == calls[1]


def whole(answer: Any) -> list[Said]:
    found = []
    for choice in answer.choices:
        said = Said()
        message = choice.message
        said.content, said.reasoning = message.content or "", getattr(message, "reasoning_content", None) or ""
        assert (getattr(message, "reasoning", None) or "") == said.reasoning
        for call in message.tool_calls or ():
            assert call.type == "function"
            said.calls.append({"id": call.id, "name": call.function.name, "arguments": call.function.arguments})
        said.finish = choice.finish_reason
        found.append(said)
    return found


def streamed(chunks: Iterable[Any]) -> list[Said]:
    found: dict[int, Said] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        said = found.setdefault(choice.index, Said())
        delta = choice.delta
        said.content += delta.content or ""
        said.reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(said.calls), "function", "")
                said.calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert call.index == len(said.calls) - 1
                assert call.function.name is None
                said.calls[-1]["arguments"] += call.function.arguments
        said.finish = choice.finish_reason or said.finish
    return [found[index] for index in sorted(found)]


def chat(client: openai.OpenAI, **words: Any) -> Said:
    """The first choice, which must be the same streamed and whole."""
    words = {"model": MODEL, "temperature": 0, "max_tokens": 200, **words}
    told = whole(client.chat.completions.create(**words))
    flowed = streamed(client.chat.completions.create(stream=True, **words))
    assert len(told) == len(flowed)
    for one, other in zip(told, flowed, strict=True):
        assert one.same(other), (vars(one), vars(other))
        assert all(call["id"].startswith("call_") for said in (one, other) for call in said.calls)
    return told[0]


def exercises() -> list[Any]:
    found = []
    for seed in range(14):
        rng = Random(seed)
        tools = draw_tools(rng)
        found.append(pytest.param([tool.signature for tool in tools], tool_use(rng, tools), id=str(seed)))
    return found


@pytest.mark.parametrize(("tools", "exercise"), exercises())
def test_calls_and_answers_are_right(client: openai.OpenAI, tools: list[Any], exercise: Exercise) -> None:
    question, asked, *rest = exercise.messages
    messages: list[Any] = [question.as_openai()]
    said = chat(client, messages=messages, tools=tools)
    assert said.finish == "tool_calls"
    assert said.call() == [(call.name, call.arguments) for call in asked.calls]
    assert said.content == ""
    if rest:
        *results, answer = rest
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in said.calls
        ]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": result.content}
            for call, result in zip(said.calls, results, strict=True)
        ]
        said = chat(client, messages=messages, tools=tools)
        assert (said.content, said.calls, said.finish) == (answer.content, [], "stop")


def test_a_question_that_no_tool_answers(client: openai.OpenAI) -> None:
    for seed in range(4):
        rng = Random(100 + seed)
        tools = draw_tools(rng)
        question = no_tool(rng, tools).messages[0].as_openai()
        said = chat(client, messages=[question], tools=[tool.signature for tool in tools])
        assert (said.content, said.calls, said.finish) == (NO_TOOL, [], "stop")


def test_a_tool_that_is_required_is_called(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "set_timer"}}):
        for seed in range(3):
            said = chat(client, messages=HELLO, tools=[WEATHER, TIMER], tool_choice=choice, temperature=1, seed=seed)
            assert said.finish == "tool_calls"
            assert said.content == ""
            for name, arguments in said.call():
                tool = WEATHER if name == "get_weather" else TIMER
                jsonschema.validate(arguments, tool["function"]["parameters"])
            if choice != "required":
                assert [name for name, _ in said.call()] == ["set_timer"]


def test_strict_arguments_follow_their_schema(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Set a timer for 2000 minutes."}]
    for seed in range(4):
        said = chat(client, messages=messages, tools=[TIMER], temperature=1.5, seed=seed)
        for name, arguments in said.call():
            assert name == "set_timer"
            jsonschema.validate(arguments, TIMER["function"]["parameters"])


def test_allowed_tools_alone_are_called(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "set_timer"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    said = chat(client, messages=ASK, tools=[WEATHER, TIMER], tool_choice=choice)
    assert {name for name, _ in said.call()} == {"set_timer"}


def test_calls_in_parallel_and_one_by_one(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Rome and Paris?"}]
    said = chat(client, messages=messages, tools=[WEATHER])
    assert said.call() == [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Paris"})]
    said = chat(client, messages=messages, tools=[WEATHER], parallel_tool_calls=False)
    assert said.call() == [("get_weather", {"city": "Rome"})]
    assert said.finish == "tool_calls"


def test_none_calls_nothing(client: openai.OpenAI) -> None:
    said = chat(client, messages=ASK, tools=[WEATHER], tool_choice="none")
    assert said.calls == []
    assert said.finish in ("stop", "length")


def test_a_call_that_is_cut_off(client: openai.OpenAI) -> None:
    complete = chat(client, messages=ASK, tools=[WEATHER])
    ends = set()
    for most in range(1, 24, 3):
        said = chat(client, messages=ASK, tools=[WEATHER], max_tokens=most)
        ends.add(said.finish)
        assert said.content in ("", '<tool_call>\n{"name": "get_weather", "arguments": '[: len(said.content)])
        for call in said.calls:
            assert complete.calls[0]["arguments"].startswith(call["arguments"])
    assert "length" in ends
    said = chat(client, messages=ASK, tools=[WEATHER], stop=["Ro"])
    assert said.finish == "stop"
    assert said.calls[0]["arguments"] == '{"city": "'


def test_tools_and_a_format_together(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    for messages in (HELLO, ASK):
        for seed in range(2):
            said = chat(client, messages=messages, tools=[WEATHER], response_format=form, temperature=1, seed=seed)
            if said.calls:
                assert said.content == ""
            else:
                jsonschema.validate(json.loads(said.content), schema)


def test_several_choices_with_logprobs(client: openai.OpenAI) -> None:
    words: Any = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "n": 3, "seed": 5, "logprobs": True,
                  "max_tokens": 100, "temperature": 0.7}  # fmt: skip
    answer = client.chat.completions.create(**words)
    chunks = list(client.chat.completions.create(stream=True, **words))
    for one, other in zip(whole(answer), streamed(chunks), strict=True):
        assert one.same(other)
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = [entry.token for entry in choice.logprobs.content or ()]
        flowed = [
            entry.token
            for chunk in chunks
            for part in chunk.choices
            if part.index == choice.index and part.logprobs is not None
            for entry in part.logprobs.content or ()
        ]
        assert tokens == flowed
        assert "<tool_call>" in tokens


def test_reasoning_is_told_apart(client: openai.OpenAI) -> None:
    said = chat(client, messages=HELLO, extra_body=THINK)
    assert said.reasoning
    assert "think>" not in said.reasoning + said.content
    assert "585" in said.content
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, reasoning_effort="high")
    assert whole(answer)[0].same(said)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert thought is not None
    assert 0 < thought < answer.usage.completion_tokens


def test_no_reasoning_where_none_is_wanted(client: openai.OpenAI) -> None:
    thoughtful: Any = [{"role": "user", "content": "What is 128 + 457? Think step by step."}]
    assert chat(client, messages=thoughtful).reasoning
    answer = client.chat.completions.create(model=MODEL, messages=thoughtful, temperature=0, reasoning_effort="none")
    assert whole(answer)[0].reasoning == ""
    assert "585" in whole(answer)[0].content
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    hidden = chat(client, messages=thoughtful, extra_body={"include_reasoning": False})
    assert (hidden.reasoning, "585" in hidden.content) == ("", True)
    raw = chat(client, messages=thoughtful, extra_body={"separate_reasoning": False})
    assert raw.content.startswith("<think>")


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_a_budget_ends_the_reasoning(client: openai.OpenAI, budget: int) -> None:
    free = chat(client, messages=HELLO, extra_body=THINK)
    for name in ("thinking_token_budget", "max_thinking_tokens"):
        said = chat(client, messages=HELLO, extra_body={**THINK, name: budget})
        assert free.reasoning.startswith(said.reasoning.strip())
        assert len(said.reasoning) < len(free.reasoning)
        assert said.content
        assert said.finish == "stop"


def test_a_structure_begins_behind_the_reasoning(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}}
    said = chat(client, messages=HELLO, response_format=form, extra_body=THINK)
    assert said.reasoning
    assert isinstance(json.loads(said.content), int)
    said = chat(client, messages=HELLO, response_format=form, extra_body={**THINK, "thinking_token_budget": 3})
    assert isinstance(json.loads(said.content), int)


def test_reasoning_before_a_call(client: openai.OpenAI) -> None:
    for choice in ("auto", "required"):
        said = chat(client, messages=ASK, tools=[WEATHER], tool_choice=choice, extra_body=THINK)
        assert said.reasoning
        assert said.call() == [("get_weather", {"city": "Rome"})]
        assert said.content == ""


def test_developer_messages_and_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "128 + 457?"}]
    system = {"role": "developer", "content": "You are a helpful assistant."}
    messages: Any = [system, {"role": "user", "content": parts}]
    assert "585" in chat(client, messages=messages).content


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "nonsense", "nonsense": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice.function.name"),
        ({"tools": [{"type": "function",
                     "function": {"name": "f", "parameters": {"type": "nonsense"}, "strict": True}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"chat_template": "x"}}, "chat_template"),
        ({"extra_body": {"thinking_token_budget": 2, "max_thinking_tokens": 3}}, "max_thinking_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client: openai.OpenAI, words: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **words})
    assert caught.value.param == param


def test_a_budget_and_calls_with_drafts(client: openai.OpenAI) -> None:
    """Drafts are tried and taken back within the grammar: a prediction changes nothing."""
    for words in ({"messages": HELLO, "extra_body": {**THINK, "thinking_token_budget": 6}},
                  {"messages": ASK, "tools": [WEATHER], "tool_choice": "required",
                   "extra_body": {**THINK, "thinking_token_budget": 4}}):  # fmt: skip
        free = chat(client, **words)
        for text in (f"<think>\n{free.reasoning}\n</think>\n\n{free.content}", "<think>\nThe user asks for\n</think>"):
            assert chat(client, **words, prediction={"type": "content", "content": text}).same(free)
