"""The Messages API through real processes and Anthropic's client: what is said, thought, called and counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.server import Server
from tests.e2e.test_tools import MODEL, WEATHER

SUM = "What is 128 + 457?"
TOOL: Any = {"name": "get_weather", "description": WEATHER["function"]["description"],
             "input_schema": WEATHER["function"]["parameters"]}  # fmt: skip


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def say(client: anthropic.Anthropic, messages: Any, **words: Any) -> Any:
    """A message, which must be the same streamed and whole."""
    asked = messages if isinstance(messages, list) else [{"role": "user", "content": messages}]
    body = {"temperature": 0, **words.pop("extra_body", {})}
    words = {"model": MODEL, "max_tokens": 200, "messages": asked, "extra_body": body, **words}
    told = client.messages.create(**words)
    with client.messages.stream(**words) as stream:
        kinds = [event.type for event in stream]
        flowed = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert plain(told) == plain(flowed)
    return told


def plain(message: Any) -> Any:
    blocks = [{k: v for k, v in block.model_dump().items() if k not in ("id", "parsed_output")}
              for block in message.content]  # fmt: skip
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens


def test_an_answer(claude: anthropic.Anthropic) -> None:
    said = say(claude, SUM, system="You are a helpful assistant.")
    assert "585" in said.content[0].text
    assert said.stop_reason == "end_turn"
    blocks: Any = [{"type": "text", "text": SUM, "cache_control": {"type": "ephemeral"}}]
    assert say(claude, [{"role": "user", "content": blocks}]).content[0].text == say(claude, SUM).content[0].text


def test_a_call_and_its_result(claude: anthropic.Anthropic) -> None:
    said = say(claude, "What is the weather in Rome?", tools=[TOOL])
    (call,) = said.content
    assert (call.name, call.input, said.stop_reason) == ("get_weather", {"city": "Rome"}, "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id,
                   "content": [{"type": "text", "text": '{"weather": "sunny", "temperature": 21}'}]}  # fmt: skip
    messages: Any = [{"role": "user", "content": "What is the weather in Rome?"},
                     {"role": "assistant", "content": [call.model_dump()]},
                     {"role": "user", "content": [result]}]  # fmt: skip
    answer = say(claude, messages, tools=[TOOL])
    assert "sunny" in answer.content[0].text
    two = say(claude, "What is the weather in Rome and Paris?", tools=[TOOL])
    assert [block.input["city"] for block in two.content] == ["Rome", "Paris"]
    one = say(claude, "What is the weather in Rome and Paris?", tools=[TOOL],
              tool_choice={"type": "auto", "disable_parallel_tool_use": True})  # fmt: skip
    assert [block.input["city"] for block in one.content] == ["Rome"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_that_is_required_is_called(claude: anthropic.Anthropic, choice: Any) -> None:
    said = say(claude, SUM, tools=[TOOL], tool_choice=choice)
    assert [block.type for block in said.content] == ["tool_use"]
    assert said.stop_reason == "tool_use"


def test_no_tool_is_called_where_none_may_be(claude: anthropic.Anthropic) -> None:
    said = say(claude, "What is the weather in Rome?", tools=[TOOL], tool_choice={"type": "none"})
    assert all(block.type == "text" for block in said.content)


def test_thinking(claude: anthropic.Anthropic) -> None:
    said = say(claude, SUM, thinking={"type": "enabled", "budget_tokens": 100})
    thought, text = said.content
    assert (thought.type, text.type) == ("thinking", "text")
    assert "585" in text.text
    short = say(claude, SUM, thinking={"type": "enabled", "budget_tokens": 3})
    assert len(short.content[0].thinking) < len(thought.thinking)
    hidden = say(claude, SUM, thinking={"type": "enabled", "budget_tokens": 100, "display": "omitted"})
    assert [block.text for block in hidden.content] == [text.text]
    none = say(claude, SUM + " Think step by step.", thinking={"type": "disabled"})
    assert [block.type for block in none.content] == ["text"]


def test_how_it_ends(claude: anthropic.Anthropic) -> None:
    cut = say(claude, "Tell me a short story.", max_tokens=5)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    stopped = say(claude, SUM, stop_sequences=["457"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "457")
    begun = say(claude, [{"role": "user", "content": SUM}, {"role": "assistant", "content": "128 + 457 ="}])
    assert "585" in begun.content[0].text
    assert "128" not in begun.content[0].text


def test_structures(claude: anthropic.Anthropic) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    said = say(claude, SUM, extra_body={"output_config": form})
    assert int(said.content[0].text)


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": SUM}]
    for words in ({}, {"system": "You are a helpful assistant."}, {"tools": [TOOL]}):
        counted: Any = claude.messages.count_tokens(model=MODEL, messages=asked, **words)  # type: ignore[arg-type]
        usage = claude.messages.create(model=MODEL, max_tokens=1, messages=asked, **words).usage  # type: ignore[call-overload]
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_counts_are_of_the_prompt_that_the_parameters_make(claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": SUM}]
    counts = set()
    for words in (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "disabled"}},
        {"extra_body": {"output_config": {"effort": "high"}}},
    ):  # fmt: skip
        words: Any
        counted = claude.messages.count_tokens(model=MODEL, messages=asked, **words).input_tokens
        usage = claude.messages.create(model=MODEL, max_tokens=1100, messages=asked, **words).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        counts.add(counted)
    assert len(counts) > 1


def test_more_than_the_context_holds_is_what_it_holds(claude: anthropic.Anthropic, server: Server) -> None:
    context = server.get("/v1/models")["data"][0]["max_model_len"]
    said = say(claude, SUM, max_tokens=100_000)
    assert said.stop_reason == "end_turn"
    long: Any = [{"role": "user", "content": "a b c d " * ((context - 80) // 4)}]
    with claude.messages.stream(
        model=MODEL, max_tokens=100_000, messages=long, extra_body={"ignore_eos": True}
    ) as stream:
        filled = stream.get_final_message()
    assert filled.stop_reason == "model_context_window_exceeded"
    usage = filled.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens == context


def test_a_document(claude: anthropic.Anthropic) -> None:
    document: Any = {"type": "document", "title": "Sums",
                     "source": {"type": "text", "media_type": "text/plain", "data": SUM}}  # fmt: skip
    asked: Any = [{"role": "user", "content": [document]}]
    counted = claude.messages.count_tokens(model=MODEL, messages=asked).input_tokens
    assert counted > claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": SUM}]).input_tokens
    assert say(claude, asked).content[0].type == "text"


def test_context_management_and_the_request_id(claude: anthropic.Anthropic) -> None:
    edits: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    asked: Any = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": SUM}]}
    raw = claude.beta.messages.with_raw_response.create(context_management=edits, **asked)
    said = raw.parse()
    assert said.context_management is not None
    assert said.context_management.applied_edits == []
    assert said._request_id == raw.headers["request-id"] == raw.headers["x-request-id"]
    assert "x-penstock-ignored" not in raw.headers
    compact: Any = {"edits": [{"type": "compact_20260112"}]}
    with claude.beta.messages.with_streaming_response.create(
        context_management=compact, stream=True, **asked
    ) as response:
        assert response.headers["x-penstock-ignored"] == "context_management.edits[0]"


def test_models(claude: anthropic.Anthropic) -> None:
    (model,) = list(claude.models.list())
    assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")
    assert claude.models.retrieve(MODEL) == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.models.retrieve("nobody")
    assert caught.value.request_id


async def test_in_an_event_loop(server: Server) -> None:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", timeout=120) as client:
        async with client.messages.stream(
            model=MODEL, max_tokens=100, messages=[{"role": "user", "content": SUM}], extra_body={"temperature": 0}
        ) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        assert "585" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 500}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "prompt is too long: "),
        ({"extra_body": {"container": "x"}}, "container"),
    ],
)
def test_refusals_name_the_field(claude: anthropic.Anthropic, words: dict[str, Any], told: str) -> None:
    words = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": SUM}], **words}
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**words)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert told in body["error"]["message"]
    assert body["request_id"] == caught.value.request_id == caught.value.response.headers["x-request-id"]


def test_an_unknown_model(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="nobody", max_tokens=5, messages=[{"role": "user", "content": SUM}])
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"
