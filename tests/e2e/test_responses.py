"""The Responses API through real processes and OpenAI's client: what is said, kept, gone on from and cancelled."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.e2e.server import Server
from tests.e2e.test_tools import MODEL, WEATHER

SUM = "What is 128 + 457?"
TOM: Any = [{"role": "user", "content": "Tom is 5 years old."}]
TOOL: Any = {"type": "function", **WEATHER["function"]}


class Person(pydantic.BaseModel):
    name: str
    age: int


def respond(client: openai.OpenAI, **words: Any) -> Any:
    """A response, which must be the same streamed and whole."""
    words = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, **words}
    told = client.responses.create(**words)
    with client.responses.stream(**words) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    flowed = events[-1].response
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{told.status}"
    assert plain(told) == plain(flowed)
    assert client.responses.retrieve(told.id).output == told.output
    return told


def plain(response: Any) -> Any:
    names = {"id", "call_id"}
    items = [{k: v for k, v in item.model_dump().items() if k not in names | {"parsed_arguments"}}
             for item in response.output]  # fmt: skip
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items, response.status, response.incomplete_details, response.usage.output_tokens


def test_an_answer_and_what_follows_from_it(client: openai.OpenAI) -> None:
    first = respond(client, input=SUM, instructions="You are a helpful assistant.", metadata={"a": "b"})
    assert "585" in first.output_text
    assert first.metadata == {"a": "b"}
    assert first.usage.input_tokens + first.usage.output_tokens == first.usage.total_tokens
    again = respond(client, input=[{"role": "user", "content": [{"type": "input_text", "text": "What is 2 + 2?"}]}],
                    previous_response_id=first.id)  # fmt: skip
    assert "4" in again.output_text
    assert again.previous_response_id == first.id
    assert again.usage.input_tokens > first.usage.input_tokens
    (item,) = client.responses.input_items.list(again.id).data
    assert item.content[0].text == "What is 2 + 2?"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="hi", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_a_call_and_its_result(client: openai.OpenAI) -> None:
    said = respond(client, input="What is the weather in Rome?", tools=[TOOL])
    (call,) = said.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id,
                   "output": '{"weather": "sunny", "temperature": 21}'}  # fmt: skip
    kept = respond(client, previous_response_id=said.id, input=[result], tools=[TOOL])
    listed: Any = [{"role": "user", "content": "What is the weather in Rome?"}, call.model_dump(), result]
    sent = respond(client, input=listed, tools=[TOOL], store=True)
    assert kept.output_text == sent.output_text
    assert "sunny" in kept.output_text
    named = respond(client, input=SUM, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
    assert [item.name for item in named.output] == ["get_weather"]


LINES: Any = {
    "type": "custom", "name": "lines", "description": "Write lines.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "say \\"" WORD "\\"" LF\nWORD: /[a-z]{1,9}/\n'
                                                                  "%import common.LF"},
}  # fmt: skip
SPACE: Any = {"type": "namespace", "name": "weather", "description": "Weather.", "tools": [TOOL]}


def test_custom_tools_and_namespaces(client: openai.OpenAI) -> None:
    tools: Any = [LINES, SPACE, {"type": "web_search"}]
    said = respond(client, input="Say hello.", tools=tools, tool_choice={"type": "custom", "name": "lines"})
    (call,) = said.output
    assert (call.type, call.name) == ("custom_tool_call", "lines")
    assert re.fullmatch(r'say "[a-z]{1,9}"\n', call.input)
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    choice: Any = {"type": "function", "name": "get_weather", "namespace": "weather"}
    told = respond(client, previous_response_id=said.id, input=[result, *TOM], tools=tools, tool_choice=choice)
    (asked,) = told.output
    assert (asked.type, asked.name, asked.namespace) == ("function_call", "get_weather", "weather")
    listed: Any = [*TOM, call.model_dump(exclude_none=True), result, asked.model_dump(exclude_none=True)]
    listed.append({"type": "function_call_output", "call_id": asked.call_id, "output": "{}"})
    assert respond(client, input=listed, tools=tools).status == "completed"


def test_a_custom_tool_of_a_chat(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r'[a-z]{1,9}: "\d"\n?'}}
    tool: Any = {"type": "custom", "custom": {"name": "lines", "format": form}}
    words: Any = {"model": MODEL, "messages": TOM, "tools": [tool], "tool_choice": "required", "seed": 1}
    whole = client.chat.completions.create(**words, parallel_tool_calls=False).choices[0].message.tool_calls
    assert whole is not None
    (call,) = whole
    assert call.type == "custom"
    assert re.fullmatch(r'[a-z]{1,9}: "\d"\n?', call.custom.input)
    stream = client.chat.completions.create(**words, parallel_tool_calls=False, stream=True)
    deltas = [delta.model_dump() for chunk in stream for delta in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0]["type"] == "custom"
    assert "".join(delta["custom"]["input"] for delta in deltas) == call.custom.input


def test_reasoning_is_an_item(client: openai.OpenAI) -> None:
    said = respond(client, input=SUM, reasoning={"effort": "high"})
    thought, message = said.output
    assert thought.type == "reasoning"
    assert thought.content[0].text
    assert "585" in message.content[0].text
    assert 0 < said.usage.output_tokens_details.reasoning_tokens < said.usage.output_tokens
    assert "585" in respond(client, previous_response_id=said.id, input=SUM).output_text


def test_structures_are_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input="Tom is 5 years old.", text_format=Person, temperature=0)
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.age == 5
    assert parsed.output_parsed.name.startswith("Tom")
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}}
    assert isinstance(json.loads(respond(client, input=SUM, text=form).output_text), int)
    chat = client.chat.completions.parse(model=MODEL, messages=TOM, response_format=Person, temperature=0)
    assert isinstance(chat.choices[0].message.parsed, Person)
    beta = client.beta.chat.completions.parse(model=MODEL, messages=TOM, response_format=Person, temperature=0)
    assert beta.choices[0].message.parsed == chat.choices[0].message.parsed


def test_what_was_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    said = respond(client, input="Tell me a short story.", max_output_tokens=5)
    assert said.status == "incomplete"
    assert said.incomplete_details.reason == "max_output_tokens"
    assert said.usage.output_tokens == 5


def test_logprobs(client: openai.OpenAI) -> None:
    said = respond(client, input=SUM, include=["message.output_text.logprobs"], top_logprobs=2)
    part = said.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs).startswith(part.text)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_in_the_background(client: openai.OpenAI, server: Server) -> None:
    begun = client.responses.create(model=MODEL, input=SUM, background=True, temperature=0)
    assert (begun.status, begun.output) == ("in_progress", [])
    done = server.until(f"/v1/responses/{begun.id}", lambda found: found["status"] != "in_progress")
    assert "585" in done["output"][0]["content"][0]["text"]
    assert client.responses.cancel(begun.id).status == "completed"
    before = server.aborted()
    long = client.responses.create(
        model=MODEL,
        input="Tell me a story.",
        background=True,
        max_output_tokens=4000,
        extra_body={"min_tokens": 4000, "ignore_eos": True},
    )
    server.until("/health", lambda found: found["engine"]["running"])  # before, no engine would have to end it
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
    server.until("/health", lambda _: server.aborted() > before)  # the output did not end by itself
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(client.responses.create(model=MODEL, input=SUM, max_output_tokens=1).id)


async def test_many_at_once(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as client:
        asked = [client.responses.create(model=MODEL, input=f"What is {n} + 1?", temperature=0) for n in range(10, 18)]
        answers = await asyncio.gather(*asked)
        assert all(str(n) in answer.output_text for n, answer in zip(range(11, 19), answers, strict=True))
        stream = await client.responses.create(model=MODEL, input=SUM, temperature=0, stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert "585" in text


def test_a_client_tries_again(server: Server) -> None:
    """The first answer is a 503 on the way; the client's own retry gets the true one."""
    tries: list[int] = []

    class Flaky(httpx.BaseTransport):
        def __init__(self) -> None:
            self.inner = httpx.HTTPTransport()

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            tries.append(1)
            if len(tries) == 1:
                return httpx.Response(503, headers={"retry-after-ms": "1"}, json={"error": {"message": "busy"}})
            return self.inner.handle_request(request)

        def close(self) -> None:
            self.inner.close()

    try:
        http: Any = httpx.Client(transport=Flaky())
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2, http_client=http)
    except TypeError as error:
        pytest.skip(f"this openai takes no client of httpx: {error}")
    with client:
        answer = client.responses.create(model=MODEL, input=SUM, temperature=0)
    assert "585" in answer.output_text
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ({"tools": [{"type": "nothing_known"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}},
         "text.format.schema"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(client: openai.OpenAI, words: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": MODEL, "input": SUM, **words})
    assert caught.value.param == param
